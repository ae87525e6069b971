"""Hugging Face's folder of weights: safetensors files up to a size, and an index that says which tensor is where.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of the header, little endian; the
header, a JSON object of dtype, shape and byte range by name; the tensors' bytes, row-major, without gaps. PyTorch's
reader for it reads them here; its writer, and the package's, want all tensors of a file in memory.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_fsdp.checkpoint.manifest import write_synced
from megatron_fsdp.checkpoint.reader import OpenCheckpoint
from megatron_fsdp.errors import CheckpointError, ConfigError

__all__ = ["DEFAULT_FILE_BYTES", "INDEX", "SINGLE", "open_folder", "write_folder"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DEFAULT_FILE_BYTES = 5 * 10**9
_ALIGNMENT = 8
_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_folder(
    folder: Path,
    likes: Mapping[str, torch.Tensor],
    source: Callable[[str], torch.Tensor],
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> None:
    """Write tensors into one file, or into several with an index; other files in the folder stay.

    Args:
        likes: shapes and dtypes in the files, in the order in which ``source`` is asked for the values; one tensor at a
            time is in memory.
        max_file_bytes: a file ends before it would exceed this, unless one tensor alone does.
    Raises:
        CheckpointError: a dtype that the format has not.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = _parts(likes, max_file_bytes)
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = [SINGLE]
    # Without its entry point a folder that is half old and half new is visibly incomplete.
    for entry_point in (INDEX, SINGLE):
        (folder / entry_point).unlink(missing_ok=True)
    for name, part in zip(names, parts, strict=True):
        header = _header({key: likes[key] for key in part})
        values = (source(key).detach().to("cpu", likes[key].dtype).contiguous().reshape(-1) for key in part)
        _write(folder / name, header, (tensor.view(torch.uint8).numpy().data for tensor in values))
    if len(parts) > 1:
        files = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        index = {"metadata": {"total_size": sum(like.nbytes for like in likes.values())}, "weight_map": files}
        _write(folder / INDEX, json.dumps(index, indent=2).encode(), ())


def _parts(likes: Mapping[str, torch.Tensor], max_file_bytes: int) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    num_bytes = 0
    for name, like in likes.items():
        if parts[-1] and num_bytes + like.nbytes > max_file_bytes:
            parts.append([])
            num_bytes = 0
        parts[-1].append(name)
        num_bytes += like.nbytes
    return parts


def _header(likes: Mapping[str, torch.Tensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, like in likes.items():
        if like.dtype not in _NAMES:
            raise CheckpointError(f"{name!r} is {like.dtype}, which safetensors files cannot hold; export as another")
        start, end = end, end + like.nbytes
        header[name] = {"dtype": _NAMES[like.dtype], "shape": list(like.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    return len(encoded).to_bytes(8, "little") + encoded


def _write(path: Path, start: bytes, rest: Iterable[Any]) -> None:
    """Write a file beside its place, and give it its name when it is complete."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        write_synced(unfinished, itertools.chain([start], rest))
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True)
class _Stored:
    """The file that a tensor lies in, as PyTorch's reader asks for it."""

    relative_path: str
    offset: None = None


def open_folder(path: Path, names: Mapping[str, str], *, strict: bool = True) -> OpenCheckpoint:
    """Open a folder (or one file) as a checkpoint of a model alone; headers are checked, no values are read.

    Args:
        names: of tensors here, and there. A tensor that is not among them keeps its name.
        strict: False leaves out what ``names`` does not name.
    Raises:
        CheckpointError: files are missing, cut short, or not what the index says.
        ConfigError: the package ``safetensors`` is not installed.
    """
    here = {there: name for name, there in names.items()}
    metadata = Metadata({}, planner_data={}, storage_data={})
    for file, listed in _listed_files(path).items():
        found = dict(_entries(file))
        missing = sorted(set(listed) - found.keys())
        if missing:
            raise CheckpointError(f"{file} lacks {', '.join(missing)}, which the index says it has")
        for name, entry in found.items():
            if strict or name in here:
                metadata.state_dict_metadata[name] = entry
                own = here.get(name, f"{name} of the files" if name in names else name)
                metadata.planner_data[name] = ("model", own)
                metadata.storage_data[MetadataIndex(name, entry.chunks[0].offsets)] = _Stored(str(file))
    return OpenCheckpoint(path, metadata, {}, None, "", HuggingFaceStorageReader)


def _entries(file: Path) -> Iterator[tuple[str, TensorStorageMetadata]]:
    """Yield name, shape and dtype of a file's tensors."""
    try:
        package = importlib.import_module("safetensors")
    except ImportError:
        raise ConfigError(
            "reading safetensors files needs the package safetensors: pip install 'megatron-fsdp-dbuffer[hf]'"
        ) from None
    try:
        opened = package.safe_open(str(file), framework="pt")
    except (OSError, package.SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from None
    with opened:
        for name in opened.keys():  # noqa: SIM118  (no mapping: it has keys() and cannot be iterated over)
            part = opened.get_slice(name)
            shape, dtype = torch.Size(part.get_shape()), part.get_dtype()
            if dtype not in _DTYPES:
                raise CheckpointError(f"tensor {name!r} is of dtype {dtype}, which is not supported")
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            yield name, TensorStorageMetadata(TensorProperties(_DTYPES[dtype]), shape, [chunk])


def _listed_files(path: Path) -> dict[Path, list[str]]:
    """Return the files to read, and what each must hold where an index says so."""
    single = path if path.is_file() else path / SINGLE
    if single.exists():
        return {single: []}
    index = path / INDEX
    files: dict[Path, list[str]] = {}
    try:
        by_tensor = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for tensor, name in by_tensor.items():
            if Path(name).name != name:
                raise CheckpointError(f"{index} names the file {name!r}, which lies outside of {path}")
            files.setdefault(path / name, []).append(tensor)
    except FileNotFoundError:
        raise CheckpointError(f"{path} holds no weights (looked for {SINGLE} and {INDEX})") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{index} is damaged ({type(error).__name__}: {error})") from None
    return files
