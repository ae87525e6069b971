"""What code asks of a device, in the order in which the host asks it: work on streams, waits, and the host's own time.

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
    """What one kernel or collective does.

    Attributes:
        name: of the operator. kind: what bounds it: "product" (arithmetic), "memory", or a collective's own.
        flops: floating-point operations. num_bytes: read and written; of a collective those of
            the full side, as ``dbuffer.CollectiveCall`` counts them.
        dtype: of the factors of a product. least: of a product the least of its three sizes.
        ranks: of a collective, those that take part. axis: over which, where the engine told that.
        label: what it is for, such as "gather of layers.3".
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
    """One thing the host does: puts work on a stream, makes a stream wait, or waits itself.

    Attributes:
        stream: None for what is the host's alone. point: that the stream is at (``is_record``), or waited for.
        calls: how many calls into the device's library it is. unit: that the model is busy with.
    """

    stream: Stream | None
    work: Work | None = None
    point: object = None
    is_record: bool = False
    calls: int = 1
    unit: str = ""


@dataclass(eq=False, slots=True)
class Stream:
    """A stream as lanes and FSDP2 use one."""

    name: str
    recording: Recording
    priority: int = 0

    def wait_event(self, event: Event) -> None:
        """Let what comes next here come after the event."""
        self.follow(event)

    def follow(self, event: Event) -> None:
        """Do what ``wait_event`` does, which is CUDA's name for it."""
        if event.point is not None:
            self.recording.add(Item(self, point=event.point))

    def wait_stream(self, stream: Stream) -> None:
        """Let what comes next here come after all that the stream holds."""
        self.follow(Event(self.recording).record(stream))

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event here, and return it."""
        return (event or Event(self.recording)).record(self)

    def synchronize(self) -> None:
        """Let the host wait."""
        Event(self.recording).record(self).synchronize()


@dataclass(eq=False, slots=True)
class Event:
    """A point in a stream; each record makes it another point, None before the first."""

    recording: Recording
    point: object = None

    def record(self, stream: Stream | None = None) -> Event:
        """Be the point up to which the stream, or the current one, has come; return itself, as torch.Event may."""
        self.point = object()
        self.recording.add(Item(stream or self.recording.current(), point=self.point, is_record=True))
        return self

    def synchronize(self) -> None:
        """Let the host wait."""
        if self.point is not None:
            self.recording.add(Item(None, point=self.point))

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream, or the current one, wait."""
        (stream or self.recording.current()).follow(self)

    def query(self) -> bool:
        """Tell that it has passed."""
        return True


@dataclass(eq=False)
class Recording:
    """Streams for ``drive_with``, and what was asked of them.

    Attributes:
        items: in host order. compute: the stream that is current at first. streams: all of them.
        unit: that the model is busy with. axis: of the collective that comes next.
        labels: what the collectives of a stream are for, by the stream's name.
        is_on: whether anything is noted. collective_calls: the host's time around a collective, in calls.
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
        """Note one thing."""
        if self.is_on:
            item.unit = self.unit
            self.items.append(item)

    def work(self, work: Work, calls: int = 1) -> None:
        """Note work on the current stream, or on the host where that does what follows."""
        if work.num_bytes or work.flops:
            self.add(Item(None if self._on_host else self._current[-1], work, calls=calls))

    def label(self) -> str:
        """Return what the current stream's work is for."""
        return self.labels.get(self._current[-1].name, "")

    def host(self, num_calls: int) -> None:
        """Note calls that put nothing on a stream."""
        self.add(Item(None, calls=num_calls))

    # ------------------------------------------------------------------ what lanes ask

    def new(self, device: Any = None, name: str = "") -> Stream:
        """Return a new stream, of the priority that lanes have on CUDA."""
        priority = 0 if is_off("priority") else -1
        self.streams.append(Stream(f"{name} lane" if name else f"stream {len(self.streams)}", self, priority))
        return self.streams[-1]

    def current(self, device: Any = None) -> Stream:
        """Return the current stream."""
        return self._current[-1]

    def current_id(self, device: Any = None) -> int:
        """Return a number for it."""
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
        """Let all operators run on the host while the block runs."""
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
