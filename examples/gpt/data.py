"""Training text as bytes, and samples of it that depend only on the seed and the sample's number."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_FOLDER_BYTES = 256 * 2**20
HELD_OUT_SHARE = 0.05
TRAIN_STREAM, VALID_STREAM = 0, 1
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
_PROBE_BYTES = 8192


class DataError(ValueError):
    """The training text is missing, unreadable or too short."""


class Samples(Protocol):
    """What training and validation draw from."""

    def batch(self, numbers: range, device: torch.device) -> Tensor:
        """Return the samples of the given numbers, (len(numbers), seq_length + 1) int64 on ``device``."""
        ...


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Where samples come from.

    Attributes:
        train, valid: no text is in both.
        num_tokens: to train on.
        source: what was read, in words; another source is other data.
    """

    train: Samples
    valid: Samples
    num_tokens: int
    source: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes to train on, and the last twentieth, held out.

    Attributes:
        train, valid: 1-D uint8, possibly memory-mapped.
        source: what was read, in words.
    """

    train: NDArray[np.uint8]
    valid: NDArray[np.uint8]
    source: str


def load_corpus(path: Path | None, seq_length: int) -> Corpus:
    """Read the training text; the same files give the same bytes in the same order on every machine.

    Args:
        path: a file (memory-mapped), or a folder (its text files in sorted order, up to 256 MiB; hidden files, caches,
            tests, installed packages and binary files are left out). None means the Python standard library's sources.
        seq_length: both parts must hold at least one sample of seq_length + 1 bytes.
    Raises:
        DataError: nothing is there, it cannot be read, or there is too little of it.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        text, source = _read_folder(root, suffix=".py")
        source = f"the Python standard library, {source}"
    elif os.path.isdir(path):  # unlike Path.is_dir, False rather than an error when a parent is closed to us
        text, source = _read_folder(path, suffix=None)
    else:
        text, source = _map_file(path), str(path)
    num_train = len(text) - int(len(text) * HELD_OUT_SHARE)
    if len(text) - num_train < seq_length + 1:
        wanted = int((seq_length + 1) / HELD_OUT_SHARE) + 1
        raise DataError(
            f"--data-path: {source} holds {len(text)} bytes of text; --seq-length {seq_length} needs {wanted} or more, "
            f"so that the {HELD_OUT_SHARE:.0%} held out for validation are one sample. Give more text or shorten it."
        )
    return Corpus(train=text[:num_train], valid=text[num_train:], source=source)


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws samples of one text: sample ``n`` is a pure function of (seed, stream, n).

    So training is the same for any number of ranks, and resumes exactly from the number of consumed samples.
    """

    text: NDArray[np.uint8]
    seq_length: int
    seed: int
    stream: int

    def batch(self, numbers: range, device: torch.device) -> Tensor:
        """Return the samples of the given numbers, (len(numbers), seq_length + 1) int64 on ``device``."""
        length = self.seq_length + 1
        starts = (self.start(number) for number in numbers)
        rows = np.stack([self.text[start : start + length] for start in starts])
        return torch.from_numpy(rows.astype(np.int64)).to(device)

    def start(self, number: int) -> int:
        """Return where in the text sample ``number`` starts.

        One 64-bit draw of Philox4x64 (Salmon et al., SC 2011) at counter ``number``: no state to save, and numpy keeps
        the raw stream of a bit generator fixed between versions, unlike that of its distributions.
        """
        key = np.array([self.seed, self.stream], dtype=np.uint64)
        draw = int(np.random.Philox(key=key, counter=number).random_raw())
        return draw % (len(self.text) - self.seq_length)


def rank_samples(first: int, microbatch: int, *, micro_batch_size: int, rank: int, num_ranks: int) -> range:
    """Return the numbers of one rank's samples in one microbatch of the global batch that starts at ``first``.

    Neighbouring ranks take neighbouring samples, as Megatron's samplers do; over all microbatches and ranks each number
    of the global batch comes up once.
    """
    start = first + (microbatch * num_ranks + rank) * micro_batch_size
    return range(start, start + micro_batch_size)


def _map_file(path: Path) -> NDArray[np.uint8]:
    try:
        if path.stat().st_size == 0:
            raise DataError(f"--data-path: {path} is empty; wanted a text file or a folder of text files")
        return np.memmap(path, dtype=np.uint8, mode="r")
    except FileNotFoundError as error:
        raise DataError(
            f"--data-path: {path} does not exist (looked from {Path.cwd()}); wanted a file or folder"
        ) from error
    except OSError as error:
        raise DataError(f"--data-path: cannot read {path}: {error.strerror}") from error


def _read_folder(root: Path, suffix: str | None) -> tuple[NDArray[np.uint8], str]:
    parts: list[bytes] = []
    num_bytes = 0
    for path in _text_files(root, suffix):
        content = _read_text(path)[: MAX_FOLDER_BYTES - num_bytes]
        if content:
            parts.append(content)
            num_bytes += len(content)
        if num_bytes == MAX_FOLDER_BYTES:
            break
    if not parts:
        kind = f"{suffix} files" if suffix else "files"
        raise DataError(f"{root} holds no {kind} with text; name a text file or a folder of them with --data-path")
    return np.frombuffer(b"".join(parts), dtype=np.uint8), f"{len(parts)} files under {root}"


def _text_files(root: Path, suffix: str | None) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"--data-path: cannot list {error.filename}: {error.strerror}") from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        # Sorted in place: os.walk descends in this order, and file systems list in none that can be relied on.
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED_FOLDERS and name[0] != ".")
        for name in sorted(names):
            path = Path(folder, name)
            if name[0] != "." and (suffix is None or path.suffix == suffix) and path.is_file():
                yield path


def _read_text(path: Path) -> bytes:
    """Return the file's bytes, none when a zero byte near its start shows that it is no text."""
    try:
        with path.open("rb") as file:
            head = file.read(_PROBE_BYTES)
            return b"" if b"\0" in head else head + file.read(MAX_FOLDER_BYTES)
    except OSError as error:
        raise DataError(f"--data-path: cannot read {path}: {error.strerror}") from error
