"""Indexed data through megatron-core: what the command writes, how runs take it, and what is refused."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch

import generate_gpt
import preprocess_data
import pretrain_gpt
from gpt.data import DataError
from gpt.indexed import is_indexed, megatron_datasets
from gpt.training_data import load_data

CPU = torch.device("cpu")

TINY = (
    "--num-layers 1 --hidden-size 12 --num-attention-heads 2 --seq-length 9 --micro-batch-size 4 --train-iters 6 "
    "--lr 0.01 --log-interval 1 --eval-iters 1 --num-tokens-to-generate 2 --distributed-backend gloo --save run"
)


pytestmark = pytest.mark.usefixtures("plain_start")


def written(flags: str, *inputs: tuple[str, str]) -> list[bytes]:
    """Preprocess files (name, content) and return the documents, as bytes."""
    for name, content in inputs:
        Path(name).write_bytes(content.encode())
    names = [name for name, _ in inputs]
    assert preprocess_data.main(["--input", *names, "--output-prefix", "out/a", *flags.split()]) == 0
    dataset = megatron_datasets("indexed_dataset").IndexedDataset("out/a")
    return [bytes(dataset[number].tolist()) for number in range(len(dataset))]


def refusal(capsys: pytest.CaptureFixture[str], name: str, content: bytes, flags: str = "") -> str:
    Path(name).write_bytes(content)
    assert preprocess_data.main(["--input", name, "--output-prefix", "a", *flags.split()]) == 2
    assert not is_indexed("a")
    return capsys.readouterr().err


def test_every_line_of_jsonl_is_a_document() -> None:
    lines = '{"text": "one"}\n\n{"text": ""}\n{"text": "zwölf"}\n'
    assert written("", ("in.jsonl", lines)) == [b"one", "zwölf".encode()]


def test_the_key_can_be_named() -> None:
    assert written("--json-keys body", ("in.json", '{"body": "x", "text": "y"}')) == [b"x"]


def test_a_paragraph_of_text_is_a_document_and_nothing_is_lost() -> None:
    text = "\n\na\nb\n\n  \nc\r\n\nd"
    documents = written("", ("in.txt", text))
    assert documents == [b"\n\n", b"a\nb\n\n  \n", b"c\r\n\n", b"d"]
    assert b"".join(documents) == text.encode()


def test_documents_end_with_their_token_when_asked() -> None:
    assert written("--append-eod", ("in.txt", "a\n\nb"), ("more.txt", "c")) == [b"a\n\n\0", b"b\0", b"c\0"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("in.jsonl", b'{"text": "a"}\nno', "in.jsonl:2: wanted an object with a text under 'text'"),
        ("in.jsonl", b'{"text": 3}', "in.jsonl:1: 'text' is int, wanted a text"),
        ("in.jsonl", b'["text"]', "wanted an object"),
        ("in.txt", b"\xff\xff", "in.txt is no UTF-8 text"),
        ("in.txt", b"", "hold no text"),
    ],
)
def test_an_input_without_sense_is_named_and_leaves_no_index(
    capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    assert message in refusal(capsys, name, content)


def test_a_missing_input_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess_data.main(["--input", "nowhere", "--output-prefix", "a"]) == 2
    assert "cannot read nowhere: No such file" in capsys.readouterr().err


def train(flags: str) -> list[float]:
    assert pretrain_gpt.main([*TINY.split(), *flags.split()]) == 0
    rows = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    return [row["lm_loss"] for row in rows if "lm_loss" in row]


def test_training_on_a_blend_resumes_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("a", "the quick brown fox\n\n"), ("b", "jumps over\n\n")):
        Path(f"{name}.txt").write_text(text * 60)
        assert preprocess_data.main(["--input", f"{name}.txt", "--output-prefix", name]) == 0
    flags = "--data-path 0.3 a 0.7 b --split 9,1,0"
    wanted = train(flags)
    shutil.rmtree("run")
    train(f"{flags} --exit-interval 3")
    assert train(f"{flags} --load run") == wanted
    printed = capsys.readouterr().out
    assert "bytes from 0.3 a 0.7 b" in printed
    assert "will not continue exactly" not in printed


def test_training_on_numbers_samples_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("1 2 3 4 5 6 7\n\n" * 60)
    tokenizer = "--tokenizer-type NullTokenizer --vocab-size 9"
    assert preprocess_data.main(["--input", "in.txt", "--output-prefix", "n", *tokenizer.split()]) == 0
    train(f"--data-path n --split 9,1,0 {tokenizer} --make-vocab-size-divisible-by 5 --prompt 1 --temperature 0")
    printed = capsys.readouterr().out
    assert "tokens from n" in printed
    assert " bits per token: " in printed
    sample = printed.split(" sample at temperature 0.0:\n")[1].split("\n")[0]
    assert sample.startswith("1 ")
    assert len(sample.split()) == 3
    assert generate_gpt.main("--load run --prompt 1 --temperature 0 --num-tokens-to-generate 2".split()) == 0
    assert capsys.readouterr().out.strip() == sample.strip()


def test_a_prompt_that_the_tokenizer_refuses_is_said_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("1 2 3 4 5 6 7\n\n" * 60)
    tokenizer = "--tokenizer-type NullTokenizer --vocab-size 9"
    assert preprocess_data.main(["--input", "in.txt", "--output-prefix", "n", *tokenizer.split()]) == 0
    flags = f"--data-path n --split 9,1,0 {tokenizer}"
    assert pretrain_gpt.main([*TINY.split(), *flags.split(), "--prompt", "def "]) == 2
    assert "found 'def ', wanted numbers from 0 to 9" in capsys.readouterr().err
    assert not Path("run").exists()
    train(f"{flags} --num-tokens-to-generate 0")


def write(prefix: str, num_documents: int, first: int = 0) -> str:
    """Write documents of three equal tokens each: ``first``, ``first + 1``, ..."""
    text = "\n\n".join(f"{number} {number} {number}" for number in range(first, first + num_documents))
    Path("in.txt").write_text(text)
    flags = f"--input in.txt --output-prefix {prefix} --tokenizer-type NullTokenizer --vocab-size 255"
    assert preprocess_data.main(flags.split()) == 0
    return prefix


def arguments(data_path: object, **changes: object) -> argparse.Namespace:
    given = {"seq_length": 4, "seed": 3, "split": None, "eval_iters": 1, "padded_vocab_size": 256}
    sizes = {"train_iters": 40, "global_batch_size": 5}
    return argparse.Namespace(data_path=data_path, tokenizer_type="ByteTokenizer", **(given | sizes | changes))


def test_training_and_validation_share_no_document() -> None:
    data = load_data(arguments([write("a", 40)], split="3,1,0", eval_iters=40))
    train, valid = (set(part.batch(range(200), CPU).flatten().tolist()) for part in (data.train, data.valid))
    assert train <= set(range(30))
    assert valid <= set(range(30, 40))
    assert data.num_tokens == 90


def test_an_epoch_takes_every_piece_once_and_the_next_in_another_order() -> None:
    # 90 tokens, of which 22 pieces of 4 have a target each: two epochs are 44 samples and a piece across them.
    samples = load_data(arguments([write("a", 30)], split="1,0,0", eval_iters=0, train_iters=44)).train
    rows = samples.batch(range(44), CPU)
    assert set(rows.flatten().tolist()) == set(range(30))
    assert rows[:22].tolist() != rows[22:].tolist()
    assert torch.equal(samples.batch(range(20, 24), CPU), rows[20:24])


@pytest.mark.parametrize(("weights", "share"), [(("0.25", "0.75"), 0.25), ((), 1 / 3)])
def test_a_blend_follows_its_weights_or_else_the_sizes(weights: tuple[str, ...], share: float) -> None:
    prefixes = [write("a", 30), write("b", 60, first=100)]
    words = [word for pair in zip(weights, prefixes, strict=True) for word in pair] if weights else prefixes
    rows = load_data(arguments(words, split="1,0,0", eval_iters=0)).train.batch(range(200), CPU)
    assert (rows[:, 0] < 100).double().mean().item() == pytest.approx(share, abs=0.01)


def test_a_token_beyond_the_vocabulary_names_the_data() -> None:
    data = load_data(arguments([write("a", 40)], padded_vocab_size=20, split="1,1,0"))
    with pytest.raises(DataError, match=r"a has token \d\d, the vocabulary 20"):
        data.valid.batch(range(5), CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"the validation part of a has 0 tokens \(--split 969,30,1 of 9 documents\); --seq-length 4 needs 5"),
        ({"split": "0,1,0"}, "the training part"),
        ({"split": "0,0,0"}, "wanted three numbers >= 0"),
        ({"split": "1,1,1,1"}, "wanted three numbers >= 0"),
        ({"data_path": ["nowhere"]}, r"nowhere\.idx and nowhere\.bin are wanted"),
        ({"data_path": ["-1", "a", "1", "a"]}, "wanted numbers > 0"),
        ({"data_path": ["nan", "a", "1", "a"]}, "wanted numbers > 0"),
    ],
)
def test_data_that_cannot_be_taken_is_refused(changes: dict[str, object], message: str) -> None:
    args = arguments([write("a", 9)])
    vars(args).update(changes)
    with pytest.raises(DataError, match=message):
        load_data(args)


def test_without_validation_no_part_is_needed_for_it() -> None:
    assert load_data(arguments(Path(write("a", 9)), eval_iters=0)).num_tokens == 27


# megatron-core closes what it could not open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("suffix", "keep"), [("idx", 3), ("idx", 40), ("bin", 35)])
def test_a_file_that_is_cut_off_is_refused(suffix: str, keep: int) -> None:
    path = Path(f"{write('a', 9)}.{suffix}")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"cannot read a\.idx; copy or write it anew"):
        load_data(arguments(["a"], eval_iters=0))


def test_data_written_anew_is_read_anew() -> None:
    assert load_data(arguments([write("a", 40)], eval_iters=0)).train.batch(range(200), CPU).max() == 38
    assert load_data(arguments([write("a", 10)], eval_iters=0)).train.batch(range(200), CPU).max() == 9
