"""Megatron's indexed data sets: what is written is read, and broken files are named."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt.data import DataError
from gpt.indexed import IndexedWriter, is_indexed, open_indexed


def write(prefix: Path, documents: list[list[int]], vocabulary_size: int = 300) -> Path:
    """Write a data set and return its prefix."""
    with IndexedWriter(prefix, vocabulary_size) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


@given(documents=st.lists(st.lists(st.integers(0, 60_000), min_size=1, max_size=7), min_size=1, max_size=6))
def test_what_is_written_is_read(documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    dataset = open_indexed(write(tmp_path_factory.mktemp("data") / "a", documents, 60_001))
    assert [dataset.between(n, n + 1).tolist() for n in range(len(dataset))] == documents
    assert dataset.documents.tolist() == list(range(len(documents) + 1))


def test_the_files_are_megatron_s_to_the_byte(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3], [4]])
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 4)
    assert Path(f"{prefix}.idx").read_bytes() == (
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3) + struct.pack("<2i2q3q", 3, 1, 0, 6, 0, 1, 2)
    )


@pytest.mark.parametrize(("code", "dtype"), [(1, "<u1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_every_integer_dtype_is_read(tmp_path: Path, code: int, dtype: str) -> None:
    content = np.array([5, 6, 7], dtype=dtype)
    (tmp_path / "a.bin").write_bytes(content.tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 2, 2)
    (tmp_path / "a.idx").write_bytes(header + struct.pack("<2i2q2q", 1, 2, 0, content.itemsize, 0, 2))
    dataset = open_indexed(tmp_path / "a")
    assert dataset.between(1, 2).tolist() == [6, 7]
    assert dataset.tokens.dtype == dtype


def test_a_large_vocabulary_needs_four_bytes(tmp_path: Path) -> None:
    assert open_indexed(write(tmp_path / "a", [[70_000]], 70_001)).tokens.tolist() == [70_000]


def test_tokens_are_mapped_not_copied(tmp_path: Path) -> None:
    dataset = open_indexed(write(tmp_path / "a", [[1, 2], [3]]))
    assert isinstance(dataset.tokens, np.memmap)
    assert np.shares_memory(dataset.between(0, 2), dataset.tokens)


def test_an_empty_document_is_left_out(tmp_path: Path) -> None:
    assert len(open_indexed(write(tmp_path / "a", [[1], [], [2]]))) == 2


def test_a_writer_that_fails_leaves_no_index(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1]])

    def fail() -> None:
        with IndexedWriter(prefix, 300) as writer:
            writer.add_document([2])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not is_indexed(prefix)


def broken(tmp_path: Path, part: str, content: bytes, at: int = 0) -> str:
    """Return the message about a data set with some bytes of one file replaced; none: the file is cut off there."""
    prefix = write(tmp_path / "a", [[1, 2, 3], [4, 5]])
    file = Path(f"{prefix}.{part}")
    before = file.read_bytes()
    file.write_bytes(before[:at] + content + (before[at + len(content) :] if content else b""))
    with pytest.raises(DataError) as caught:
        open_indexed(prefix)
    return str(caught.value)


@pytest.mark.parametrize(
    ("part", "content", "at", "message"),
    [
        ("idx", b"X", 0, "does not start with"),
        ("idx", b"", 10, "does not start with"),
        ("idx", b"\2", 9, "has version 2; wanted 1"),
        ("idx", b"\6", 17, "dtype code 6; wanted an integer dtype"),
        ("idx", b"", 40, "has 40 bytes, its header promises"),
        ("bin", b"", 6, "has 3 tokens, its index promises 5"),
        ("idx", b"\1", 42, "do not follow each other"),
    ],
)
def test_a_broken_file_is_refused_with_what_is_wrong(
    tmp_path: Path, part: str, content: bytes, at: int, message: str
) -> None:
    assert message in broken(tmp_path, part, content, at)


def test_a_missing_half_is_named(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1]])
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(DataError, match=r"a\.bin does not exist .*preprocess_data\.py writes both"):
        open_indexed(prefix)
