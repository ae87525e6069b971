"""Where the memory of slots may come from, beside the device's allocator."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from dbuffer.errors import StorageError

Allocate = Callable[[int], torch.Tensor]
"""Returns that many bytes of memory, as a 1-D uint8 tensor."""


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
