"""Sizes and checksums of a folder, and errors for a changed file or manifest."""

from pathlib import Path

import pytest

from megatron_fsdp import CheckpointError
from megatron_fsdp.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpointError,
    FileEntry,
    hash_file,
    is_whole,
    read_manifest,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a").write_bytes(b"seven\n!")
    (tmp_path / "b").write_bytes(b"")
    write_manifest(tmp_path, {name: hash_file(tmp_path / name) for name in ("a", "b")})
    return tmp_path


def test_an_entry_is_the_size_and_sha256_that_sha256sum_prints(folder: Path) -> None:
    assert hash_file(folder / "b") == FileEntry(0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
    assert hash_file(folder / "a").num_bytes == 7


def test_a_manifest_is_not_written_over_files_of_other_sizes(folder: Path) -> None:
    with pytest.raises(OSError, match="a has 7 bytes, 9 were written"):
        write_manifest(folder, {"a": FileEntry(9, "")})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": 1, "files": {"a": 3}, "sha256": ""}',
        '{"format": 1, "files": {}, "sha256": "0"}',
        '{"format": 1, "files": {"a": {"bytes": Infinity, "sha256": ""}}, "sha256": "0"}',
        "[" * 100_000,
    ],
    ids=["empty", "list", "object", "a number", "another checksum", "infinite", "nested"],
)
def test_a_manifest_of_another_content_is_damaged(folder: Path, content: str) -> None:
    (folder / MANIFEST).write_text(content)
    with pytest.raises(DamagedCheckpointError, match=r"manifest.json is damaged"):
        read_manifest(folder)
    assert not is_whole(folder)


@pytest.mark.parametrize(
    "content",
    [b'{"format": \xff}', '{"über": 1, "files" 2}'.encode(), b'{"format": 1'],
    ids=["no text", "no object", "cut short"],
)
def test_a_manifest_that_breaks_off_is_damaged(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is damaged \("):
        read_manifest(folder)


def test_a_manifest_that_names_files_elsewhere_is_refused(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.write_bytes(b"!")
    write_manifest(folder, {"../outside": hash_file(outside)})
    with pytest.raises(DamagedCheckpointError):
        read_manifest(folder)


def test_a_later_format_is_refused_as_such(folder: Path) -> None:
    text = (folder / MANIFEST).read_text().replace('"format": 1', '"format": 2')
    (folder / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match="is of format 2, this version reads 1"):
        read_manifest(folder)
