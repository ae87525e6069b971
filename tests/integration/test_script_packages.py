"""The training script with the packages that it asks for by flag: tokenizers and megatron-core."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import pretrain_gpt
from gpt.data import build_tokenizer
from megatron_fsdp import ConfigError
from tests.integration.megatron_training import indexed_dataset

TEXT = "the quick brown fox jumps over the lazy dog; zwölf Boxkämpfer jagen Eva. "
DOCUMENT = TEXT * 8 + "\n\n"
TINY = (
    "--num-layers 1 --hidden-size 12 --num-attention-heads 2 --seq-length 9 --micro-batch-size 4 --train-iters 4 "
    "--lr 0.01 --log-interval 1 --eval-iters 1 --num-tokens-to-generate 0 --distributed-backend gloo --save run"
)


@pytest.fixture(autouse=True)
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as one process without torchrun, in a new folder that holds a text."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(DOCUMENT * 5, encoding="utf-8")


@pytest.fixture
def tokenizer_file() -> Path:
    """Return a byte-level BPE of 300 tokens that puts special ones around a text, as many published ones do."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in special]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    path = Path("tokenizer.json").absolute()
    tokenizer.save(str(path))
    return path


def train(flags: str) -> list[dict[str, Any]]:
    assert pretrain_gpt.main([*TINY.split(), *flags.split()]) == 0
    return [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]


def test_a_text_comes_back_from_fewer_tokens_than_bytes(tokenizer_file: Path) -> None:
    tokenizer = build_tokenizer(tokenizer_file)
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    assert len(tokens) < len(TEXT.encode()) / 2
    assert tokenizer.vocabulary_size == 300
    assert max(tokens) < 300


def test_special_tokens_are_not_added_to_a_text_and_one_of_them_ends_documents(tokenizer_file: Path) -> None:
    tokenizer = build_tokenizer(tokenizer_file)
    assert tokenizer.end_of_document == 1
    assert not {0, 1} & set(tokenizer.encode(TEXT))
    assert tokenizer.decode([*tokenizer.encode("fox"), 1]) == "fox</s>"


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0", "model": {"type": "nothing"}}'])
def test_a_file_that_is_no_tokenizer_is_refused_by_name(content: str) -> None:
    Path("other.json").write_text(content)
    with pytest.raises(ConfigError, match=r"other\.json cannot be read by the package tokenizers"):
        build_tokenizer(Path("other.json"))


def test_indexed_documents_of_the_tokenizer_can_be_trained_on(
    tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = [*build_tokenizer(tokenizer_file).encode(DOCUMENT), 1]
    builder = indexed_dataset.IndexedDatasetBuilder("a.bin", dtype=indexed_dataset.DType.optimal_dtype(300))
    for _ in range(5):
        builder.add_document(tokens, [len(tokens)])
    builder.finalize("a.idx")
    flags = f"--data-path a --split 80,20,0 --tokenizer-model {tokenizer_file} --num-tokens-to-generate 3 --prompt fox"
    rows = train(flags)
    assert [row["iteration"] for row in rows if "lm_loss" in row] == [1, 2, 3, 4]
    # An untrained model of 384 tokens, 300 padded to a multiple of 128, is about as good as a guess.
    assert rows[0]["lm_loss"] == pytest.approx(5.95, abs=0.3)
    assert "sample at temperature 0.7:\nfox" in capsys.readouterr().out
