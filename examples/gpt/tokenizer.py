"""Tokenizers by Megatron's flags: bytes, a local ``tokenizers`` JSON file, or bare numbers; nothing is downloaded."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any, Protocol

from megatron_fsdp import ConfigError

TOKENIZER_TYPES = ("ByteTokenizer", "HuggingFaceTokenizer", "NullTokenizer")
BYTE_VOCABULARY_SIZE = 256  # one token per byte value, nothing to pad or to learn
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """Text to token numbers and back.

    Attributes:
        vocabulary_size: tokens are below it.
        end_of_document: the token that ``--append-eod`` appends, None where there is none.
    """

    vocabulary_size: int
    end_of_document: int | None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        ...


def build_tokenizer(kind: str, model: Path | None, vocab_size: int | None) -> Tokenizer:
    """Return what ``--tokenizer-type``, ``--tokenizer-model`` and ``--vocab-size`` ask for.

    Raises:
        ConfigError: the file or the package for it is missing, or a flag that the type needs.
    """
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "NullTokenizer":
        if vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size: the numbers alone do not tell it")
        return NullTokenizer(vocab_size)
    if model is None:
        raise ConfigError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: a local tokenizer.json")
    return FileTokenizer(model)


def tokenizer_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the tokenizer's flags for a checkpoint, nothing for the default: plain numbers and strings."""
    if args.tokenizer_type == "ByteTokenizer":
        return {}
    model = None if args.tokenizer_model is None else str(args.tokenizer_model)
    return {"tokenizer_type": args.tokenizer_type, "tokenizer_model": model, "vocab_size": args.vocab_size}


def vocabulary_size(args: argparse.Namespace) -> int:
    """Return the number of rows of the embedding: the tokenizer's, padded as ``--make-vocab-size-divisible-by`` says.

    Bytes are never padded, so that models of bytes are the same with and without the flag.

    Raises:
        ConfigError: as ``build_tokenizer``, or ``--vocab-size`` is below the tokenizer's.
    """
    size = build_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_size).vocabulary_size
    if args.tokenizer_type != "NullTokenizer" and (args.vocab_size or size) < size:
        raise ConfigError(f"--vocab-size {args.vocab_size} is below the {size} tokens of --tokenizer-type")
    if args.tokenizer_type == "ByteTokenizer" and args.vocab_size is None:
        return size
    multiple: int = args.make_vocab_size_divisible_by
    return -(-max(size, args.vocab_size or 0) // multiple) * multiple


def add_tokenizer_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags that choose a tokenizer."""
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, default="ByteTokenizer", help="what makes tokens")
    parser.add_argument("--tokenizer-model", type=Path, help="tokenizer.json for HuggingFaceTokenizer, a local file")
    parser.add_argument("--vocab-size", type=int, help="of NullTokenizer, without its end-of-document token")


class ByteTokenizer:
    """The UTF-8 bytes of the text; documents end with byte 0, which no text has."""

    def __init__(self) -> None:
        self.vocabulary_size = BYTE_VOCABULARY_SIZE
        self.end_of_document: int | None = 0

    def encode(self, text: str) -> list[int]:
        """Return the bytes."""
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """Return the text; what is no UTF-8, or no byte (padding of the vocabulary), is shown as such."""
        return bytes(token if token < BYTE_VOCABULARY_SIZE else 0 for token in tokens).decode(errors="replace")


class NullTokenizer:
    """Numbers separated by blanks, as in Megatron: for data that was tokenized elsewhere."""

    def __init__(self, size: int) -> None:
        # Megatron counts the end of a document on top of --vocab-size.
        self.vocabulary_size = size + 1
        self.end_of_document: int | None = size

    def encode(self, text: str) -> list[int]:
        """Return the numbers.

        Raises:
            ConfigError: there is something else in the text, or none.
        """
        words = text.split()
        if not words or not all(word.isdecimal() and int(word) < self.vocabulary_size for word in words):
            raise ConfigError(
                f"--tokenizer-type NullTokenizer: found {text[:40]!r}, wanted numbers from 0 to "
                f"{self.vocabulary_size - 1}, separated by blanks"
            )
        return [int(word) for word in words]

    def decode(self, tokens: list[int]) -> str:
        """Return the numbers with blanks between them."""
        return " ".join(map(str, tokens))


class FileTokenizer:
    """A ``tokenizer.json`` of the ``tokenizers`` package, which is imported only here."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: the package is not installed, or the file is missing or no tokenizer.
        """
        try:
            backend: Any = importlib.import_module("tokenizers").Tokenizer
        except ImportError as error:
            raise ConfigError(
                "--tokenizer-type HuggingFaceTokenizer needs the package tokenizers, which is not installed; "
                "pip install tokenizers, or use --tokenizer-type ByteTokenizer"
            ) from error
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"--tokenizer-model: {file} does not exist; wanted a tokenizer.json, or its folder")
        try:
            self._backend: Any = backend.from_file(str(file))
        except Exception as error:  # the package raises bare Exception
            raise ConfigError(
                f"--tokenizer-model: {file} is no tokenizer of the tokenizers package: {error}"
            ) from error
        self.vocabulary_size: int = self._backend.get_vocab_size()
        found = (self._backend.token_to_id(name) for name in _END_NAMES)
        self.end_of_document: int | None = next((token for token in found if token is not None), None)

    def encode(self, text: str) -> list[int]:
        """Return the tokens, without the special ones that some tokenizers add around a text."""
        tokens: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """Return the text, special tokens included."""
        text: str = self._backend.decode(tokens, skip_special_tokens=False)
        return text
