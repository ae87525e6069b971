"""Tokenizers by Megatron's flags: bytes, a local ``tokenizers`` JSON file, or bare numbers; nothing is downloaded."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fsdp import ConfigError

TOKENIZER_TYPES = ("ByteTokenizer", "HuggingFaceTokenizer", "NullTokenizer")
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Text to token numbers and back.

    Attributes:
        vocabulary_size: tokens are below it.
        end_of_document: the token that ``--append-eod`` appends, None where there is none.
    """

    vocabulary_size: int
    end_of_document: int | None
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def build_tokenizer(kind: str, model: Path | None = None, vocab_size: int | None = None) -> Tokenizer:
    """Return what ``--tokenizer-type``, ``--tokenizer-model`` and ``--vocab-size`` ask for.

    Raises:
        ConfigError: the file or the package for it is missing, or a flag that the type needs.
    """
    if kind == "ByteTokenizer":
        # Documents end with byte 0, which no text has. Padding of the vocabulary is shown as that byte.
        return Tokenizer(256, 0, lambda text: list(text.encode()), _text_of_bytes)
    if kind == "NullTokenizer":
        if vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size: the numbers alone do not tell it")
        # Megatron counts the end of a document on top of --vocab-size.
        size = vocab_size + 1
        return Tokenizer(size, vocab_size, lambda text: _numbers(text, size), lambda tokens: " ".join(map(str, tokens)))
    if model is None:
        raise ConfigError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: a local tokenizer.json")
    return _read_tokenizer(model)


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


def _text_of_bytes(tokens: list[int]) -> str:
    return bytes(token if token < 256 else 0 for token in tokens).decode(errors="replace")


def _numbers(text: str, size: int) -> list[int]:
    """Return the numbers of a text that was tokenized elsewhere."""
    words = text.split()
    if not words or not all(word.isdecimal() and int(word) < size for word in words):
        raise ConfigError(
            f"--tokenizer-type NullTokenizer: found {text[:40]!r}, wanted numbers from 0 to {size - 1}, separated by "
            "blanks"
        )
    return [int(word) for word in words]


def _read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a ``tokenizer.json``, through its package, which is imported only here."""
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
        model: Any = backend.from_file(str(file))
    except Exception as error:  # the package raises bare Exception
        raise ConfigError(f"--tokenizer-model: {file} is no tokenizer of the tokenizers package: {error}") from error
    found = (model.token_to_id(name) for name in _END_NAMES)
    return Tokenizer(
        model.get_vocab_size(),
        next((token for token in found if token is not None), None),
        # Without the special tokens that some add around a text; those that the model draws are shown.
        lambda text: model.encode(text, add_special_tokens=False).ids,
        lambda tokens: model.decode(tokens, skip_special_tokens=False),
    )
