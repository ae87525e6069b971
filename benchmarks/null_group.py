"""A process group whose collectives do nothing, in a world of any size without other ranks.

``null_world(1024)`` makes this process rank 0 of 1,024 ranks, to measure only an engine's work on the host. Collectives
return at once and write nothing, so values mean nothing and may be NaN. torch's fake group instead copies its input
into every rank's place, which takes a millisecond per gather with 1,024 ranks. The group works with CPU and CUDA
tensors, and never touches their memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store  # torch.distributed has it, but untyped
from torch.futures import Future

__all__ = ["FinishedWork", "LocalGroup", "NullGroup", "local_world", "null_world"]


class FinishedWork(dist.Work):
    """The handle of a finished collective."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> Any:
        """Return a future that is done; some callers (DDP's reducer) chain their own work to it."""
        future: Future[list[torch.Tensor]] = Future()
        future.set_result([])
        return future


# torch's type stubs overload each method with types that differ between versions.
_ProcessGroup: Any = dist.ProcessGroup


class LocalGroup(_ProcessGroup):  # type: ignore[misc]  # of Any
    """A group with this process as its only real rank. Each collective calls ``issue`` and returns its result.

    Covers all methods that PyTorch 2.11 to 2.13 calls on a group, under old and new names.
    """

    def __init__(self, rank: int, size: int, name: str) -> None:
        # Only this constructor makes an object whose Python methods C++ calls.
        super().__init__(rank, size)
        self._rank, self._size, self._backend = rank, size, name
        # The base class stores them only in a C++ backend.
        self._group_name = self._group_desc = ""

    def issue(self, num_bytes: int) -> dist.Work:
        """Return the handle of a collective that sends and receives ``num_bytes`` on every rank."""
        raise NotImplementedError

    def rank(self) -> int:
        """Return this process's rank."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def getBackendName(self) -> str:
        """Return the backend's name, as C++ asks for it."""
        return self._backend

    def setGroupName(self, name: str) -> None:
        """Set the name by which functional collectives find the group."""
        self._group_name = name

    def getGroupName(self) -> str:
        """Return the name by which functional collectives find the group."""
        return self._group_name

    def setGroupDesc(self, description: str) -> None:
        """Take a description."""
        self._group_desc = description

    def getGroupDesc(self) -> str:
        """Return the description."""
        return self._group_desc

    # ------------------------------------------------------------------ whole tensors

    def all_gather_single(self, output: torch.Tensor, shard: torch.Tensor, opts: Any = None) -> dist.Work:
        """Gather: every rank receives the others' parts of ``output``."""
        return self.issue(self._remote(output))

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> dist.Work:
        """Reduce and scatter: every rank sends the others' parts of ``whole``."""
        return self.issue(self._remote(whole))

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """Reduce on all ranks: a reduce-scatter and a gather."""
        return self.issue(2 * sum(map(self._remote, tensors)))

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """Broadcast, at the cost of a gather."""
        return self.issue(sum(map(self._remote, tensors)))

    def barrier(self, opts: Any = None) -> dist.Work:
        """Return at once."""
        return self.issue(0)

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, output_sizes: Any, sizes: Any, opts: Any = None
    ) -> dist.Work:
        """Exchange parts with all ranks."""
        return self.issue(self._remote(given))

    # ------------------------------------------------------------------ lists of tensors

    def allgather(self, outputs: Sequence[Sequence[torch.Tensor]], shards: Any, opts: Any = None) -> dist.Work:
        """Gather into one tensor per rank."""
        return self.issue(sum(_bytes(tensor) for tensors in outputs for tensor in tensors[1:]))

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], shards: Any, opts: Any = None
    ) -> dist.Work:
        """Gather several tensors in one call."""
        return self.issue(sum(map(self._remote, outputs)))

    def reduce_scatter(self, outputs: Any, wholes: Sequence[Sequence[torch.Tensor]], opts: Any = None) -> dist.Work:
        """Reduce one tensor per rank, and keep this rank's."""
        return self.issue(sum(_bytes(tensor) for tensors in wholes for tensor in tensors[1:]))

    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, wholes: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce and scatter several tensors in one call."""
        return self.issue(sum(map(self._remote, wholes)))

    def scatter(self, outputs: Sequence[torch.Tensor], parts: Any, opts: Any = None) -> dist.Work:
        """Receive a part from one rank."""
        return self.issue(sum(map(_bytes, outputs)))

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    allreduce_coalesced = allreduce
    all_to_all_single = alltoall_base

    def _remote(self, whole: torch.Tensor) -> int:
        return _bytes(whole) * (self._size - 1) // self._size


class NullGroup(LocalGroup):
    """A group whose collectives do nothing."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, "null")
        self._work = FinishedWork()

    def issue(self, num_bytes: int) -> dist.Work:
        """Return a finished handle, always the same one."""
        return self._work

    # Units call these methods in each step, so they do not count bytes, which would take time.

    def all_gather_single(self, output: torch.Tensor, shard: torch.Tensor, opts: Any = None) -> dist.Work:
        """Write nothing."""
        return self._work

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> dist.Work:
        """Write nothing."""
        return self._work

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def local_world(backend: str, num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this process one rank of a world of groups of a registered backend, as long as the block runs.

    Raises:
        RuntimeError: torch.distributed is initialized already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            f"{backend!r} needs a process of its own: torch.distributed is initialized with backend "
            f"{dist.get_backend()!r}; call destroy_process_group() first"
        )
    dist.init_process_group(backend, store=HashStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def null_world(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this process one rank of ``num_ranks`` whose collectives do nothing, as long as the block runs."""
    with local_world("null", num_ranks, rank):
        yield


def _create(store: Store, rank: int, size: int, timeout: Any) -> NullGroup:
    return NullGroup(rank, size)


dist.Backend.register_backend("null", _create, devices=["cpu", "cuda"])
