"""The command that writes indexed data: documents of JSONL and of text, and a training run on its output."""

import json
import shutil
from pathlib import Path

import pytest

import preprocess_data
import pretrain_gpt
from gpt.indexed import is_indexed, open_indexed

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
    dataset = open_indexed("out/a")
    return [bytes(dataset.between(number, number + 1).tolist()) for number in range(len(dataset))]


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


def test_a_prompt_that_the_tokenizer_refuses_is_said_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("1 2 3 4 5 6 7\n\n" * 60)
    tokenizer = "--tokenizer-type NullTokenizer --vocab-size 9"
    assert preprocess_data.main(["--input", "in.txt", "--output-prefix", "n", *tokenizer.split()]) == 0
    flags = f"--data-path n --split 9,1,0 {tokenizer}"
    assert pretrain_gpt.main([*TINY.split(), *flags.split(), "--prompt", "def "]) == 2
    assert "found 'def ', wanted numbers from 0 to 9" in capsys.readouterr().err
    assert not Path("run").exists()
    train(f"{flags} --num-tokens-to-generate 0")
