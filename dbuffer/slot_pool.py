"""SlotPool: permanent blocks of memory that storages use in turns as they are released and reallocated.

An allocator gives a storage different memory each time. A slot's address never changes, so a CUDA graph can record it,
a communicator can register it, and a step calls no allocator (docs/design/storage.md, "Slots").
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass

import torch

from dbuffer.errors import StorageError
from dbuffer.events import listeners, tell
from dbuffer.memory_meter import memory_meter
from dbuffer.slot_memory import Allocate

# PyTorch 2.11 lacks it.
_CAN_EXCHANGE = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
SIZINGS = ("by_size", "largest")


def can_exchange_memory() -> bool:
    """Return whether storages of this PyTorch can exchange their memory, which slots need."""
    return _CAN_EXCHANGE


class SlotPool:
    """Slots of memory on one device. A slot is made when no free one fits, and kept until the pool is freed.

    Args:
        device: the device of the memory.
        sizing: "largest": each slot can hold the largest storage that the pool serves. "by_size": a slot has the size
            of its first storage and serves only storages of that size.
        allocate: allocates the slots. None: the device's allocator.
    Raises:
        StorageError: ``sizing`` is unknown, or this PyTorch's storages cannot exchange their memory.
    """

    def __init__(self, device: torch.device, sizing: str, allocate: Allocate | None = None) -> None:
        if sizing not in SIZINGS:
            raise StorageError(f"SlotPool: sizing={sizing!r}. fix: give one of {', '.join(map(repr, SIZINGS))}")
        if not can_exchange_memory():
            raise StorageError(
                f"SlotPool: storages of PyTorch {torch.__version__} cannot exchange their memory. "
                "fix: install PyTorch 2.13 or newer, or leave the buffers to the allocator: set_slot_pool(None)"
            )
        self.sizing = sizing
        self._device = device
        self._allocate = allocate
        # A storage detects that NumPy has its address when it is no longer resizable. Other memory never is.
        self.shows_arrays = allocate is None
        self._largest = 0
        self._free: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(list)
        self.num_slots = 0
        self._counted = [0]
        weakref.finalize(self, lambda counted: memory_meter().add(-counted[0]), self._counted)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._counted[0]

    def serve(self, num_bytes: int) -> None:
        """Prepare for storages of this size; drop free slots that are now too small."""
        if num_bytes > self._largest:
            self._largest = num_bytes
            for size in [size for size in self._free if size < self.slot_bytes(size)]:
                for slot in self._free.pop(size):
                    self.lose(slot, size)

    def slot_bytes(self, num_bytes: int) -> int:
        """Return the slot size in bytes for a storage of ``num_bytes``."""
        return max(self._largest, num_bytes) if self.sizing == "largest" else num_bytes

    def take(self, num_bytes: int) -> torch.UntypedStorage:
        """Return a free slot for ``num_bytes`` bytes, with undefined content."""
        size = self.slot_bytes(num_bytes)
        free = self._free.get(size)
        if free:
            return free.pop()
        slot = self._new(size)
        self._count(1, size)
        return slot.untyped_storage()

    def _new(self, num_bytes: int) -> torch.Tensor:
        # A training step could not write memory that was allocated under inference_mode.
        with torch.inference_mode(False):
            if self._allocate is None:
                return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            return self._allocate(num_bytes)

    def give_back(self, slot: torch.UntypedStorage, size: int) -> None:
        """Return a slot of ``size`` bytes to the pool; a slot that is now too small is dropped."""
        if size < self.slot_bytes(size):
            self.lose(slot, size)
        else:
            self._free[size].append(slot)

    def lose(self, slot: torch.UntypedStorage, size: int) -> None:
        """Stop counting a slot whose memory was freed together with its storage."""
        self._count(-1, -size)

    def _count(self, num_slots: int, num_bytes: int) -> None:
        self.num_slots += num_slots
        self._counted[0] += num_bytes
        memory_meter().add(num_bytes)

    def __repr__(self) -> str:
        return f"SlotPool({self.sizing!r}, {self.num_slots} slots, {self.nbytes} bytes on {self._device})"


@dataclass(slots=True)
class Holding:
    """The memory that a storage holds now: its own bytes, a slot of a pool, or nothing."""

    own_bytes: int = 0
    pool: SlotPool | None = None
    slot: torch.UntypedStorage | None = None
    slot_bytes: int = 0

    def take_slot(self, pool: SlotPool, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Take a slot from ``pool`` and move its memory into ``storage``, under all of the storage's views."""
        slot = pool.take(num_bytes)
        self.pool, self.slot_bytes, self.slot = pool, slot.nbytes(), slot
        self.exchange(storage, slot)

    def give_back(self, storage: torch.UntypedStorage) -> None:
        """Move the memory back into the slot, and return the slot to its pool."""
        pool, slot = self.pool, self.slot
        assert pool is not None
        assert slot is not None
        if storage.nbytes():
            self.exchange(storage, slot)
        # Cleared first: once the pool has the slot, another storage may take it.
        self.slot = self.pool = None
        pool.give_back(slot, self.slot_bytes)

    @staticmethod
    def exchange(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        """Exchange the memory of two storages. Tensors stay with their storage and then see the other memory."""
        one._swap_data_ptr_(other)  # type: ignore[attr-defined]  # torch's stubs lack it
        if listeners:
            tell("exchanged", (one, other))

    def forget(self) -> None:
        """Stop counting memory whose storage was collected; views of it may still be alive."""
        memory_meter().add(-self.own_bytes)
        if self.pool is not None and self.slot is not None:
            self.pool.lose(self.slot, self.slot_bytes)
