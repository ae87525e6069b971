"""Flat storage whose memory can be released and reallocated under existing views.

``release`` frees the bytes; the tensor and all of its views keep their identity. ``reallocate`` allocates bytes again
under the same views. The engine can therefore build its views once (docs/design/storage.md).
"""

from __future__ import annotations

import logging
import weakref

import torch

from dbuffer.errors import StorageError
from dbuffer.events import listeners, tell
from dbuffer.memory_meter import memory_meter
from dbuffer.slot_pool import Holding, SlotPool

_METER = memory_meter()
_LOG = logging.getLogger(__name__)

KNOWN: weakref.WeakValueDictionary[int, FlatStorage] = weakref.WeakValueDictionary()
"""Flat storages by the address of their PyTorch storage object, which never changes."""


class FlatStorage:
    """``numel`` elements of one dtype on one device; their memory can be released and reallocated.

    Attributes:
        name: the owner, for error messages ("unit 'blocks.0': gathered weights").
        nbytes: its size in bytes while allocated.
        is_allocated: whether the memory is allocated.
    """

    __slots__ = (
        "__weakref__", "_bytes", "_finalizer", "_holding", "_is_lent", "_pool", "_tensor", "is_allocated", "name",
        "nbytes",
    )  # fmt: skip

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, name: str, pin_memory: bool = False
    ) -> None:
        self.name = name
        # A training step could not write memory that was allocated under inference_mode.
        with torch.inference_mode(False):
            pinned = pin_memory and device.type == "cpu" and torch.cuda.is_available()
            self._tensor = torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)
        self.nbytes = 0 if device.type == "meta" else numel * dtype.itemsize
        self.is_allocated = True
        self._is_lent = False
        self._pool: SlotPool | None = None
        self._holding = Holding(self.nbytes)
        _METER.add(self.nbytes)
        self._bytes = self._tensor.untyped_storage()
        KNOWN[self._bytes._cdata] = self
        self._finalizer = weakref.finalize(self, self._holding.forget)
        if listeners:
            tell("allocated", self)

    @property
    def tensor(self) -> torch.Tensor:
        """The flat tensor.

        Raises:
            StorageError: the storage is released.
        """
        if not self.is_allocated:
            raise StorageError(
                f"{self.name}: its storage is released, so there are no values to read or write. fix: use it between "
                "unshard() and reshard(), or read the sharded parameter, which is always available"
            )
        return self._tensor

    @property
    def takes_slots(self) -> bool:
        """True if the next ``reallocate`` takes memory from a pool."""
        return self._pool is not None

    def use_pool(self, pool: SlotPool | None) -> None:
        """Take memory from the slots of ``pool`` at the next ``reallocate``; None: from the allocator."""
        self._pool = pool
        if pool is not None:
            pool.serve(self.nbytes)

    def release(self) -> None:
        """Free the memory. Views keep their identity, but must not be used until ``reallocate``.

        If NumPy has an address in the memory (``tensor.numpy()``), the memory stays allocated forever, because PyTorch
        does not tell when NumPy's array dies.
        """
        if not self.is_allocated or not self.nbytes:
            return
        self.is_allocated = False
        holding = self._holding
        if holding.slot is not None:
            if holding.pool is not None and holding.pool.shows_arrays and not self._bytes.resizable():
                # If the slot were given back, another storage would write its values into the array.
                self._lend()
            else:
                holding.give_back(self._bytes)
            return
        if self._is_lent:
            return
        try:
            self._bytes.resize_(0)
        except RuntimeError:
            if self._bytes.resizable():
                raise
            self._lend()
            return
        if listeners:
            tell("released", self._bytes)
        _METER.current_bytes -= holding.own_bytes
        holding.own_bytes = 0

    def reallocate(self) -> None:
        """Allocate the memory again, with undefined content, under all existing views.

        If this raises (out of memory, an interrupt), the storage is still released and may be reallocated again.
        """
        if self.is_allocated:
            return
        if self._is_lent:
            self.is_allocated = True
            return
        holding, pool, num_bytes = self._holding, self._pool, self.nbytes
        if holding.slot is not None:
            holding.give_back(self._bytes)  # an interrupt stopped an earlier reallocate or release halfway
        if pool is not None:
            holding.take_slot(pool, self._bytes, num_bytes)
        else:
            self._bytes.resize_(num_bytes)
            _METER.current_bytes += num_bytes - holding.own_bytes
            _METER.num_allocations += 1
            if _METER.current_bytes > _METER.peak_bytes:
                _METER.peak_bytes = _METER.current_bytes
            holding.own_bytes = num_bytes
        self.is_allocated = True
        if listeners and pool is None:
            tell("allocated", self)

    def _lend(self) -> None:
        """Keep the memory allocated from now on, because a NumPy array may read it."""
        if not self._is_lent:
            self._is_lent = True
            _LOG.warning(
                "%s: .numpy() was called on a tensor in this memory, as hooks on saved tensors may do, so its %d bytes "
                "stay allocated from now on. Values are right. fix: tensor.clone().numpy() copies the tensor instead.",
                self.name,
                self.nbytes,
            )
