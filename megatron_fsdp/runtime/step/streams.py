"""Streams: what the engine asks of a device that has them, and the streams on which it was called; a CPU has none.

With ``lanes.py`` the only file that touches streams and events, all of them by way of ``Streams``, in whose place a
test puts a double that notes what waits for what (docs/design/order.md, "Streams").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from dbuffer_kernels.switches import is_off

__all__ = [
    "COMPUTES", "LANES", "LATEST", "Compute", "Streams", "Turns", "compute_of", "drive_with", "is_capturing",
    "latest_submission", "turns", "wait_for_event", "wait_on_host",
]  # fmt: skip


class Streams:
    """What lanes ask of a device with streams, here of CUDA; a double has the same methods.

    Streams and events are ``torch.Stream`` and ``torch.Event``, whose methods are C++. Those of ``torch.cuda`` do the
    same by way of Python: 5.4 us instead of 0.8 for ``wait_stream``, 10 to 29 instead of 3 to issue work on another
    stream, 3.6 instead of 1.7 for a new event and its record (torch 2.13 on the host alone; docs/performance.md).
    """

    def new(self, device: torch.device, name: str) -> Any:
        """Return a new stream of high priority, for the lane of that name."""
        return torch.Stream(device=device, priority=0 if is_off("priority") else -1)

    def current(self, device: torch.device) -> Any:
        """Return the stream on which this thread issues work."""
        return torch.accelerator.current_stream(device)

    def current_id(self, device: torch.device) -> int:
        """Return a number for that stream; asked for every gradient."""
        number: int = torch._C._cuda_getCurrentRawStream(device.index)
        return number

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Issue work on another stream, and on its device, while the block runs."""
        context: AbstractContextManager[Any] = stream
        return context

    def on_host(self) -> AbstractContextManager[Any]:
        """Run what the host does to memory of its own, on what a lane has copied there."""
        return nullcontext()

    def event(self) -> Any:
        """Return a new event."""
        return torch.Event("cuda")

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()


class Compute:
    """The streams of one device on which the engine was called. Together they are what lanes call compute.

    A model may run a branch on a stream of its own. Weights that one branch has done with, and packed gradients, go
    back to an allocator that serves all of them; so lanes wait for all, and all wait for lanes.
    """

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        self.device = device
        self.streams = streams or Streams()
        self._known: dict[int, Any] = {}
        # Those of them that a pass has used since it began.
        self._used: set[int] = set()

    def note(self) -> None:
        """Count the current stream in."""
        number = self.streams.current_id(self.device)
        if number in self._used:
            return
        self._used.add(number)
        if number not in self._known:
            self._known[number] = self.streams.current(self.device)

    def forget_unused(self) -> None:
        """Count out the streams on which nothing was asked for since the last call, as a pass begins.

        The current one follows them a last time. Each costs every submission and every wait for a ticket a wait.
        """
        current, is_capturing = self.streams.current(self.device), self.streams.is_capturing()
        for number in self._known.keys() - self._used:
            if self.is_captured(self._known[number]) is is_capturing:
                stream = self._known.pop(number)
                current.wait_stream(stream)
        self._used.clear()
        # Weights that stayed gathered may be all that the pass uses: it asks lanes for nothing then.
        self.note()

    def all(self) -> list[Any]:
        """Return them, the current one included; in a capture those alone that are captured, out of it the others."""
        self.note()
        if len(self._known) == 1:
            return list(self._known.values())
        is_capturing = self.streams.is_capturing()
        return [stream for stream in self._known.values() if self.is_captured(stream) is is_capturing]

    def is_captured(self, stream: Any) -> bool:
        """Whether a stream is being captured."""
        with self.streams.use(stream):
            return self.streams.is_capturing()


class Turns:
    """Keeps what compute streams do to one buffer in the order in which the host says it.

    Autograd runs the backward of a branch, and the hooks on its gradients, on the stream of its forward.

    Args:
        last: one element, the number of the stream that had the last turn, for whoever looks before it takes one; None
            for no stream yet.
    """

    def __init__(self, compute: Compute, last: list[int | None]) -> None:
        self._compute = compute
        last[0] = None
        self._last = last
        self._stream: Any = None

    def take(self, leave: Callable[[], None]) -> None:
        """Order the current stream after the one that had the last turn; ``leave`` ends that turn, on that stream."""
        compute = self._compute
        streams = compute.streams
        number = streams.current_id(compute.device)
        if number == self._last[0]:
            return
        stream, before = streams.current(compute.device), self._stream
        if before is not None and compute.is_captured(before) is streams.is_capturing():
            with streams.use(before):
                leave()
            stream.wait_stream(before)
        compute.note()
        self._last[0], self._stream = number, stream


COMPUTES: dict[torch.device, Compute] = {}
LANES: dict[tuple[str, torch.device], Any] = {}
"""The process's lanes, by name and device (``lanes.lane``)."""
LATEST: list[Any] = []
"""The event at the end of what was submitted last to any lane of a device; empty for none."""
_DOUBLES: list[Any] = []


def compute_of(device: torch.device) -> Compute | None:
    """Return the compute streams of a device; None where it has none."""
    if device not in COMPUTES:
        if not _DOUBLES and device.type != "cuda":
            return None
        COMPUTES[device] = Compute(device, _DOUBLES[-1] if _DOUBLES else None)
    return COMPUTES[device]


def turns(device: torch.device, last: list[int | None] | None = None) -> Turns | None:
    """Return what keeps a new buffer's writers in order; None on a device without streams. ``last``: see ``Turns``."""
    compute = compute_of(device)
    return None if compute is None else Turns(compute, [None] if last is None else last)


def is_capturing(device: torch.device) -> bool:
    """Whether what is issued now is captured into a graph."""
    compute = compute_of(device)
    return compute is not None and compute.streams.is_capturing()


def wait_on_host(device: torch.device) -> None:
    """Let the host wait until compute has done all that it was given; nothing to do on CPU."""
    compute = compute_of(device)
    if compute is not None:
        event = compute.streams.event()
        event.record(compute.streams.current(device))
        event.synchronize()


def wait_for_event(event: torch.Event, device: torch.device) -> None:
    """Order the current stream, and with it all lanes' later work, after an event; nothing to do on CPU."""
    compute = compute_of(device)
    if compute is not None:
        compute.streams.current(device).wait_event(event)


def latest_submission() -> Any:
    """Return the event at the end of what was submitted last to any lane of a device, which any thread may query.

    None where there is none, and where that was captured into a graph: such an event tells nothing of the replays.
    """
    return LATEST[0] if LATEST else None


@contextmanager
def drive_with(streams: Any) -> Iterator[None]:
    """Let ``streams`` stand for those of every device while the block runs; models are made and used inside of it."""
    known: tuple[dict[Any, Any], ...] = (LANES, COMPUTES)
    before, latest = [dict(each) for each in known], list(LATEST)
    for each in known:
        each.clear()
    _DOUBLES.append(streams)
    try:
        yield
    finally:
        _DOUBLES.pop()
        for each, saved in zip(known, before, strict=True):
            each.clear()
            each.update(saved)
        LATEST[:] = latest
