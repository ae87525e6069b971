"""Hugging Face's folder of weights: safetensors files up to a size, and an index that says which tensor is where."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron_fsdp.checkpoint.safetensors_file import (
    SafetensorsWriter,
    TensorInfo,
    open_safetensors,
    read_infos,
    read_range,
)
from megatron_fsdp.errors import CheckpointError

__all__ = ["DEFAULT_FILE_BYTES", "INDEX", "SINGLE", "FolderReader", "write_folder"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DEFAULT_FILE_BYTES = 5 * 10**9


def write_folder(
    folder: Path,
    infos: Mapping[str, TensorInfo],
    source: Callable[[str], torch.Tensor],
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> None:
    """Write tensors into one file, or into several with an index; other files in the folder stay.

    Args:
        infos: what is to be written, in the order in which ``source`` is asked for it; one tensor at a time is in
            memory.
        max_file_bytes: a file ends before it would exceed this, unless one tensor alone does.
    Raises:
        CheckpointError: a dtype that the format has not.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = _parts(infos, max_file_bytes)
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = [SINGLE]
    # Without its entry point a folder that is half old and half new is visibly incomplete.
    for entry_point in (INDEX, SINGLE):
        (folder / entry_point).unlink(missing_ok=True)
    for name, part in zip(names, parts, strict=True):
        with SafetensorsWriter(folder / name, {key: infos[key] for key in part}) as file:
            for key in part:
                file.write(key, source(key))
    if len(parts) > 1:
        total = sum(info.num_bytes for info in infos.values())
        files = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})


class FolderReader:
    """Reads ranges of the tensors in a folder (or of one file); a context manager.

    Attributes:
        path: the folder or file. infos: all tensors in it.
    Raises:
        CheckpointError: files are missing, cut short, or not what the index says.
        ConfigError: the package ``safetensors`` is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.infos: dict[str, TensorInfo] = {}
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        with contextlib.ExitStack() as opened:
            for file, names in _listed_files(path).items():
                self._add(file, names, opened.enter_context(open_safetensors(file)))
            self._stack = opened.pop_all()

    def _add(self, path: Path, names: Sequence[str] | None, file: Any) -> None:
        infos = read_infos(file)
        missing = sorted(set(names or ()) - infos.keys())
        if missing:
            raise CheckpointError(f"{path} lacks {', '.join(missing)}, which the index says it has")
        self.infos |= infos
        self._files |= dict.fromkeys(infos, file)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Read one box of a tensor, by its first index and extent in each dimension."""
        return read_range(self._files[name], name, offsets, sizes)

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _parts(infos: Mapping[str, TensorInfo], max_file_bytes: int) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    num_bytes = 0
    for name, info in infos.items():
        if parts[-1] and num_bytes + info.num_bytes > max_file_bytes:
            parts.append([])
            num_bytes = 0
        parts[-1].append(name)
        num_bytes += info.num_bytes
    return parts


def _listed_files(path: Path) -> dict[Path, Sequence[str] | None]:
    """Return the files to read, and what each must hold where an index says so."""
    if path.is_file():
        return {path: None}
    if (path / SINGLE).exists():
        return {path / SINGLE: None}
    index = path / INDEX
    try:
        by_tensor = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files: dict[Path, list[str]] = {}
        for tensor, name in by_tensor.items():
            if Path(name).name != name:
                raise CheckpointError(f"{index} names the file {name!r}, which lies outside of {path}")
            files.setdefault(path / name, []).append(tensor)
    except FileNotFoundError:
        raise CheckpointError(f"{path} holds no weights (looked for {SINGLE} and {INDEX})") from None
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{index} is damaged ({type(error).__name__}: {error})") from None
    return dict(files)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
