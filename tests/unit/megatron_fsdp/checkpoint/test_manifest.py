"""Sizes and checksums of a folder, and what is found when a file or the manifest itself has changed."""

import json
import os
from pathlib import Path

import pytest

from megatron_fsdp import CheckpointError
from megatron_fsdp.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpointError,
    FileEntry,
    find_damage,
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


def test_a_manifest_reads_back_as_it_was_written(folder: Path) -> None:
    assert read_manifest(folder) == {name: hash_file(folder / name) for name in ("a", "b")}
    assert is_whole(folder)


def said_of(folder: Path, *, is_thorough: bool) -> str:
    return str(find_damage(folder, "a", read_manifest(folder)["a"], is_thorough=is_thorough))


def test_a_change_of_one_bit_is_found_by_reading_and_not_by_size(folder: Path) -> None:
    assert said_of(folder, is_thorough=True) == "None"
    (folder / "a").write_bytes(b"seven\n\x20")
    assert "some of its bytes changed" in said_of(folder, is_thorough=True)
    assert said_of(folder, is_thorough=False) == "None"


@pytest.mark.parametrize("size", [6, 8])
def test_another_size_is_found_without_reading(folder: Path, size: int) -> None:
    os.truncate(folder / "a", size)
    assert f"has {size} bytes, wanted 7" in said_of(folder, is_thorough=False)
    assert not is_whole(folder)


def test_a_missing_file_is_found(folder: Path) -> None:
    (folder / "a").unlink()
    assert said_of(folder, is_thorough=False) == f"{folder / 'a'} is missing"
    assert not is_whole(folder)


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


def test_every_changed_digit_of_a_manifest_is_noticed(folder: Path) -> None:
    document = json.loads((folder / MANIFEST).read_text())
    document["files"]["a"]["bytes"] = 8
    (folder / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(DamagedCheckpointError, match="does not match its own checksum"):
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
