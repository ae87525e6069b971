"""Recording: work on streams, waits, and the host's own calls, in the host's order of issue.

A recording knows sizes and no speeds, so one run serves for any machine (``playback``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dbuffer_kernels.switches import is_off

__all__ = ["Event", "Item", "Recording", "Stream", "Work"]


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one kernel or collective.

    Attributes:
        name: of the operator. kind: its bound: "product" (arithmetic), "memory", or the collective's kind.
        flops: floating-point operations. num_bytes: bytes read and written; for a collective, bytes of the full
            side, as ``dbuffer.CollectiveCall`` counts them.
        dtype: of the factors of a product. least: the smallest of a product's three sizes.
        ranks: of a collective, its ranks. axis: its mesh axis, if the engine reported it.
        label: its purpose, such as "gather of layers.3".
    """

    name: str
    kind: str
    flops: int = 0
    num_bytes: int = 0
    dtype: torch.dtype = torch.float32
    least: int = 0
    ranks: tuple[int, ...] = ()
    axis: str = ""
    label: str = ""


@dataclass(slots=True)
class Item:
    """One action of the host: put work on a stream, make a stream wait, or wait itself.

    Attributes:
        stream: None for an action of the host alone. point: the point that is recorded (``is_record``) or waited for.
        calls: number of calls into the device's library. unit: the model's current unit.
    """

    stream: Stream | None
    work: Work | None = None
    point: object = None
    is_record: bool = False
    calls: int = 1
    unit: str = ""


@dataclass(eq=False, slots=True)
class Stream:
    """A stream with the methods that lanes and FSDP2 use."""

    name: str
    recording: Recording
    priority: int = 0

    def wait_event(self, event: Event) -> None:
        """Order this stream's next work after the event."""
        self.follow(event)

    def follow(self, event: Event) -> None:
        """Wait for an event, under the name that lanes use."""
        if event.point is not None:
            self.recording.add(Item(self, point=event.point))

    def wait_stream(self, stream: Stream) -> None:
        """Order this stream's next work after all work in ``stream``."""
        self.follow(Event(self.recording).record(stream))

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event here, and return it."""
        return (event or Event(self.recording)).record(self)

    def synchronize(self) -> None:
        """Let the host wait."""
        Event(self.recording).record(self).synchronize()


@dataclass(eq=False, slots=True)
class Event:
    """A point in a stream: a new one for each record, and None before the first."""

    recording: Recording
    point: object = None

    def record(self, stream: Stream | None = None) -> Event:
        """Set the event to the end of the stream, or of the current one; return the event, as torch.Event may."""
        self.point = object()
        self.recording.add(Item(stream or self.recording.current(), point=self.point, is_record=True))
        return self

    def synchronize(self) -> None:
        """Let the host wait."""
        if self.point is not None:
            self.recording.add(Item(None, point=self.point))

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream, or the current one, wait for the event."""
        (stream or self.recording.current()).follow(self)

    def query(self) -> bool:
        """Return True: a recording has no time in which work is unfinished."""
        return True


@dataclass(eq=False)
class Recording:
    """Streams for ``drive_with``, and the record of calls to them.

    Attributes:
        items: in host order. compute: the initial current stream. streams: all streams.
        unit: the model's current unit. axis: the mesh axis of the next collective.
        labels: the purpose of a stream's current collectives, by the stream's name.
        is_on: whether calls are recorded. collective_calls: host time of a collective's issue, in calls.
    """

    items: list[Item] = field(default_factory=list)
    unit: str = ""
    axis: str = ""
    is_on: bool = True
    collective_calls: int = 20

    def __post_init__(self) -> None:
        self.compute = Stream("compute", self)
        self.streams = [self.compute]
        self.labels: dict[str, str] = {}
        self._current = [self.compute]
        self._on_host = 0

    def add(self, item: Item) -> None:
        """Append an item if recording is on."""
        if self.is_on:
            item.unit = self.unit
            self.items.append(item)

    def work(self, work: Work, calls: int = 1) -> None:
        """Record work on the current stream, or on the host inside ``on_host``."""
        if work.num_bytes or work.flops:
            self.add(Item(None if self._on_host else self._current[-1], work, calls=calls))

    def label(self) -> str:
        """Return the purpose of the current stream's work."""
        return self.labels.get(self._current[-1].name, "")

    def host(self, num_calls: int) -> None:
        """Record calls that put no work on a stream."""
        self.add(Item(None, calls=num_calls))

    # ------------------------------------------------------------------ what lanes ask

    def new(self, device: Any = None, name: str = "") -> Stream:
        """Return a new stream with the priority that lanes have on CUDA."""
        priority = 0 if is_off("priority") else -1
        self.streams.append(Stream(f"{name} lane" if name else f"stream {len(self.streams)}", self, priority))
        return self.streams[-1]

    def current(self, device: Any = None) -> Stream:
        """Return the current stream."""
        return self._current[-1]

    def current_id(self, device: Any = None) -> int:
        """Return an identifier of the current stream."""
        return id(self._current[-1])

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Make another stream the current one while the block runs."""
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Run all operators on the host while the block runs."""
        self._on_host += 1
        try:
            yield
        finally:
            self._on_host -= 1

    def event(self) -> Event:
        """Return a new event."""
        return Event(self)

    def is_capturing(self) -> bool:
        """Nothing is captured here."""
        return False
