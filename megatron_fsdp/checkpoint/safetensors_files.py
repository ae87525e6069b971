"""Hugging Face's folder of weights: safetensors files of limited size, and an index from tensors to files."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
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

from megatron_fsdp.checkpoint.manifest import sync
from megatron_fsdp.checkpoint.reader import OpenCheckpoint
from megatron_fsdp.errors import CheckpointError, ConfigError

__all__ = ["DEFAULT_FILE_BYTES", "INDEX", "SINGLE", "open_folder", "write_folder"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DEFAULT_FILE_BYTES = 5 * 10**9


def write_folder(
    folder: Path,
    likes: Mapping[str, torch.Tensor],
    source: Callable[[str], torch.Tensor],
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> None:
    """Write tensors to one file, or to several with an index; other files in the folder are kept.

    Args:
        likes: shapes and dtypes in the files. ``source`` is called for the values in this order; memory holds those of
            one file at a time.
        max_file_bytes: most bytes of tensors per file; a larger tensor gets a file of its own.
    Raises:
        CheckpointError: a file cannot be written.
        ConfigError: the package ``safetensors`` is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = _parts(likes, max_file_bytes)
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = [SINGLE]
    # Removed first: without its entry point, a folder that is half old and half new is recognized as incomplete.
    for entry_point in (INDEX, SINGLE):
        (folder / entry_point).unlink(missing_ok=True)
    for name, part in zip(names, parts, strict=True):
        values = {key: source(key).detach().to("cpu", likes[key].dtype, copy=True).contiguous() for key in part}
        _write(folder / name, functools.partial(_save, values))
    if len(parts) > 1:
        files = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        index = {"metadata": {"total_size": sum(like.nbytes for like in likes.values())}, "weight_map": files}
        _write(folder / INDEX, lambda file: file.write_text(json.dumps(index, indent=2)))


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


def _save(values: dict[str, torch.Tensor], file: Path) -> None:
    try:
        _package("safetensors.torch").save_file(values, file, {"format": "pt"})
    except KeyError as error:
        names = ", ".join(name for name, value in values.items() if value.dtype is error.args[0])
        raise CheckpointError(
            f"{file} cannot be written as safetensors, which has no {error}: {names}. fix: export with dtype=, or "
            "register those buffers with persistent=False"
        ) from None
    except (ValueError, _package("safetensors").SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be written as safetensors: {error}") from None


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name, and rename it when it is complete and on disk."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        write(unfinished)
        sync(unfinished)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            "safetensors files need the package safetensors. fix: pip install 'megatron-fsdp-dbuffer[hf]'"
        ) from None


@dataclass(frozen=True, slots=True)
class _Stored:
    """The file of a tensor, in the form that PyTorch's reader expects."""

    relative_path: str


def open_folder(path: Path, names: Mapping[str, str], *, strict: bool = True) -> OpenCheckpoint:
    """Open a folder, or one file, as a checkpoint of a model. Headers are checked; no values are read.

    Args:
        names: the model's names, mapped to the names in the files. Other tensors keep their names.
        strict: False: leave out tensors that are not in ``names``.
    Raises:
        CheckpointError: files are missing or cut short, or differ from the index.
        ConfigError: the package ``safetensors`` is not installed.
    """
    here = {there: name for name, there in names.items()}
    metadata = Metadata({}, planner_data={}, storage_data={})
    for file, listed in _listed_files(path).items():
        found = dict(_entries(file))
        missing = sorted(set(listed) - found.keys())
        if missing:
            raise CheckpointError(
                f"{file} lacks {', '.join(missing)}, which the index says it has. fix: copy or export the folder again"
            )
        for name, entry in found.items():
            if strict or name in here:
                metadata.state_dict_metadata[name] = entry
                own = here.get(name, f"{name} of the files" if name in names else name)
                metadata.planner_data[name] = ("model", own)
                metadata.storage_data[MetadataIndex(name, entry.chunks[0].offsets)] = _Stored(str(file))
    return OpenCheckpoint(path, metadata, {}, None, "", HuggingFaceStorageReader)


def _entries(file: Path) -> Iterator[tuple[str, TensorStorageMetadata]]:
    """Yield name, shape and dtype of a file's tensors."""
    package = _package("safetensors")
    dtypes = _package("safetensors.torch")._TYPES
    try:
        opened = package.safe_open(str(file), framework="pt")
    except (OSError, package.SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read as safetensors: {error}. fix: copy or export the folder again"
        ) from None
    with opened:
        for name in opened.keys():  # noqa: SIM118  (no mapping: it has keys() and cannot be iterated over)
            part = opened.get_slice(name)
            shape, dtype = torch.Size(part.get_shape()), part.get_dtype()
            if dtype not in dtypes:
                raise CheckpointError(
                    f"{file}: tensor {name!r} is of dtype {dtype}, which PyTorch's reader does not know. fix: convert "
                    f"the file to one of {', '.join(dtypes)}"
                )
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            yield name, TensorStorageMetadata(TensorProperties(dtypes[dtype]), shape, [chunk])


def _listed_files(path: Path) -> dict[Path, list[str]]:
    """Return the files to read, with the tensors that each must contain according to the index."""
    single = path if path.is_file() else path / SINGLE
    if single.exists():
        return {single: []}
    index = path / INDEX
    files: dict[Path, list[str]] = {}
    try:
        by_tensor = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for tensor, name in by_tensor.items():
            if Path(name).name != name:
                raise CheckpointError(
                    f"{index} names the file {name!r}, which lies outside of {path}. fix: put all files into one "
                    "folder, and name them without a path"
                )
            files.setdefault(path / name, []).append(tensor)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} holds no weights (looked for {SINGLE} and {INDEX}). fix: give the path of a folder with one of "
            "them, or of one safetensors file"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(
            f"{index} is damaged ({type(error).__name__}: {error}). fix: copy or export the folder again"
        ) from None
    return files
