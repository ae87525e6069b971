"""Ordered queues of device work beside the compute stream: one for gathers, one for reductions.

On CUDA a lane is a stream. On CPU it is gloo's own worker: collectives are issued asynchronously, and what follows
one (the fold of a
reduced gradient) runs when somebody waits for it. The only file that touches streams and events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from dbuffer.collectives import wait_for

__all__ = [
    "CpuLane",
    "CudaLane",
    "Lane",
    "Recorder",
    "Ticket",
    "lane",
    "latest_submission",
    "record_into",
    "record_transcript",
    "trace",
    "wait_for_event",
]

Operation = Callable[[list[dist.Work] | None], None]


class Ticket(Protocol):
    """Work that was submitted to a lane."""

    def wait(self) -> None:
        """Make all later compute see the result. On CUDA this orders streams and does not block the host."""


class Lane(Protocol):
    """A queue of device work."""

    def submit(
        self,
        operation: Operation,
        then: Callable[[], None] | None = None,
        on_host: Callable[[], None] | None = None,
    ) -> Ticket:
        """Queue ``operation`` after all compute issued so far, and ``then`` after it.

        Args:
            operation: issues collectives; it is given a list for their handles, or None where stream order suffices.
            then: device work on their result.
            on_host: work of the CPU on what ``then`` copied to it; ``Ticket.wait`` blocks the host for it.
        """


class _CpuTicket:
    __slots__ = ("_then", "_works")

    def __init__(self, works: list[dist.Work], then: list[Callable[[], None]]) -> None:
        self._works = works
        self._then = then

    def wait(self) -> None:
        """Block until the collectives are done, then run what follows them, once."""
        works, self._works = self._works, []
        for work in works:
            wait_for(work)
        then, self._then = self._then, []
        for step in then:
            step()


class CpuLane:
    """Gloo's workers as a lane."""

    def submit(
        self,
        operation: Operation,
        then: Callable[[], None] | None = None,
        on_host: Callable[[], None] | None = None,
    ) -> Ticket:
        """Start the collectives; ``then`` and ``on_host`` run in ``Ticket.wait``."""
        works: list[dist.Work] = []
        operation(works)
        return _CpuTicket(works, [step for step in (then, on_host) if step is not None])


class _CudaTicket:
    __slots__ = ("_event", "_on_host")

    def __init__(self, event: torch.cuda.Event, on_host: Callable[[], None] | None) -> None:
        self._event = event
        self._on_host = on_host

    def wait(self) -> None:
        """Order the current stream after the submitted work, and the host too where the host has work to do on it."""
        torch.cuda.current_stream().wait_event(self._event)
        on_host, self._on_host = self._on_host, None
        if on_host is not None:
            self._event.synchronize()
            on_host()


class CudaLane:
    """A high-priority stream as a lane."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device=device, priority=-1)

    def submit(
        self,
        operation: Operation,
        then: Callable[[], None] | None = None,
        on_host: Callable[[], None] | None = None,
    ) -> Ticket:
        """Run the operation on the lane's stream, after what the current stream holds now."""
        # The wait also covers memory: a block that compute has finished with may be handed out again on this stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            operation(None)
            if then is not None:
                then()
            event = torch.cuda.Event()
            event.record(self._stream)
        _latest[:] = [event]
        return _CudaTicket(event, on_host)


_latest: list[torch.cuda.Event] = []


def latest_submission() -> torch.cuda.Event | None:
    """Return the event at the end of what was submitted last to any CUDA lane; None where there is none."""
    return _latest[0] if _latest else None


_LANES: dict[tuple[str, torch.device], Lane] = {}


def lane(name: str, device: torch.device) -> Lane:
    """Return the process's lane of that name ("gather" or "reduce") on a device."""
    key = (name, device)
    if key not in _LANES:
        _LANES[key] = CudaLane(device) if device.type == "cuda" else CpuLane()
    return _LANES[key]


def wait_for_event(event: torch.Event) -> None:
    """Order the current stream, and with it all lanes' later work, after an event; nothing to do on CPU."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().wait_event(event)


class Recorder(Protocol):
    """Who is told what the runtime does."""

    def append(self, line: str, /) -> None:
        """Take notice of one "action unit"."""


_recorders: list[Recorder] = []


def trace(action: str, unit: str) -> None:
    """Tell the recorders "action unit"."""
    for recorder in _recorders:
        recorder.append(f"{action} {unit}")


@contextmanager
def record_into(recorder: Recorder) -> Iterator[None]:
    """Tell ``recorder`` what the runtime does, in host order, while the block runs."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        # By identity: two recorders may hold the same lines.
        _recorders[:] = [other for other in _recorders if other is not recorder]


@contextmanager
def record_transcript() -> Iterator[list[str]]:
    """Record what the runtime does, in host order, one "action unit" string each.

    Actions: ``gather`` (issued), ``use`` (compute waits for the gather), ``reshard``, ``reduce`` (issued), ``fold``
        (compute waits for the reduction, which is in main_grad then), ``final`` (the gradients are what the optimizer
        may read).
    """
    transcript: list[str] = []
    with record_into(transcript):
        yield transcript
