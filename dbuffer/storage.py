"""Flat storage whose memory comes and goes under views that stay.

``release`` gives the bytes back while the tensor, and every view made of it, keeps its identity; ``reallocate`` brings
bytes back under the same views. That is what lets a runtime build its views once (docs/design/storage.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dbuffer.errors import StorageError

__all__ = ["FlatStorage", "MemoryMeter", "guard_released_storage", "memory_meter"]


class MemoryMeter:
    """Counts the bytes that the engine's storages hold now, and the most they held since the last reset."""

    __slots__ = ("current_bytes", "num_allocations", "peak_bytes")

    def __init__(self) -> None:
        self.current_bytes = 0
        self.peak_bytes = 0
        self.num_allocations = 0

    def add(self, num_bytes: int) -> None:
        """Record an allocation (positive) or a release (negative)."""
        self.current_bytes += num_bytes
        if num_bytes > 0:
            self.num_allocations += 1
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def reset_peak(self) -> None:
        """Forget the peak: from here on it counts again from what is held now."""
        self.peak_bytes = self.current_bytes
        self.num_allocations = 0


_METER = MemoryMeter()


def memory_meter() -> MemoryMeter:
    """Return the meter that all storages of this process report to."""
    return _METER


_RELEASED: weakref.WeakValueDictionary[int, FlatStorage] = weakref.WeakValueDictionary()


class FlatStorage:
    """``numel`` elements of one dtype on one device, that can be released and reallocated.

    Attributes:
        name: who owns it, for error messages ("unit 'blocks.0': gathered weights").
        nbytes: bytes it takes while allocated.
    """

    __slots__ = ("__weakref__", "_finalizer", "_held", "_tensor", "name", "nbytes")

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, name: str, pin_memory: bool = False
    ) -> None:
        self.name = name
        # Memory made under inference_mode could never be written by a training step later on.
        with torch.inference_mode(False):
            pinned = pin_memory and device.type == "cpu" and torch.cuda.is_available()
            self._tensor = torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)
        self.nbytes = 0 if device.type == "meta" else numel * dtype.itemsize
        self._held = [self.nbytes]
        _METER.add(self.nbytes)
        self._finalizer = weakref.finalize(self, _give_back, self._held)

    @property
    def is_allocated(self) -> bool:
        """Whether the bytes are there (always true of an empty storage)."""
        return self._held[0] == self.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        """The flat tensor.

        Raises:
            StorageError: the storage is released.
        """
        if not self.is_allocated:
            raise StorageError(
                f"{self.name}: its storage is released, so there are no values to read or write. Use it between "
                "unshard() and reshard(), or read the sharded parameter, which is always there."
            )
        return self._tensor

    def release(self) -> None:
        """Give the bytes back; views keep their identity and must not be used until ``reallocate``."""
        if self.is_allocated and self.nbytes:
            self._tensor.untyped_storage().resize_(0)
            self._held[0] = 0
            _METER.add(-self.nbytes)
            _RELEASED[self._tensor.untyped_storage()._cdata] = self

    def reallocate(self) -> None:
        """Bring the bytes back, with undefined content, under all existing views."""
        if not self.is_allocated:
            _RELEASED.pop(self._tensor.untyped_storage()._cdata, None)
            self._tensor.untyped_storage().resize_(self.nbytes)
            self._held[0] = self.nbytes
            _METER.add(self.nbytes)


def _give_back(held: list[int]) -> None:
    _METER.add(-held[0])


# They read no data and no storage size.
_HARMLESS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class _ReleasedStorageGuard(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            for leaf in tree_iter((args, kwargs or {})):
                if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.numel():
                    owner = _RELEASED.get(leaf.untyped_storage()._cdata)
                    if owner is not None:
                        raise StorageError(
                            f"{owner.name}: {func} was called on a view of it after its storage was released"
                        )
        return func(*args, **(kwargs or {}))


@contextmanager
def guard_released_storage() -> Iterator[None]:
    """Check every operator in the block and raise ``StorageError`` where one touches released storage.

    A view of released memory that was kept somewhere (a captured weight, a tensor saved for backward) ends in a
    crash on
    CPU and in an illegal address on a GPU. With this guard it is an error that names the owner; it costs a Python call
    per operator, so it is for debugging and for tests.
    """
    with _ReleasedStorageGuard():  # type: ignore[no-untyped-call]  # torch leaves the base untyped
        yield
