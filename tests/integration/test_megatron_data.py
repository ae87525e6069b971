"""Indexed data through megatron-core: runs train on it, and refuse wrong files and options."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from gpt.data import DataError
from gpt.indexed import load_data
from tests.integration.megatron_training import indexed_dataset

CPU = torch.device("cpu")

TINY = (
    "--num-layers 1 --hidden-size 12 --num-attention-heads 2 --seq-length 9 --micro-batch-size 4 --train-iters 6 "
    "--lr 0.01 --log-interval 1 --eval-iters 1 --num-tokens-to-generate 2 --distributed-backend gloo --save run"
)


pytestmark = [
    pytest.mark.usefixtures("plain_start"),
    # megatron-core closes files that it could not open.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def write_documents(prefix: str, documents: list[list[int]]) -> str:
    """Write an indexed data set as Megatron's tool does."""
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=indexed_dataset.DType.optimal_dtype(256))
    for tokens in documents:
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def train(flags: str) -> list[float]:
    assert pretrain_gpt.main([*TINY.split(), *flags.split()]) == 0
    rows = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    return [row["lm_loss"] for row in rows if "lm_loss" in row]


def test_training_on_a_blend_resumes_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("a", b"the quick brown fox"), ("b", b"jumps over")):
        write_documents(name, [list(text)] * 60)
    flags = "--data-path 0.3 a 0.7 b --split 9,1,0"
    wanted = train(flags)
    shutil.rmtree("run")
    train(f"{flags} --exit-interval 3")
    assert train(f"{flags} --load run") == wanted
    printed = capsys.readouterr().out
    assert "bytes from 0.3 a 0.7 b" in printed
    assert "will not continue exactly" not in printed


def write(prefix: str, num_documents: int, first: int = 0) -> str:
    """Write documents of three equal tokens each: ``first``, ``first + 1``, ..."""
    return write_documents(prefix, [[number] * 3 for number in range(first, first + num_documents)])


def arguments(data_path: object, **changes: object) -> argparse.Namespace:
    given = {"seq_length": 4, "seed": 3, "split": None, "eval_iters": 1, "padded_vocab_size": 256}
    sizes = {"train_iters": 40, "global_batch_size": 5, "num_workers": 0}
    return argparse.Namespace(data_path=data_path, tokenizer_model=None, **(given | sizes | changes))


@pytest.mark.parametrize(("weights", "share"), [(("0.25", "0.75"), 0.25), ((), 1 / 3)])
def test_a_blend_follows_its_weights_or_else_the_sizes(weights: tuple[str, ...], share: float) -> None:
    prefixes = [write("a", 30), write("b", 60, first=100)]
    words = [word for pair in zip(weights, prefixes, strict=True) for word in pair] if weights else prefixes
    rows = load_data(arguments(words, split="1,0,0", eval_iters=0)).train(range(200), CPU)
    assert (rows[:, 0] < 100).double().mean().item() == pytest.approx(share, abs=0.01)


def test_a_token_beyond_the_vocabulary_names_the_data() -> None:
    data = load_data(arguments([write("a", 40)], padded_vocab_size=20, split="1,1,0"))
    with pytest.raises(DataError, match=r"found token \d\d, but the vocabulary has 20"):
        data.valid(range(5), CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"the validation part of a has 0 tokens \(--split 969,30,1 of 9 documents\); --seq-length 4 needs 5"),
        ({"split": "0,1,0"}, "the training part"),
        ({"split": "0,0,0"}, "--split 0,0,0 .* three shares"),
        ({"split": "1,1,1,1"}, "--split 1,1,1,1 .* three shares"),
        ({"data_path": ["1", "nowhere"]}, "--data-path 1 nowhere, .*fix: give prefixes"),
        ({"data_path": ["-1", "a", "1", "a"]}, "give prefixes, or weights > 0"),
        ({"data_path": ["nan", "a", "1", "a"]}, "give prefixes, or weights > 0"),
    ],
)
def test_data_that_cannot_be_taken_is_refused(changes: dict[str, object], message: str) -> None:
    args = arguments([write("a", 9)])
    vars(args).update(changes)
    with pytest.raises(DataError, match=message):
        load_data(args)


def test_without_validation_no_part_is_needed_for_it() -> None:
    assert load_data(arguments([write("a", 9)], eval_iters=0)).num_tokens == 27


@pytest.mark.parametrize(("suffix", "keep"), [("idx", 3), ("idx", 40), ("bin", 35)])
def test_a_file_that_is_cut_off_is_refused(suffix: str, keep: int) -> None:
    path = Path(f"{write('a', 9)}.{suffix}")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="--data-path a, "):
        load_data(arguments(["a"], eval_iters=0))


def test_rewritten_data_is_read_again() -> None:
    assert load_data(arguments([write("a", 40)], eval_iters=0)).train(range(200), CPU).max() == 38
    assert load_data(arguments([write("a", 10)], eval_iters=0)).train(range(200), CPU).max() == 9
