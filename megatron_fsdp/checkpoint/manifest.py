"""Index files of a checkpoint folder: ``manifest.json``, which detects damage, and PyTorch's ``.metadata``.

``.metadata`` is a pickle, which could name any function to call. Here it may only name the classes it consists of.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from megatron_fsdp.errors import CheckpointError

__all__ = [
    "MANIFEST", "METADATA", "RANK_VALUES", "DamagedCheckpointError", "EntryPath", "FileEntry", "damage_of",
    "find_damage", "hash_file", "is_whole", "paths_of", "read_manifest", "read_metadata", "sync",
    "tensors_by_file", "tensors_of", "write_manifest", "write_synced",
]  # fmt: skip

MANIFEST = "manifest.json"
METADATA = ".metadata"
# First component of the paths of values that differ between ranks; "rank_3" and the rest of the path follow.
RANK_VALUES = "rank_values"
EntryPath = tuple[str | int, ...]
_FORMAT = 1
_CHUNK_BYTES = 1 << 22
_PATHS = "Path PosixPath PurePosixPath"
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "collections": "OrderedDict",
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, cut short or changed. Nothing was loaded.

    Example:
        try:
            load_checkpoint(model, optimizer, path)
        except DamagedCheckpointError as error:
            print(error)  # names the file, and the parameters in it
    """


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The expected size of a file in bytes, and the SHA-256 of its content as hexadecimal digits."""

    num_bytes: int
    sha256: str


def hash_file(path: Path) -> FileEntry:
    """Read a file, and return its entry."""
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return FileEntry(num_bytes, digest.hexdigest())


def write_manifest(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Write the manifest and sync it to disk. It is the last file that a save writes.

    Raises:
        OSError: it cannot be written, or a file is missing or has another size (ranks see different folders).
    """
    for name, entry in files.items():
        found = (folder / name).stat().st_size
        if found != entry.num_bytes:
            raise OSError(f"{folder / name} has {found} bytes, {entry.num_bytes} were written")
    content = {name: {"bytes": entry.num_bytes, "sha256": entry.sha256} for name, entry in sorted(files.items())}
    document = {"format": _FORMAT, "files": content, "sha256": _digest_of(content)}
    write_synced(folder / MANIFEST, json.dumps(document, indent=1).encode())


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """Return the manifest's entries by file name."""
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version, content, digest = document["format"], document["files"], document["sha256"]
        files = {name: FileEntry(int(entry["bytes"]), str(entry["sha256"])) for name, entry in content.items()}
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{path} is missing; without it nothing in {folder} can be trusted. fix: load an older checkpoint, or a "
            "copy of this one"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
        raise DamagedCheckpointError(damage_of(path, error)) from None
    if version != _FORMAT:
        raise CheckpointError(
            f"{path} is of format {version!r}, this version reads {_FORMAT}. fix: use a newer version of this library"
        )
    if digest != _digest_of(content) or any(Path(name).name != name for name in files):
        raise DamagedCheckpointError(
            f"{path} is damaged: its content does not match its own checksum. fix: load an older checkpoint, or a copy "
            "of this one"
        )
    return files


def damage_of(path: Path, error: Exception) -> str:
    """Return a line that names a file that cannot be decoded, and the reason."""
    reason = next(iter(str(error).splitlines()), "")
    return f"{path} is damaged ({type(error).__name__}{': ' if reason else ''}{reason})"


def find_damage(folder: Path, name: str, entry: FileEntry, *, is_thorough: bool = True) -> str | None:
    """Return a description of a file's damage, or None. ``is_thorough``: read and hash the whole file."""
    path = folder / name
    try:
        found = path.stat().st_size
        if found != entry.num_bytes:
            return f"{path} has {found} bytes, wanted {entry.num_bytes}: it was cut short or replaced"
        if is_thorough and hash_file(path) != entry:
            return f"{path} has the right size but another SHA-256: some of its bytes changed"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return None


def is_whole(folder: Path) -> bool:
    """Return whether a folder has a manifest and its files have the right sizes. Fast: contents are not read."""
    try:
        files = read_manifest(folder)
    except CheckpointError:
        return False
    return not any(find_damage(folder, name, entry, is_thorough=False) for name, entry in files.items())


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and sync it to disk."""
    path.write_bytes(content)
    sync(path)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk, so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED.get(module, "").split():
            raise CheckpointError(
                f"the {METADATA} file names {module}.{name}, which no checkpoint is made of; it was not read further. "
                "fix: load a checkpoint whose origin you trust, and do not load this one with other tools either"
            )
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """Read the index of a checkpoint folder.

    Raises:
        CheckpointError: there is no index, or it names foreign code or files outside the folder.
        DamagedCheckpointError: the file cannot be decoded.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint: {METADATA} is missing. fix: give the path of a checkpoint folder"
        ) from None
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    except Exception as error:
        raise DamagedCheckpointError(damage_of(path, error)) from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise DamagedCheckpointError(f"{path} is damaged: it is no metadata of a checkpoint")
    for stored in metadata.storage_data.values():
        if Path(stored.relative_path).name != stored.relative_path:
            raise CheckpointError(
                f"{path} names the file {stored.relative_path!r}, which lies outside of {folder}. fix: load a "
                "checkpoint whose origin you trust"
            )
    metadata.storage_meta = StorageMeta()
    return metadata


def paths_of(metadata: Metadata) -> dict[str, EntryPath]:
    """Return the path of each entry in the saved nested dictionary: ``("model", "head.weight")``."""
    known: Mapping[str, EntryPath] = metadata.planner_data or {}
    return {name: known.get(name, (name,)) for name in metadata.state_dict_metadata}


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the entries that are tensors."""
    entries = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def tensors_by_file(metadata: Metadata) -> dict[str, list[str]]:
    """Return, for each data file, the sorted names of parameters and buffers whose values or optimizer state it has."""
    paths = paths_of(metadata)
    found: dict[str, set[str]] = {}
    for index, stored in metadata.storage_data.items():
        path = paths.get(index.fqn, (index.fqn,))
        path = path[2:] if path[0] == RANK_VALUES else path
        names = found.setdefault(stored.relative_path, set())
        if path[0] == "model":
            names.add(str(path[-1]))
        elif path[:2] == ("optimizer", "state"):
            names.add(str(path[2]))
    return {file: sorted(names) for file, names in found.items()}
