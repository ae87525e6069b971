"""One file in the safetensors format: written tensor by tensor, read range by range.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of the header, little endian; the
header, a JSON object of dtype, shape and byte range by name; the tensors' bytes, row-major, without gaps.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron_fsdp.errors import CheckpointError, ConfigError

__all__ = ["SafetensorsWriter", "TensorInfo", "open_safetensors", "read_infos", "read_range"]

_DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file says of a tensor before its values are read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """Writes a file beside its place, one tensor at a time, and gives it its name when it is complete.

    Args:
        path: the file. infos: all tensors that it will hold, in the order in which they will come.
    Raises:
        CheckpointError: a dtype that the format has not.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, info in infos.items():
            if info.dtype not in _DTYPES:
                raise CheckpointError(
                    f"{name!r} is {info.dtype}, which safetensors files cannot hold; export as another"
                )
            start, end = end, end + info.num_bytes
            header[name] = {"dtype": _DTYPES[info.dtype], "shape": list(info.shape), "data_offsets": [start, end]}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % _ALIGNMENT)
        self._path = path
        self._unfinished = path.with_name(path.name + ".tmp")
        self._expected = list(infos.items())
        self._file = self._unfinished.open("wb")
        self._file.write(len(encoded).to_bytes(8, "little") + encoded)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor, from any device; its dtype is changed to the announced one."""
        wanted_name, info = self._expected.pop(0)
        assert (wanted_name, info.shape) == (name, tuple(tensor.shape)), (wanted_name, info, name, tensor.shape)
        values = tensor.detach().to("cpu", info.dtype).contiguous().reshape(-1)
        self._file.write(values.view(torch.uint8).numpy().data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                assert not self._expected, self._expected
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
        if error is None:
            self._unfinished.replace(self._path)
        else:
            self._unfinished.unlink(missing_ok=True)


def open_safetensors(path: Path) -> AbstractContextManager[Any]:
    """Open a file for ``read_infos`` and ``read_range``; its header is checked, no values are read.

    Raises:
        ConfigError: the package ``safetensors`` is not installed.
        CheckpointError: the file is missing, cut short or no safetensors file.
    """
    try:
        package = importlib.import_module("safetensors")
    except ImportError:
        raise ConfigError(
            "reading safetensors files needs the package safetensors: pip install 'megatron-fsdp-dbuffer[hf]'"
        ) from None
    try:
        opened: AbstractContextManager[Any] = package.safe_open(str(path), framework="pt")
    except (OSError, package.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from None
    return opened


def read_infos(file: Any) -> dict[str, TensorInfo]:
    """Return the tensors of an open file.

    Raises:
        CheckpointError: a dtype that PyTorch has not.
    """
    found = {}
    for name in file.keys():  # noqa: SIM118  (no mapping: it has keys() and cannot be iterated over)
        part = file.get_slice(name)
        dtype = part.get_dtype()
        if dtype not in _BY_NAME:
            raise CheckpointError(f"tensor {name!r} is of dtype {dtype}, which is not supported")
        found[name] = TensorInfo(tuple(part.get_shape()), _BY_NAME[dtype])
    return found


def read_range(file: Any, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Read one box of a tensor, given by its first index and its extent in each dimension; nothing beside it."""
    if not offsets:
        whole: torch.Tensor = file.get_tensor(name)
        return whole
    box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    part: torch.Tensor = file.get_slice(name)[box]
    return part
