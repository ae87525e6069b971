"""Ordered queues of device work beside the compute streams: one for gathers, one for reductions.

On CUDA a lane is a stream. On CPU it is gloo's own worker: collectives are issued asynchronously, and what follows
one (the fold of a reduced gradient) runs when somebody waits for it (docs/design/order.md, "Streams").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from dbuffer.collectives import wait_for
from dbuffer.events import listeners, tell
from megatron_fsdp.runtime.step.cuda_lane import LATEST, Compute, CudaLane, Streams, Turns
from megatron_fsdp.runtime.step.lane_types import Lane, Operation, Ticket

__all__ = [
    "CpuLane",
    "drive_with",
    "forget_unused_streams",
    "is_capturing",
    "join_lanes",
    "lane",
    "turns",
    "wait_for_event",
    "wait_on_host",
]


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


_streams: list[Streams] = []
_COMPUTE: dict[torch.device, Compute] = {}
_LANES: dict[tuple[str, torch.device], Lane] = {}


def _compute_of(device: torch.device) -> Compute | None:
    """Return the compute streams of a device; None where it has none."""
    if device not in _COMPUTE:
        if not _streams and device.type != "cuda":
            return None
        _COMPUTE[device] = Compute(device, _streams[-1] if _streams else None)
    return _COMPUTE[device]


def lane(name: str, device: torch.device) -> Lane:
    """Return the process's lane of that name ("gather", "reduce" or "last") on a device."""
    key = (name, device)
    if key not in _LANES:
        compute = _compute_of(device)
        _LANES[key] = CpuLane(name) if compute is None else CudaLane(name, compute)
    return _LANES[key]


def turns(device: torch.device) -> Turns | None:
    """Return what keeps a new buffer's writers in order; None on a device without streams."""
    compute = _compute_of(device)
    return None if compute is None else Turns(compute)


def forget_unused_streams() -> None:
    """Let lanes wait no more for streams that were not used since the last call; nothing to do on CPU."""
    for compute in _COMPUTE.values():
        if compute is not None:
            compute.forget_unused()


def join_lanes() -> None:
    """Order compute after everything that was submitted to lanes; nothing to do on CPU."""
    for each in _LANES.values():
        if isinstance(each, CudaLane):
            each.join()


@contextmanager
def drive_with(streams: Streams) -> Iterator[None]:
    """Let ``streams`` stand for those of every device while the block runs; models are made and used inside of it."""
    known: tuple[dict[Any, Any], ...] = (_LANES, _COMPUTE)
    before, latest = [dict(each) for each in known], list(LATEST)
    for each in known:
        each.clear()
    _streams.append(streams)
    try:
        yield
    finally:
        _streams.pop()
        for each, saved in zip(known, before, strict=True):
            each.clear()
            each.update(saved)
        LATEST[:] = latest


def wait_on_host(device: torch.device) -> None:
    """Let the host wait until compute has done all that it was given; nothing to do on CPU."""
    compute = _compute_of(device)
    if compute is not None:
        event = compute.streams.event()
        event.record(compute.streams.current(device))
        event.synchronize()


def is_capturing(device: torch.device) -> bool:
    """Whether what is issued now is captured into a graph."""
    compute = _compute_of(device)
    return compute is not None and compute.streams.is_capturing()


def wait_for_event(event: torch.Event, device: torch.device) -> None:
    """Order the current stream, and with it all lanes' later work, after an event; nothing to do on CPU."""
    compute = _compute_of(device)
    if compute is not None:
        compute.streams.current(device).wait_event(event)
