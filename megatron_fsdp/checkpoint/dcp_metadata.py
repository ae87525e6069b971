"""PyTorch's ``.metadata`` file, read without trusting it: what a checkpoint holds, in which shapes, in which files.

The file is a pickle, which could name any function to be called. Here it may name the classes that it is made of and
nothing else.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from megatron_fsdp.checkpoint.manifest import DamagedCheckpointError, damage_of
from megatron_fsdp.errors import CheckpointError

__all__ = ["METADATA", "RANK_VALUES", "EntryPath", "paths_of", "read_metadata", "tensors_by_file", "tensors_of"]

METADATA = ".metadata"
# First part of the path of what ranks hold under one name and not alike, before "rank_3" and the rest of the path.
RANK_VALUES = "rank_values"
EntryPath = tuple[str | int, ...]

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED.get(module, ()):
            raise CheckpointError(
                f"the {METADATA} file names {module}.{name}, which no checkpoint is made of; it was not read further. "
                "Do not load this checkpoint with other tools either"
            )
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """Read what a checkpoint folder holds.

    Raises:
        CheckpointError: the folder has no metadata, or metadata that names foreign code or files outside of the folder.
        DamagedCheckpointError: the file cannot be decoded.
    """
    path = folder / METADATA
    offset = 0
    try:
        with path.open("rb") as file:
            try:
                metadata = _unpickle(file)
            finally:
                offset = file.tell()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no complete checkpoint: {METADATA} is missing") from None
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    except Exception as error:
        raise DamagedCheckpointError(damage_of(path, error, offset)) from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise DamagedCheckpointError(f"{path} is damaged: it is no metadata of a checkpoint")
    for stored in metadata.storage_data.values():
        if Path(stored.relative_path).name != stored.relative_path:
            raise CheckpointError(f"{path} names the file {stored.relative_path!r}, which lies outside of {folder}")
    metadata.storage_meta = StorageMeta()
    return metadata


def _unpickle(file: IO[bytes]) -> Any:
    return _Unpickler(file).load()


def paths_of(metadata: Metadata) -> dict[str, EntryPath]:
    """Return where each entry stands in the nested dictionary that was saved: ``("model", "head.weight")``."""
    known: Mapping[str, EntryPath] = metadata.planner_data or {}
    return {name: known.get(name, (name,)) for name in metadata.state_dict_metadata}


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the entries that are tensors."""
    return {
        name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }


def tensors_by_file(metadata: Metadata) -> dict[str, list[str]]:
    """Return, for each data file, the parameters and buffers of which it has values or optimizer state, sorted."""
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
