"""Tokens, the text that ``--data-path`` names, and samples of it that depend on the seed and their number alone."""

from __future__ import annotations

import argparse
import importlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_fsdp import ConfigError

# Returns the samples of some numbers, (len(numbers), seq_length + 1) int64 on a device.
Samples = Callable[[range, torch.device], Tensor]
_CPU = torch.device("cpu")
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
MAX_FOLDER_BYTES, HELD_OUT_SHARE = 256 * 2**20, 0.05
TRAIN_STREAM, VALID_STREAM, MOCK_STREAM = 0, 1, 2
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})


class DataError(ValueError):
    """The training text is missing, unreadable or too short."""


class SamplesAhead:
    """Samples that ``--num-workers`` threads read ahead; without threads, samples are read on request."""

    def __init__(self, samples: Samples, num_workers: int) -> None:
        self._samples = samples
        self._workers = ThreadPoolExecutor(num_workers, "samples") if num_workers else None
        self._read: dict[range, Future[Tensor]] = {}

    def __call__(self, numbers: range, device: torch.device) -> Tensor:
        """Return samples, like ``Samples``; raise the error of a thread that failed."""
        read = self._read.pop(numbers, None)
        return self._samples(numbers, device) if read is None else read.result().to(device)

    def prepare(self, microbatches: Iterable[range]) -> None:
        """Let threads read these samples; drop samples that were read ahead and not requested."""
        if self._workers is not None:
            self._read = {numbers: self._workers.submit(self._samples, numbers, _CPU) for numbers in microbatches}


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Training and validation samples, the number of training tokens, and the flags that decide the samples' order.

    Attributes:
        source: a description of the data, for the log.
        flags: values of flags, by name without dashes.
    """

    train: SamplesAhead
    valid: Samples
    num_tokens: int
    source: str
    flags: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws samples of one text: sample ``n`` is a pure function of (seed, stream, n).

    Training is therefore the same for any number of ranks, and resumes exactly from the number of consumed samples.
    """

    text: _Bytes
    seq_length: int
    seed: int
    stream: int

    def batch(self, numbers: range, device: torch.device) -> Tensor:
        """Return the samples of the given numbers."""
        starts = (self.start(number) for number in numbers)
        rows = np.stack([self.text[start : start + self.seq_length + 1] for start in starts])
        return torch.from_numpy(rows.astype(np.int64)).to(device)

    def start(self, number: int) -> int:
        """Return where in the text a sample starts: a draw of Philox4x64 (Salmon et al., SC 2011) at this counter.

        numpy keeps the raw stream of a bit generator fixed between versions, unlike that of its distributions.
        """
        key = np.array([self.seed, self.stream], dtype=np.uint64)
        draw = int(np.random.Philox(key=key, counter=number).random_raw())
        return draw % (len(self.text) - self.seq_length)


def load_text(args: argparse.Namespace) -> TrainingData:
    """Read the bytes of a text; the last twentieth is for validation. Equal files give equal bytes on every machine.

    ``--data-path`` names a file, which is memory-mapped, or a folder. Of a folder, text files are read in sorted order,
    up to 256 MiB, without hidden files, caches, tests, installed packages and binary files. Without ``--data-path`` the
    text is the source code of Python's standard library.

    Raises:
        DataError: a file cannot be read, the text is too short, or a flag does not apply to text.
    """
    if args.tokenizer_model is not None or args.split is not None:
        raise DataError(
            "--data-path with text: it is read as bytes, and its last twentieth is for validation. fix: leave out "
            "--tokenizer-model and --split, or name the prefix of an indexed data set"
        )
    path = Path(args.data_path[0] if args.data_path else sysconfig.get_paths()["stdlib"])
    try:
        text, source = _random_text(args) if args.mock_data else _read(path, "" if args.data_path else ".py")
    except OSError as error:
        raise DataError(
            f"--data-path: cannot read {path} (from {Path.cwd()}): {error.strerror}. fix: give the path of a readable "
            "file"
        ) from error
    num_train = len(text) - int(len(text) * HELD_OUT_SHARE)
    if len(text) - num_train < args.seq_length + 1:
        raise DataError(
            f"--data-path: {source} holds {len(text)} bytes of text; --seq-length {args.seq_length} needs "
            f"{int((args.seq_length + 1) / HELD_OUT_SHARE) + 1} or more, so that the {HELD_OUT_SHARE:.0%} for "
            "validation have one sample. fix: give a longer text or a smaller --seq-length"
        )
    train = Sampler(text[:num_train], args.seq_length, args.seed, TRAIN_STREAM)
    valid = Sampler(text[num_train:], args.seq_length, args.seed, VALID_STREAM)
    return TrainingData(SamplesAhead(train.batch, args.num_workers), valid.batch, num_train, source, {})


def _random_text(args: argparse.Namespace) -> tuple[_Bytes, str]:
    """Return bytes that are a function of the seed alone: a MiB, or enough for samples of this length."""
    size = max(2**20, 2 * int((args.seq_length + 1) / HELD_OUT_SHARE))
    key = np.array([args.seed, MOCK_STREAM], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(-(-size // 8)).view(np.uint8), "random bytes (--mock-data)"


def _read(path: Path, suffix: str) -> tuple[_Bytes, str]:
    if not os.path.isdir(path):  # unlike Path.is_dir, False rather than an error when a parent is closed to us
        is_empty = path.stat().st_size == 0  # which cannot be mapped
        return np.zeros(0, np.uint8) if is_empty else np.memmap(path, dtype=np.uint8, mode="r"), str(path)
    parts: list[bytes] = []
    for file in _text_files(path, suffix):
        content = file.read_bytes() if sum(map(len, parts)) < MAX_FOLDER_BYTES else b""
        # A zero byte near its start shows that it is no text.
        if content and b"\0" not in content[:8192]:
            parts.append(content)
    kind = "the Python standard library, " if suffix else ""
    text = np.frombuffer(b"".join(parts)[:MAX_FOLDER_BYTES], dtype=np.uint8)
    return text, f"{kind}{len(parts)} files under {path}"


def _text_files(root: Path, suffix: str) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        # Sorted in place: os.walk descends in this order, and file systems list in none that can be relied on.
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED_FOLDERS and name[0] != ".")
        paths = (Path(folder, name) for name in sorted(names) if name[0] != "." and name.endswith(suffix))
        yield from (path for path in paths if path.is_file())


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Text to token numbers below ``vocabulary_size`` and back; None where no token ends a document."""

    vocabulary_size: int
    end_of_document: int | None
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def build_tokenizer(file: Path | None) -> Tokenizer:
    """Return the tokenizer of ``--tokenizer-model``, a ``tokenizer.json``, or raise a ConfigError; None is bytes."""
    if file is None:
        # Documents end with byte 0, which no text has.
        return Tokenizer(
            256, 0, lambda text: list(text.encode()), lambda tokens: bytes(tokens).decode(errors="replace")
        )
    try:
        model: Any = importlib.import_module("tokenizers").Tokenizer.from_file(str(file))
    except ImportError as error:
        raise ConfigError("--tokenizer-model needs the package tokenizers. fix: pip install tokenizers") from error
    except Exception as error:  # the package raises bare Exception
        raise ConfigError(
            f"--tokenizer-model: {file} cannot be read by the package tokenizers: {error}. fix: give the "
            "tokenizer.json that the data was written with"
        ) from error
    ends = [token for name in ("<|endoftext|>", "</s>") if (token := model.token_to_id(name)) is not None]
    return Tokenizer(
        model.get_vocab_size(),
        ends[0] if ends else None,
        # No special tokens around the prompt; special tokens that the model generates are shown.
        lambda text: model.encode(text, add_special_tokens=False).ids,
        lambda tokens: model.decode(tokens, skip_special_tokens=False),
    )
