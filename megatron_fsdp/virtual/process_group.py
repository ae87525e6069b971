"""Process groups of which this process is the only rank: collectives are noted, and move nothing."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store  # torch.distributed has it, but untyped
from torch.futures import Future

from megatron_fsdp.virtual.operators import tensors_in
from megatron_fsdp.virtual.recording import Recording, Work

__all__ = ["virtual_world"]

c10d: Any = dist.distributed_c10d
# torch's stubs overload every method of it by types that differ between versions.
_ProcessGroup: Any = dist.ProcessGroup
_FIRST_NAMES = itertools.count(10**6, 10**6)
_recordings: list[Recording] = []


class _Finished(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Future[list[Any]] = Future()
        future.set_result([])
        return future


class _Group(_ProcessGroup):  # type: ignore[misc]  # of Any
    """Every method that PyTorch 2.11 to 2.13 calls on a group, under its old name and its new one.

    Attributes:
        prefix: of the names of groups that the engine makes.
    """

    prefix = "virtual "

    def __init__(self, rank: int, size: int) -> None:
        # The one of its constructors that makes an object whose methods C++ looks up in Python.
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        # The base class keeps them only where a C++ backend does.
        self._names = {"name": "", "description": ""}
        self._work = _Finished()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return "virtual"

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupName(self) -> str:
        return self._names["name"]

    def setGroupDesc(self, description: str) -> None:
        self._names["description"] = description

    def getGroupDesc(self) -> str:
        return self._names["description"]

    def note(self, kind: str, full_side: Any) -> dist.Work:
        """Note a collective whose full side is in those tensors."""
        if _recordings and self._size > 1:
            recording, num_bytes = _recordings[-1], sum(each.nbytes for each in tensors_in(full_side))
            ranks = tuple(dist.get_process_group_ranks(self))
            work = Work(kind, kind, 0, num_bytes, ranks=ranks, axis=recording.axis, label=recording.label())
            recording.work(work, calls=recording.collective_calls)
        return self._work


# Which argument is the full side.
_METHODS = {
    "all_gather": (0, "all_gather_single _allgather_base allgather allgather_into_tensor_coalesced"),
    "reduce_scatter": (1, "reduce_scatter_single _reduce_scatter_base reduce_scatter reduce_scatter_tensor_coalesced"),
    "all_reduce": (0, "allreduce allreduce_coalesced"),
    "broadcast": (0, "broadcast"),
    "all_to_all": (1, "alltoall alltoall_base all_to_all_single"),
    "scatter": (1, "scatter"),
    "barrier": (9, "barrier"),
}


def _method(kind: str, position: int) -> Callable[..., dist.Work]:
    def collective(self: Any, *args: Any, **kwargs: Any) -> dist.Work:
        work: dist.Work = self.note(kind, args[position : position + 1])
        return work

    return collective


for _kind, (_position, _names) in _METHODS.items():
    for _name in _names.split():
        setattr(_Group, _name, _method(_kind, _position))
for _name in ("all_gather_single_coalesced", "reduce_scatter_single_coalesced"):
    setattr(_Group, _name, _method(_name.removesuffix("_single_coalesced"), int(_name.startswith("reduce"))))


class _World(c10d._World):  # type: ignore[misc]  # of Any
    """What torch.distributed knows of groups, for this thread alone: others go on with the job's own."""

    def __init__(self, job: Any) -> None:
        super().__init__()
        self._job, self._thread = job, threading.get_ident()
        # Names of groups are the process's.
        self._own: dict[str, Any] = {"group_count": next(_FIRST_NAMES), "default_pg": None}
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"):
            self._own[name] = {}

    def close(self) -> None:
        """Forget the names of the groups that were made."""
        for group in self._own["pg_names"]:
            c10d._unregister_process_group(group.group_name)


def _own_or_the_jobs(name: str) -> property:
    def get(self: Any) -> Any:
        is_own = "_own" in self.__dict__ and self._thread == threading.get_ident()
        return self._own[name] if is_own else getattr(self._job, name)

    def put(self: Any, value: Any) -> None:
        if self._thread == threading.get_ident():
            self._own[name] = value
        else:
            setattr(self._job, name, value)

    return property(get, put)


for _name in (
    "default_pg", "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "group_count", "tags_to_pg", "pg_to_tag",
):  # fmt: skip
    setattr(_World, _name, _own_or_the_jobs(_name))


@contextmanager
def virtual_world(recording: Recording, num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this thread one rank of a world whose collectives are noted in ``recording``, as long as the block runs.

    The process may be a rank of a job meanwhile, whose groups nobody touches.
    """
    job, number, hook = c10d._world, dist.get_rank() if dist.is_initialized() else -1, sys.excepthook
    world = c10d._world = _World(job)
    _recordings.append(recording)
    try:
        dist.init_process_group("virtual", store=HashStore(), rank=rank, world_size=num_ranks)
        yield
    finally:
        _recordings.pop()
        world.close()
        c10d._world, sys.excepthook = job, hook
        torch._C._distributed_c10d._set_global_rank(number)


def _create(store: Store, rank: int, size: int, timeout: Any) -> _Group:
    return _Group(rank, size)


dist.Backend.register_backend("virtual", _create, devices=["cpu"])
