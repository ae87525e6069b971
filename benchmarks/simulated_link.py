"""A process group whose collectives move no data, and take the time of a link with given latency and bandwidth.

Each group is a queue. A collective starts when it is issued and the earlier collectives of its group are done. It takes
``latency + bytes / bandwidth``; bytes are those that a rank receives or sends. ``wait`` sleeps until then. With this
group one process measures the overlap of communication and compute, without a network and without other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed has it, but untyped

from benchmarks.null_group import FinishedWork, LocalGroup, local_world

__all__ = ["Link", "LinkGroup", "link_world", "take_waited_seconds"]


@dataclass(frozen=True, slots=True)
class Link:
    """A rank's link to the others: seconds that any collective takes, and bytes per second on top."""

    latency: float
    bandwidth: float

    def seconds(self, num_bytes: int) -> float:
        """Return how long a collective of so many bytes per rank takes on an idle link."""
        return self.latency + num_bytes / self.bandwidth

    def collective_seconds(self, whole_bytes: int, num_ranks: int) -> float:
        """Return how long a gather or a reduce-scatter of so many bytes in all takes over ``num_ranks`` ranks."""
        return self.seconds(whole_bytes * (num_ranks - 1) // num_ranks)


_LINKS: list[Link] = []
_WAITS: list[float] = []


class TimedWork(FinishedWork):
    """The handle of a collective that ends at a given time."""

    def __init__(self, end: float, waits: list[float]) -> None:
        super().__init__()
        self._end = end
        self._waits = waits

    def wait(self, timeout: Any = None) -> bool:
        """Sleep until the collective ends."""
        rest = self._end - time.perf_counter()
        if rest > 0:
            self._waits.append(rest)
            time.sleep(rest)
        return True

    def is_completed(self) -> bool:
        """Return whether the collective has ended."""
        return time.perf_counter() >= self._end


class LinkGroup(LocalGroup):
    """A group with its own link; collectives do not change data."""

    def __init__(self, rank: int, size: int, link: Link) -> None:
        super().__init__(rank, size, "link")
        self._link = link
        self._free_at = 0.0

    def issue(self, num_bytes: int) -> dist.Work:
        """Queue a collective of ``num_bytes``; without bytes, as for a barrier, it has ended at once."""
        if not num_bytes:
            return FinishedWork()
        self._free_at = max(self._free_at, time.perf_counter()) + self._link.seconds(num_bytes)
        return TimedWork(self._free_at, _WAITS)


def take_waited_seconds() -> float:
    """Return the seconds that this process has waited for such collectives since the last call."""
    waited = sum(_WAITS)
    _WAITS.clear()
    return waited


@contextmanager
def link_world(num_ranks: int, link: Link, rank: int = 0) -> Iterator[None]:
    """Make this process one rank of a world whose groups have such links, as long as the block runs."""
    _LINKS.append(link)
    try:
        with local_world("link", num_ranks, rank):
            yield
    finally:
        _LINKS.pop()


def _create(store: Store, rank: int, size: int, timeout: Any) -> LinkGroup:
    if not _LINKS:
        raise RuntimeError("backend 'link' needs to know its latency and bandwidth; use link_world(num_ranks, link)")
    return LinkGroup(rank, size, _LINKS[-1])


dist.Backend.register_backend("link", _create, devices=["cpu", "cuda"])
