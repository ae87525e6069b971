"""Reading the training text, drawing samples from it, and tokenizers."""

import argparse
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt.data import TRAIN_STREAM, VALID_STREAM, DataError, Sampler, build_tokenizer
from gpt.indexed import load_data
from megatron_fsdp import ConfigError

CPU = torch.device("cpu")


def make_sampler(*, num_bytes: int = 5000, seq_length: int = 7, seed: int = 3, stream: int = TRAIN_STREAM) -> Sampler:
    """Return a sampler of a text whose neighbouring bytes differ by 1 (mod 251)."""
    return Sampler((np.arange(num_bytes) % 251).astype(np.uint8), seq_length, seed, stream)


def texts(path: Path | None, seq_length: int = 8, **changes: Any) -> tuple[bytes, bytes, str]:
    """Return the text to train on, the text held out, and the text that was read."""
    given: dict[str, Any] = {
        "seq_length": seq_length,
        "seed": 3,
        "split": None,
        "tokenizer_model": None,
        "mock_data": False,
        "num_workers": 0,
    }
    data = load_data(argparse.Namespace(data_path=None if path is None else [str(path)], **(given | changes)))
    samples = (data.train._samples, data.valid)
    train, valid = (part.__self__.text.tobytes() for part in samples)  # type: ignore[attr-defined]
    assert data.num_tokens == len(train)
    return train, valid, data.source


def test_a_sample_is_a_contiguous_piece_one_byte_longer_than_the_sequence() -> None:
    batch = make_sampler(seq_length=7).batch(range(50), CPU)
    assert torch.equal(batch[14:17], make_sampler().batch(range(14, 17), CPU)), "whatever is in the batch beside it"
    assert (batch.shape, batch.dtype) == ((50, 8), torch.int64)
    assert torch.equal(batch[:, 1:], (batch[:, :-1] + 1) % 251)


def test_sample_positions_never_change_between_releases() -> None:
    # Known values: a resumed run must see the text that the interrupted one would have seen.
    sampler = make_sampler(num_bytes=100_000, seq_length=128, seed=1234)
    assert [sampler.start(number) for number in (0, 1, 10**12)] == [29712, 65887, 73686]
    assert {make_sampler(num_bytes=12).start(number) for number in range(200)} == {0, 1, 2, 3, 4}, "first to last"
    other = make_sampler(num_bytes=100_000, seq_length=128, seed=1234, stream=VALID_STREAM)
    assert [other.start(number) for number in (0, 1)] != [29712, 65887]


def test_the_last_twentieth_of_a_file_is_held_out(tmp_path: Path) -> None:
    content = bytes(range(200)) * 5
    (tmp_path / "text").write_bytes(content)
    assert texts(tmp_path / "text", seq_length=16)[:2] == (content[:950], content[950:])


def test_a_folder_is_read_in_sorted_order_without_binary_hidden_and_test_files(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"B" * 300,
        "a/z.txt": b"Z" * 100,
        "a/c.txt": b"C" * 100,
        "blob.bin": b"\0" * 50,
        ".hidden": b"H" * 50,
        "tests/t.txt": b"T" * 50,
        ".git/config": b"G" * 50,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    train, valid, source = texts(tmp_path)
    assert train + valid == b"B" * 300 + b"C" * 100 + b"Z" * 100
    assert source == f"3 files under {tmp_path}"
    train, _, source = texts(None, seq_length=128)
    assert b"import " in train[:100_000]
    assert source.startswith("the Python standard library, ")


@pytest.mark.parametrize(
    ("name", "content", "changes", "message"),
    [
        ("nowhere", None, {}, r"cannot read .*nowhere \(from .*\): No such file or directory"),
        ("empty", b"", {}, "empty holds 0 bytes of text; --seq-length 8 needs 181 or more"),
        ("", b"\0\1\2", {}, "0 files under .* holds 0 bytes"),
        ("short", b"x" * 179, {}, "short holds 179 bytes"),
        ("text", b"x" * 999, {"tokenizer_model": Path("tokenizer.json")}, "fix: leave out --tokenizer-model"),
        ("text", b"x" * 999, {"split": "1,1,1"}, "last twentieth is for validation"),
    ],
)
def test_a_path_without_training_text_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes | None, changes: dict[str, Any], message: str
) -> None:
    if content is not None:
        (tmp_path / (name or "blob")).write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / name, **changes)


@pytest.mark.parametrize("words", [["a"], ["0.3", "a", "0.7", "b"]])
def test_indexed_data_without_megatron_core_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.idx").touch()
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.gpt_dataset", None)
    with pytest.raises(DataError, match=r"pip install 'megatron-fsdp-dbuffer\[integrations\]'"):
        load_data(argparse.Namespace(data_path=words, split=None))


def test_byte_tokens_decode_to_the_text_and_none_ends_a_document() -> None:
    tokenizer = build_tokenizer(None)
    assert tokenizer.decode(tokenizer.encode("grün €")) == "grün €"
    assert max(tokenizer.encode("grün €")) < tokenizer.vocabulary_size == 256
    assert tokenizer.end_of_document not in tokenizer.encode("abc 0 \n")


def test_a_tokenizer_without_its_package_or_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"package tokenizers\. fix: pip install tokenizers"):
        build_tokenizer(tmp_path)
    backend: Any = types.ModuleType("tokenizers")
    backend.Tokenizer = types.SimpleNamespace(from_file=lambda path: Path(path).read_text())
    monkeypatch.setitem(sys.modules, "tokenizers", backend)
    with pytest.raises(ConfigError, match=r"nowhere cannot be read by the package tokenizers: .*No such file"):
        build_tokenizer(tmp_path / "nowhere")
