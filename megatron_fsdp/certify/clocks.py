"""Streams with CUDA's semantics on the CPU: work runs in host order, and vector clocks give the order a GPU guarantees.

Pass a ``VirtualStreams`` to ``drive_with`` of ``engine/streams.py``. A queue's clock has an entry for every queue: the
number of its accesses that have certainly ended when this queue's next access begins (Fidge 1988, Mattern 1989).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from megatron_fsdp.certify.origins import Origin, here

__all__ = ["CaptureError", "Clock", "Event", "Queue", "VirtualStreams", "Wait"]

Clock = dict[str, int]


class CaptureError(RuntimeError):
    """A call that CUDA refuses while a stream is captured, or for an event recorded in a capture."""


@dataclass(eq=False, slots=True)
class Wait:
    """A wait of a queue for a point in another queue.

    Attributes:
        origin: the line that waits. via: the line that called that one's file. target, source: names of the queues.
        is_redundant: all that it ordered was ordered before. is_host: the host blocks in it.
    """

    origin: Origin
    via: Origin
    target: str
    source: Queue
    is_redundant: bool = False
    is_host: bool = False


@dataclass(eq=False)
class Queue:
    """The host, a stream, or a communicator: a sequence of accesses.

    Attributes:
        clock: for each queue, how many of its accesses have ended when the next access of this queue begins.
        is_captured: whether a capture includes this queue now.
    """

    name: str
    streams: VirtualStreams
    clock: Clock = field(default_factory=dict)
    is_captured: bool = False

    def __post_init__(self) -> None:
        # The version of the host's clock that this queue has taken over.
        self._launched = -1

    def _wait(self, event: Event) -> None:
        """Order this queue's next work after the event.

        Raises:
            CaptureError: one of the two is of a capture and the other is not of the same one.
        """
        if self.is_captured and not event.is_captured:
            raise CaptureError(
                f"{self.name}, which is captured, waits for an event recorded outside of the capture. fix: record the "
                "event inside the capture, or wait for it before the capture begins"
            )
        if event.is_captured and event.capture != self.streams.capture_number:
            raise CaptureError(
                f"{self.name} waits for an event of a capture that is over. fix: record a new event after the capture"
            )
        self.is_captured = event.is_captured
        self.launch()
        self.follow(event.source, event.clock)
        if self.is_captured:
            # CUDA requires that a forked stream joins the capture, even without work on it.
            self.tick()

    def come_after(self, stream: Queue) -> None:
        """Order this queue's next work after all work in ``stream``."""
        event = self.streams.event()
        event.record(stream)
        self._wait(event)

    def wait_event(self, event: Event) -> None:
        """Do so under CUDA's name."""
        self._wait(event)

    def wait_stream(self, stream: Queue) -> None:
        """Do so under CUDA's name."""
        self.come_after(stream)

    def follow(self, source: Queue | None, clock: Clock, *, is_host: bool = False) -> None:
        """Order this queue after a point of ``source`` and record the wait; None, and the queue itself, need none."""
        if source is None or source is self:
            return
        origin = here()
        wait = Wait(origin, here(outside=origin.path), self.name, source, is_host=is_host)
        wait.is_redundant = not self._join(clock)
        self.streams.waits.append(wait)

    def launch(self) -> None:
        """Take over the host's clock, because the host issues this queue's next work."""
        host = self.streams.host
        if self._launched != host.streams.host_changes:
            self._launched = host.streams.host_changes
            self._join(host.clock)

    def tick(self) -> int:
        """Count one access, and return its number."""
        self.launch()
        number = self.clock[self.name] = self.clock.get(self.name, 0) + 1
        if self is self.streams.host:
            self.streams.host_changes += 1
        return number

    def follows(self, other: Queue) -> bool:
        """Return whether all work of another queue ends before this queue's next work begins."""
        return self.clock.get(other.name, 0) >= other.clock.get(other.name, 0)

    def _join(self, clock: Clock) -> bool:
        mine, is_new = self.clock, False
        for name, number in clock.items():
            if number > mine.get(name, 0):
                mine[name] = number
                is_new = True
        if is_new and self is self.streams.host:
            self.streams.host_changes += 1
        return is_new


class Event:
    """A point in a stream."""

    def __init__(self, streams: VirtualStreams) -> None:
        self._streams = streams
        self.clock: Clock = {}
        self.source: Queue | None = None
        self.is_captured = False
        self.capture: int | None = None

    def record(self, stream: Queue) -> None:
        """Set the event to the current end of the stream."""
        stream.launch()
        self.clock = dict(stream.clock)
        self.source = stream
        self.is_captured = stream.is_captured
        self.capture = self._streams.capture_number if self.is_captured else None

    def synchronize(self) -> None:
        """Make the host wait for the event."""
        self._refuse_capture("synchronizes with")
        self._streams.host.follow(self.source, self.clock, is_host=True)

    def query(self) -> bool:
        """Return True: the work has ended in host order."""
        self._refuse_capture("queries")
        return True

    def _refuse_capture(self, what: str) -> None:
        if self.is_captured:
            raise CaptureError(
                f"the host {what} an event that was recorded in a capture (error 907). fix: record an event outside of "
                "the capture for the host"
            )


class VirtualStreams:
    """Streams for ``drive_with``, with their clocks.

    Attributes:
        host: the queue of the Python thread. compute: the initial current stream. lanes: in order of creation.
        waits: all waits so far, including the host's.
        host_changes: number of changes of the host's clock.
        capture_number: number of the current capture, None outside of one.
        is_on_host: whether operators run on the host now.
    """

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.host_changes = 0
        self.host = Queue("host", self)
        self.compute = Queue("compute", self)
        self.lanes: list[Queue] = []
        self.capture_number: int | None = None
        self.is_on_host = False
        self._num_captures = 0
        self._current = [self.compute]
        self._streams: list[Queue] = []

    # ------------------------------------------------------------------ what lanes ask

    def new(self, device: torch.device, name: str = "") -> Queue:
        """Return a new stream for a lane."""
        self.lanes.append(Queue(f"{name} lane" if name else f"lane {len(self.lanes)}", self))
        return self.lanes[-1]

    def current(self, device: torch.device | None = None) -> Queue:
        """Return the current stream."""
        return self._current[-1]

    def current_id(self, device: torch.device) -> int:
        """Return an identifier of the current stream."""
        return id(self._current[-1])

    @contextlib.contextmanager
    def use(self, stream: Queue) -> Iterator[None]:
        """Make another stream the current one while the block runs."""
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Run all operators on the host while the block runs, like those of an optimizer in CPU memory."""
        before, self.is_on_host = self.is_on_host, True
        try:
            yield
        finally:
            self.is_on_host = before

    def event(self) -> Event:
        """Return a new event."""
        return Event(self)

    def is_capturing(self) -> bool:
        """Return whether the current stream is captured."""
        return self._current[-1].is_captured

    # ------------------------------------------------------------------ calls for tests and checks

    def stream(self, name: str) -> Queue:
        """Return a new stream of the user."""
        self._streams.append(Queue(name, self))
        return self._streams[-1]

    def order(self, first: Queue, then: Queue) -> None:
        """Order the next work on one stream after all work on another."""
        then.come_after(first)

    def switch(self, stream: Queue) -> None:
        """Change the current stream, as autograd does between nodes."""
        self._current[-1] = stream

    @contextlib.contextmanager
    def capture(self, stream: Queue) -> Iterator[None]:
        """Capture the work that the block issues on ``stream``, and on streams that wait for it.

        Raises:
            CaptureError: the capture ends without a wait of ``stream`` for the work of a lane.
        """
        self._num_captures += 1
        self.capture_number = self._num_captures
        stream.is_captured = True
        with self.use(stream):
            yield
        for lane in self.lanes:
            if lane.is_captured and not stream.follows(lane):
                raise CaptureError(
                    f"{lane.name} was forked into the capture and never joined. fix: let the captured stream wait for "
                    "an event of it before the capture ends"
                )
            lane.is_captured = False
        for other in (*self._streams, stream):
            other.is_captured = False
        self.capture_number = None
