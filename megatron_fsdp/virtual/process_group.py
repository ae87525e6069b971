"""Process groups of a virtual world: one rank per thread, no data moves, and ``Operators`` records collectives."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store  # torch.distributed has it, but untyped

__all__ = ["virtual_world"]

c10d: Any = dist.distributed_c10d
# torch's stubs overload every method with types that differ between versions.
_ProcessGroup: Any = dist.ProcessGroup
_FIRST_NAMES = itertools.count(10**6, 10**6)


class _Group(_ProcessGroup):  # type: ignore[misc]  # of Any
    """A group without a backend: a dispatch mode sees its collectives as operators, and nothing else happens.

    Attributes:
        prefix: of the names of groups that the engine makes.
    """

    prefix = "virtual "

    def __init__(self, rank: int, size: int) -> None:
        # Only this constructor makes an object whose methods C++ looks up in Python.
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        # The base class keeps these only with a C++ backend.
        self._names = {"name": "", "description": ""}

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


class _World(c10d._World):  # type: ignore[misc]  # of Any
    """torch.distributed's registry of groups for this thread alone; other threads keep the job's own."""

    def __init__(self, job: Any) -> None:
        super().__init__()
        self._job, self._thread = job, threading.get_ident()
        # Names of groups are unique in the process.
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
def virtual_world(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this thread one rank of a world as long as the block runs.

    The process may at the same time be a rank of a real job, whose groups stay untouched.
    """
    job, number, hook = c10d._world, dist.get_rank() if dist.is_initialized() else -1, sys.excepthook
    world = c10d._world = _World(job)
    try:
        dist.init_process_group("virtual", store=HashStore(), rank=rank, world_size=num_ranks)
        yield
    finally:
        world.close()
        c10d._world, sys.excepthook = job, hook
        torch._C._distributed_c10d._set_global_rank(number)


def _create(store: Store, rank: int, size: int, timeout: Any) -> _Group:
    return _Group(rank, size)


dist.Backend.register_backend("virtual", _create, devices=["cpu"])
