"""Ordered queues of device work beside the compute streams: one for gathers, one for reductions.

On CUDA a lane is a stream. On CPU it is gloo's own worker: collectives are issued asynchronously, and what follows
one (the fold of a reduced gradient) runs when somebody waits for it (docs/design/order.md, "Streams").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from dbuffer.collectives import wait_for
from dbuffer.events import listeners, tell
from megatron_fsdp.runtime.step.cuda_lane import COMPUTE, LANES, CudaLane, compute_of
from megatron_fsdp.runtime.step.lane_types import Lane, Operation, Ticket

__all__ = ["HOST_READS", "CpuLane", "forget_unused_streams", "join_lanes", "lane", "settle_host"]

HOST_READS: set[torch.device] = set()
"""Devices to which gathers may still copy main weights: the host must not write these before ``settle_host``."""


class _CpuTicket:
    __slots__ = ("_on_host", "_then", "lane", "owner", "works")

    def __init__(
        self, lane: str, owner: int, then: Callable[[], None] | None, on_host: Callable[[], None] | None
    ) -> None:
        self.lane, self.owner = lane, owner
        self.works: list[dist.Work] = []
        self._then, self._on_host = then, on_host

    def wait(self) -> None:
        """Block until the collectives are done, then run what follows them, once."""
        if not self.works and self._then is None and self._on_host is None:
            return
        if listeners:
            tell("wait", self)
        for work in self.works:
            wait_for(work)
        self.works = []
        if listeners:
            tell("landed", self)
        if self._then is not None:
            self._then()
        if self._on_host is not None:
            self._on_host()
        self._then = self._on_host = None
        if listeners:
            tell("waited", self)

    def lead(self, stream: Any) -> None:
        """Do nothing: there are no streams."""

    def give_up(self) -> None:
        """Wait for the collectives, and let what would have followed them be."""
        self._then = self._on_host = None
        for work in self.works:
            with suppress(RuntimeError):
                wait_for(work)
        self.works = []


class CpuLane:
    """Gloo's workers as a lane."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(
        self,
        operation: Operation,
        then: Callable[[], None] | None = None,
        on_host: Callable[[], None] | None = None,
        *,
        owner: int = 0,
        tickets: Iterable[list[Ticket]] = (),
        after: Iterable[Ticket] = (),
    ) -> Ticket:
        """Start the collectives; ``then`` and ``on_host`` run in ``Ticket.wait``."""
        ticket = _CpuTicket(self._name, owner, then, on_host)
        for known in tickets:
            known.append(ticket)
        if listeners:
            tell("issue", ticket)
        operation(ticket.works)
        if listeners:
            tell("issued", ticket)
        return ticket


def lane(name: str, device: torch.device) -> Lane:
    """Return the process's lane of that name ("gather", "reduce" or "last") on a device."""
    key = (name, device)
    if key not in LANES:
        compute = compute_of(device)
        LANES[key] = CpuLane(name) if compute is None else CudaLane(name, compute)
    return LANES[key]


def forget_unused_streams() -> None:
    """Let lanes wait no more for streams that were not used since the last call; nothing to do on CPU."""
    for compute in COMPUTE.values():
        if compute is not None:
            compute.forget_unused()


def join_lanes() -> None:
    """Order compute after everything that was submitted to lanes; nothing to do on CPU."""
    for each in LANES.values():
        if isinstance(each, CudaLane):
            each.join()


def settle_host() -> None:
    """Let the host write main weights in CPU memory again: it waits until no gather reads them."""
    while HOST_READS:
        gathers = lane("gather", HOST_READS.pop())
        if isinstance(gathers, CudaLane):
            gathers.settle()
