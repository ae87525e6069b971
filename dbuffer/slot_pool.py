"""SlotPool: memory that stays, in slots that released and reallocated storages take turns in.

An allocator gives a storage other bytes each time. A slot is always the same memory, so a CUDA graph can hold it and a
communicator can register it, and a step calls no allocator (docs/design/storage.md, "Slots").
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from dbuffer.errors import StorageError
from dbuffer.memory_meter import memory_meter

__all__ = ["Allocate", "SlotPool", "SlotUser", "can_exchange_memory", "from_communicator", "from_symmetric_memory"]

Allocate = Callable[[int], torch.Tensor]
"""Returns that many bytes of memory, as a 1-D uint8 tensor."""

# Not in PyTorch 2.11.
_CAN_EXCHANGE = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
SIZINGS = ("by_size", "largest", "static")


@dataclass(frozen=True, slots=True)
class SlotUser:
    """A storage that takes slots: its number, and whether it comes ahead of its use when the order is known."""

    number: int
    comes_ahead: bool = False


def can_exchange_memory() -> bool:
    """Whether this PyTorch's storages can, as slots need."""
    return _CAN_EXCHANGE


class SlotPool:
    """Slots of memory on one device, made when none is free that fits and kept until the pool is gone.

    Args:
        device: of the memory.
        sizing: "largest": each slot can hold the largest storage that the pool serves. "by_size": a slot has the size
            of the storage it was made for and serves storages of just that size. "static": likewise, for those that
            ``ArenaPool`` has no place for.
        allocate: where slots come from. None: from the device's allocator.
    Raises:
        StorageError: another ``sizing``, or a PyTorch whose storages cannot exchange their memory.
    """

    def __init__(self, device: torch.device, sizing: str, allocate: Allocate | None = None) -> None:
        if sizing not in SIZINGS:
            raise StorageError(f"SlotPool: sizing={sizing!r}; give one of {', '.join(map(repr, SIZINGS))}")
        if not can_exchange_memory():
            raise StorageError(
                f"SlotPool: storages of PyTorch {torch.__version__} cannot exchange their memory; PyTorch 2.13 can. "
                "Leave the buffers to the allocator."
            )
        self.sizing = sizing
        self._device = device
        self._allocate = allocate
        self._largest = 0
        self._free: dict[int, list[torch.UntypedStorage]] = {}
        self.num_slots = 0
        self.nbytes = 0
        weakref.finalize(self, _forget, self._free)

    def serve(self, num_bytes: int) -> None:
        """Be ready for storages of this size."""
        if num_bytes > self._largest:
            self._largest = num_bytes
            if self.sizing == "largest":
                self._drop_free()

    def slot_bytes(self, num_bytes: int) -> int:
        """Return how many bytes the slot of a storage of ``num_bytes`` has."""
        return max(self._largest, num_bytes) if self.sizing == "largest" else num_bytes

    def forecast_bytes(self, num_bytes: int) -> int:
        """Return the bytes of the slot that a storage will have alone; 0: a place in an arena, which has a plan."""
        return self.slot_bytes(num_bytes)

    def take(self, num_bytes: int, user: SlotUser | None = None) -> torch.UntypedStorage:
        """Return a free slot for a storage of ``num_bytes``, with undefined content; ``user``: who asks."""
        size = self.slot_bytes(num_bytes)
        free = self._free.get(size)
        if free:
            return free.pop()
        slot = self._new(size)
        self._count(1, size)
        return slot.untyped_storage()

    def _new(self, num_bytes: int) -> torch.Tensor:
        # Memory made under inference_mode could never be written by a training step later on.
        with torch.inference_mode(False):
            if self._allocate is None:
                return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            return self._allocate(num_bytes)

    @staticmethod
    def exchange(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        """Exchange the memory of two storages; tensors stay with their storage, whose memory is another then."""
        one._swap_data_ptr_(other)  # type: ignore[attr-defined]  # torch's stubs lack it

    def give_back(self, slot: torch.UntypedStorage, size: int) -> None:
        """Take a slot of ``size`` bytes back; one that has become too small is dropped."""
        if self.sizing == "largest" and size < self._largest:
            self.lose(slot, size)
        else:
            self._free.setdefault(size, []).append(slot)

    def lose(self, slot: torch.UntypedStorage, size: int) -> None:
        """Forget a slot that went with the storage that had it."""
        self._count(-1, -size)

    def _drop_free(self) -> None:
        for size, slots in self._free.items():
            self._count(-len(slots), -size * len(slots))
        self._free.clear()

    def _count(self, num_slots: int, num_bytes: int) -> None:
        self.num_slots += num_slots
        self.nbytes += num_bytes
        memory_meter().add(num_bytes)

    def __repr__(self) -> str:
        return f"SlotPool({self.sizing!r}, {self.num_slots} slots, {self.nbytes} bytes on {self._device})"


def _forget(free: dict[int, list[torch.UntypedStorage]]) -> None:
    memory_meter().add(-sum(size * len(slots) for size, slots in free.items()))


def from_communicator(group: dist.ProcessGroup, device: torch.device) -> Allocate | None:
    """Return the allocator of a communicator's own memory, which it need not copy through buffers; None if it has none.

    For NCCL that is memory it has registered (user buffers). It registers with a communicator, which it makes at the
    first collective where ``init_process_group`` got no ``device_id``: made here, so every rank calls this.
    """
    backend = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        return None
    backend.eager_connect_single_device(device)
    return lambda num_bytes: backend.allocate_tensor(num_bytes, dtype=torch.uint8, device=device)


def from_symmetric_memory(group: dist.ProcessGroup, device: torch.device, backend: str) -> Allocate:
    """Return an allocator of memory that every rank of ``group`` maps at once; all of them allocate in the same order.

    A communicator has to be there before its ranks can map memory; it is made here, so every rank calls this.

    Raises:
        StorageError: the device is no GPU.
    """
    if device.type != "cuda":
        raise StorageError(f"symmetric memory is memory of GPUs, found {device}; leave it off")
    group._get_backend(device).eager_connect_single_device(device)
    symmetric_memory.set_backend(backend)  # type: ignore[arg-type]  # torch checks the name

    def allocate(num_bytes: int) -> torch.Tensor:
        with torch.cuda.use_mem_pool(symmetric_memory.get_mem_pool(device)):
            slot = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(slot, group=group.group_name)
        return slot

    return allocate
