"""Tokenizers by flag: bytes, numbers, and a local file, whose package is asked for only then."""

import argparse
import sys
import types
from pathlib import Path

import pytest

from gpt.tokenizer import build_tokenizer, vocabulary_size
from megatron_fsdp import ConfigError


class Letters:
    """Stands for ``tokenizers.Tokenizer``: one token per letter, and one for the end."""

    @staticmethod
    def from_file(path: str) -> "Letters":
        if Path(path).read_text() != "{}":
            raise Exception("expected value at line 1")
        return Letters()

    def get_vocab_size(self) -> int:
        return 130

    def token_to_id(self, name: str) -> int | None:
        return 129 if name == "</s>" else None

    def encode(self, text: str, *, add_special_tokens: bool) -> types.SimpleNamespace:
        return types.SimpleNamespace(ids=[ord(letter) for letter in text] + [129] * add_special_tokens)

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in tokens if not (skip_special_tokens and token == 129))


@pytest.fixture
def tokenizer_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a tokenizer that ``Letters`` reads."""
    module = types.ModuleType("tokenizers")
    module.Tokenizer = Letters  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenizers", module)
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    return path


def arguments(kind: str, model: Path | None = None, vocab_size: int | None = None) -> argparse.Namespace:
    return argparse.Namespace(
        tokenizer_type=kind, tokenizer_model=model, vocab_size=vocab_size, make_vocab_size_divisible_by=128
    )


def test_bytes_come_back_as_the_text() -> None:
    tokenizer = build_tokenizer("ByteTokenizer")
    assert tokenizer.decode(tokenizer.encode("grün €")) == "grün €"
    assert max(tokenizer.encode("grün €")) < tokenizer.vocabulary_size == 256


def test_no_text_has_the_byte_that_ends_a_document() -> None:
    tokenizer = build_tokenizer("ByteTokenizer")
    assert tokenizer.end_of_document not in tokenizer.encode("abc 0 \n")


def test_a_padded_vocabulary_s_tokens_can_be_shown() -> None:
    assert build_tokenizer("ByteTokenizer").decode([65, 300]) == "A\0"


def test_numbers_come_back_as_numbers() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=50)
    assert tokenizer.decode(tokenizer.encode("3  49")) == "3 49"
    assert (tokenizer.vocabulary_size, tokenizer.end_of_document) == (51, 50)


@pytest.mark.parametrize("text", ["def ", "", "51", "-1", "1.5"])
def test_what_is_no_number_of_the_vocabulary_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="wanted numbers from 0 to 50"):
        build_tokenizer("NullTokenizer", vocab_size=50).encode(text)


def test_a_file_is_read_by_its_package(tokenizer_file: Path) -> None:
    for path in (tokenizer_file, tokenizer_file.parent):
        tokenizer = build_tokenizer("HuggingFaceTokenizer", path)
        assert tokenizer.encode("ab") == [97, 98]
        assert tokenizer.decode([97, 129]) == "a\x81"
        assert (tokenizer.vocabulary_size, tokenizer.end_of_document) == (130, 129)


def test_a_file_that_is_no_tokenizer_is_named(tokenizer_file: Path) -> None:
    tokenizer_file.write_text("[")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer .* expected value at line 1"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_file)


def test_a_missing_file_is_named(tokenizer_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist; wanted a tokenizer\.json"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_file.with_name("nowhere"))


def test_a_missing_package_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="needs the package tokenizers, which is not installed; pip install"):
        build_tokenizer("HuggingFaceTokenizer", tmp_path)


@pytest.mark.parametrize(("kind", "flag"), [("NullTokenizer", "--vocab-size"), ("HuggingFaceTokenizer", "-model")])
def test_a_flag_that_the_type_needs_is_named(kind: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        build_tokenizer(kind)


def test_the_vocabulary_is_padded_unless_it_is_bytes(tokenizer_file: Path) -> None:
    assert vocabulary_size(arguments("ByteTokenizer")) == 256
    assert vocabulary_size(arguments("ByteTokenizer", vocab_size=257)) == 384
    assert vocabulary_size(arguments("NullTokenizer", vocab_size=128)) == 256
    assert vocabulary_size(arguments("HuggingFaceTokenizer", tokenizer_file)) == 256


def test_a_vocabulary_below_the_tokenizer_s_is_refused() -> None:
    with pytest.raises(ConfigError, match="--vocab-size 200 is below the 256 tokens"):
        vocabulary_size(arguments("ByteTokenizer", vocab_size=200))
