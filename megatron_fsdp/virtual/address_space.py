"""Address space without memory: a virtual device has larger tensors than the machine's memory."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["LARGE", "empty", "large_storages"]

LARGE = 1 << 30
"""Bytes from which on an allocator may refuse what is more than the machine has."""
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over reserved addresses, for which the system provides no pages."""
    numel = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if math.prod(shape) else 0
    return _addresses(numel * dtype.itemsize).view(dtype).as_strided(shape, strides)


def _addresses(num_bytes: int) -> torch.Tensor:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)


@contextlib.contextmanager
def large_storages() -> Iterator[None]:
    """Let storages that grow to ``LARGE`` bytes or more, or were that large, have such memory while the block runs."""
    kind: Any = torch.UntypedStorage
    resize = kind.resize_

    def resized(storage: Any, num_bytes: int) -> Any:
        if max(num_bytes, storage.nbytes()) < LARGE:
            return resize(storage, num_bytes)
        other = _addresses(num_bytes).untyped_storage() if num_bytes >= LARGE else kind(num_bytes)
        storage._swap_data_ptr_(other)
        return storage

    kind.resize_ = resized
    try:
        yield
    finally:
        kind.resize_ = resize
