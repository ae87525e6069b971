"""Allocators for the memory of slots other than the device's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from dbuffer.errors import StorageError

Allocate = Callable[[int], torch.Tensor]
"""A function that returns that many bytes of memory as a 1-D uint8 tensor."""


def from_communicator(group: dist.ProcessGroup, device: torch.device) -> Allocate | None:
    """Return an allocator of the communicator's own memory; None if the backend has none.

    A communicator sends from and to this memory without copies through its own buffers. NCCL registers it (user
    buffers), and registering needs a connected communicator. Without ``device_id`` in ``init_process_group`` NCCL
    connects at the first collective, so this function connects it. Every rank must call it.
    """
    backend = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        return None
    _connect(backend, device)
    return lambda num_bytes: backend.allocate_tensor(num_bytes, dtype=torch.uint8, device=device)


def from_symmetric_memory(group: dist.ProcessGroup, device: torch.device, backend: str) -> Allocate:
    """Return an allocator of memory that all ranks of ``group`` map. They must all allocate in the same order.

    Mapping needs a connected communicator, so this function connects it. Every rank must call it.

    Raises:
        StorageError: the device is not a GPU.
    """
    if device.type != "cuda":
        raise StorageError(
            f"symmetric memory is memory of GPUs, found {device}. fix: do not ask for symmetric memory on this device"
        )
    _connect(group._get_backend(device), device)
    symmetric_memory.set_backend(backend)  # type: ignore[arg-type]  # torch checks the name

    def allocate(num_bytes: int) -> torch.Tensor:
        with torch.cuda.use_mem_pool(symmetric_memory.get_mem_pool(device)):
            slot = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(slot, group=group.group_name)
        return slot

    return allocate


def _connect(backend: Any, device: torch.device) -> None:
    """Connect a communicator that is not connected yet.

    If it is connected, ``eager_connect_single_device`` makes a second communicator. Memory would be registered with the
    second one, and collectives would go on to use the first.
    """
    if not backend._is_initialized():
        backend.eager_connect_single_device(device)
