"""Megatron's indexed data sets: tokens in ``PREFIX.bin``, lengths and documents in ``PREFIX.idx``, memory-mapped.

Layout of the index (Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``, version 1), little-endian: the nine
bytes ``MMIDIDX\\0\\0``, version u64, dtype code u8, number of sequences u64, number of document indices u64; then the
lengths (i32 per sequence), the byte offsets into the ``.bin`` file (i64 per sequence) and the document indices (i64).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt.data import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_CODES: dict[int, type[np.generic]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_LARGEST_UINT16 = 65500  # Megatron's own limit, a little below 2**16


@dataclass(frozen=True, slots=True)
class IndexedDataset:
    """The token sequences of one data set, in the order in which they lie in the file.

    Attributes:
        tokens: all of them in one row, memory-mapped, of the file's integer dtype.
        bounds: (sequences + 1,) int64; sequence ``i`` is ``tokens[bounds[i] : bounds[i + 1]]``.
        documents: int64 positions in ``bounds`` where documents start, and at last where the last one ends.
        prefix: of the two files.
    """

    tokens: NDArray[Any]
    bounds: NDArray[np.int64]
    documents: NDArray[np.int64]
    prefix: str

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def between(self, first: int, last: int) -> NDArray[Any]:
        """Return the tokens of the sequences from ``first`` to before ``last``, without copying them."""
        return self.tokens[self.bounds[first] : self.bounds[last]]


def is_indexed(prefix: str | Path) -> bool:
    """Whether a data set with this prefix is there."""
    return Path(f"{prefix}.idx").is_file()


def open_indexed(prefix: str | Path) -> IndexedDataset:
    """Map a data set into memory.

    Raises:
        DataError: a file is missing or cut off, or has another version, dtype or layout.
    """
    index_path, data_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    try:
        index = np.memmap(index_path, dtype=np.uint8, mode="r")
        dtype, num_sequences, num_documents = _read_header(index, index_path)
        num_bytes = data_path.stat().st_size
        num_tokens = num_bytes // np.dtype(dtype).itemsize
        tokens = np.memmap(data_path, dtype=dtype, mode="r", shape=(num_tokens,))
    except FileNotFoundError as error:
        raise DataError(
            f"--data-path: {error.filename} does not exist (looked from {Path.cwd()}); {prefix} is wanted with .idx "
            "and .bin; examples/preprocess_data.py writes both"
        ) from error
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"--data-path: cannot map {prefix}.idx and .bin: {error}") from error
    ends = np.cumsum([_HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_documents])
    if len(index) < ends[-1]:
        raise DataError(
            f"--data-path: {index_path} has {len(index)} bytes, its header promises {ends[-1]}; copy it anew"
        )
    lengths = index[ends[0] : ends[1]].view(np.int32)
    pointers = index[ends[1] : ends[2]].view(np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    _check_layout(bounds, pointers, tokens, data_path)
    return IndexedDataset(tokens, bounds, index[ends[2] : ends[3]].view(np.int64), str(prefix))


def _read_header(index: NDArray[np.uint8], path: Path) -> tuple[type[np.generic], int, int]:
    if len(index) < _HEADER.size or index[: len(_MAGIC)].tobytes() != _MAGIC:
        raise DataError(f"--data-path: {path} does not start with {_MAGIC!r}; wanted an index of Megatron's")
    _, version, code, num_sequences, num_documents = _HEADER.unpack(index[: _HEADER.size].tobytes())
    if version != 1:
        raise DataError(f"--data-path: {path} has version {version}; wanted 1")
    if code not in _CODES:
        raise DataError(f"--data-path: {path} has dtype code {code}; wanted an integer dtype, one of {sorted(_CODES)}")
    return _CODES[code], num_sequences, num_documents


def _check_layout(bounds: NDArray[np.int64], pointers: NDArray[np.int64], tokens: NDArray[Any], path: Path) -> None:
    if bounds[-1] > len(tokens):
        raise DataError(f"--data-path: {path} has {len(tokens)} tokens, its index promises {bounds[-1]}; copy it anew")
    if not np.array_equal(pointers, bounds[:-1] * tokens.dtype.itemsize):
        # Samples are cut from the file as one row of tokens; Megatron's builder writes it that way.
        raise DataError(f"--data-path: the sequences of {path} do not follow each other; write it anew")


class IndexedWriter:
    """Writes a data set that Megatron and ``open_indexed`` read; a context, the index is written at its end."""

    def __init__(self, prefix: str | Path, vocabulary_size: int) -> None:
        """Create ``PREFIX.bin``; tokens are u16 for vocabularies below 65,500 and i32 above, as in Megatron.

        Raises:
            DataError: the file cannot be created.
        """
        self._prefix = str(prefix)
        self._code = 8 if vocabulary_size < _LARGEST_UINT16 else 4
        self._lengths: list[int] = []
        try:
            Path(self._prefix).parent.mkdir(parents=True, exist_ok=True)
            # An older index must not describe the new tokens if this writer is killed.
            Path(f"{prefix}.idx").unlink(missing_ok=True)
            self._file = open(f"{prefix}.bin", "wb")  # noqa: SIM115  closed by __exit__
        except OSError as error:
            raise DataError(f"--output-prefix: cannot write {prefix}.bin: {error.strerror}") from error

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None:
            self._write_index()

    def add_document(self, tokens: Sequence[int]) -> None:
        """Append one document of one sequence; an empty one is left out."""
        if len(tokens):
            self._file.write(np.asarray(tokens, dtype=_CODES[self._code]).tobytes())
            self._lengths.append(len(tokens))

    def _write_index(self) -> None:
        count = len(self._lengths)
        lengths = np.asarray(self._lengths, dtype=np.int32)
        size = np.dtype(_CODES[self._code]).itemsize
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * size
        # Under another name until it is whole: a killed writer must leave no index that looks right.
        temporary = Path(f"{self._prefix}.idx.tmp")
        with temporary.open("wb") as file:
            file.write(_HEADER.pack(_MAGIC, 1, self._code, count, count + 1))
            for part in (lengths, pointers.astype(np.int64), np.arange(count + 1, dtype=np.int64)):
                file.write(part.tobytes())
        temporary.replace(f"{self._prefix}.idx")
