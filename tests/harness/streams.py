"""A double of CUDA's streams: what runs stays in host order on the CPU, and vector clocks say what a GPU would promise.

Give a ``StreamDouble`` to ``megatron_fsdp.runtime.lanes.drive_with``; then lanes are streams of it. Inside
``watching`` every operator is an access of the stream that is current, or of the host where all it touches is the
host's, and two accesses of the same bytes, one of which writes, are a race unless events or waits order them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[str, int]
# Operators on others come again, with their local tensors.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NO_ACCESS = ("aten::empty", "aten::set_", "aten::resize_", "profiler::")


class CaptureError(RuntimeError):
    """What CUDA would refuse while a stream is captured, or of an event that was recorded then."""


@dataclass(eq=False)
class Queue:
    """The host, or a stream: things that happen one after another.

    Attributes:
        clock: for each queue, up to which of its accesses everything is over when the next access here begins.
        is_captured: whether it takes part in a capture now.
    """

    name: str
    double: StreamDouble
    clock: Clock = field(default_factory=dict)
    is_captured: bool = False

    def wait_event(self, event: Event) -> None:
        """Let what comes next here come after the event."""
        if self.is_captured and not event.is_captured:
            raise CaptureError(f"{self.name}, which is captured, waits for an event recorded outside of the capture")
        if event.is_captured and event.capture != self.double.capture_number:
            raise CaptureError(f"{self.name} waits for an event of a capture that is over")
        self.is_captured = event.is_captured
        self.launch()
        _merge(self.clock, event.clock)

    def wait_stream(self, stream: Queue) -> None:
        """Let what comes next here come after all that the stream holds."""
        event = self.double.event()
        event.record(stream)
        self.wait_event(event)

    def launch(self) -> None:
        """Take what the host knows: it issues what comes next."""
        _merge(self.clock, self.double.host.clock)

    def tick(self) -> int:
        """Count one access, and return its number."""
        self.launch()
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]

    def follows(self, other: Queue) -> bool:
        """Whether all that happened in another queue is over before what comes next here."""
        return self.clock.get(other.name, 0) >= other.clock.get(other.name, 0)


class Event:
    """A point in a stream."""

    def __init__(self, double: StreamDouble) -> None:
        self._double = double
        self.clock: Clock = {}
        self.is_captured = False
        self.capture: int | None = None

    def record(self, stream: Queue) -> None:
        """Be the point up to which the stream has come."""
        stream.launch()
        self.clock = dict(stream.clock)
        self.is_captured = stream.is_captured
        self.capture = self._double.capture_number if self.is_captured else None

    def synchronize(self) -> None:
        """Let the host wait."""
        self._refuse_capture("synchronizes with")
        _merge(self._double.host.clock, self.clock)

    def query(self) -> bool:
        """Tell that it has passed."""
        self._refuse_capture("queries")
        return True

    def _refuse_capture(self, what: str) -> None:
        if self.is_captured:
            raise CaptureError(f"the host {what} an event that was recorded in a capture (error 907)")


class StreamDouble:
    """Streams for ``drive_with``, and the clocks that go with them.

    Attributes:
        host: where Python runs. compute: the stream that is current at first. lanes: in the order in which they
            were made.
        capture_number: of the capture under way, None outside of one.
    """

    def __init__(self) -> None:
        self.host = Queue("host", self)
        self.compute = Queue("compute", self)
        self.lanes: list[Queue] = []
        self.capture_number: int | None = None
        self._num_captures = 0
        self._current = [self.compute]
        self._joined: list[Queue] = []

    # ------------------------------------------------------------------ what lanes ask

    def new(self, device: torch.device) -> Queue:
        """Return a new stream for a lane."""
        self.lanes.append(Queue(f"lane {len(self.lanes)}", self))
        return self.lanes[-1]

    def current(self, device: torch.device | None = None) -> Queue:
        """Return the current stream."""
        return self._current[-1]

    def current_id(self, device: torch.device) -> int:
        """Return a number for it."""
        return id(self._current[-1])

    @contextlib.contextmanager
    def use(self, stream: Queue) -> Iterator[None]:
        """Make another stream the current one while the block runs."""
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def event(self) -> Event:
        """Return a new event."""
        return Event(self)

    def is_capturing(self) -> bool:
        """Whether the current stream is captured."""
        return self._current[-1].is_captured

    # ------------------------------------------------------------------ what tests ask

    def stream(self, name: str) -> Queue:
        """Return a stream of the user's own."""
        return Queue(name, self)

    def switch(self, stream: Queue) -> None:
        """Make another stream the current one from here on, as autograd does between nodes."""
        self._current[-1] = stream

    @contextlib.contextmanager
    def capture(self, stream: Queue) -> Iterator[None]:
        """Capture what the block issues on ``stream``, and on streams that wait for it.

        Raises:
            CaptureError: work of a lane is left that the stream does not wait for.
        """
        self._num_captures += 1
        self.capture_number = self._num_captures
        stream.is_captured = True
        with self.use(stream):
            yield
        for lane in self.lanes:
            if lane.is_captured and not stream.follows(lane):
                raise CaptureError(f"{lane.name} was forked into the capture and never joined")
            lane.is_captured = False
        stream.is_captured = False
        self.capture_number = None


def _merge(clock: Clock, other: Clock) -> None:
    for name, count in other.items():
        clock[name] = max(clock.get(name, 0), count)


# ---------------------------------------------------------------- accesses


@dataclass(frozen=True)
class Access:
    """Bytes that an operator read or wrote.

    Attributes:
        number: which access of its queue it is.
    """

    operator: str
    queue: str
    number: int
    start: int
    stop: int
    is_write: bool

    def __str__(self) -> str:
        return f"{'write' if self.is_write else 'read'} by {self.operator} on {self.queue}"


class Watching(TorchDispatchMode):
    """Notes every access while it is entered, and what races.

    Attributes:
        races: a line for each pair of accesses that nothing orders.
    """

    def __init__(self, double: StreamDouble) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._double = double
        self._host: set[int] = set()
        self._is_on_host = False
        self._accesses: dict[int, list[Access]] = {}
        self._names: dict[int, str] = {}
        # So that no other storage gets an address that was known.
        self._kept: dict[int, torch.UntypedStorage] = {}
        self.races: list[str] = []

    def name(self, name: str, *tensors: torch.Tensor) -> None:
        """Call the memory of tensors by a name in ``races``."""
        for tensor in tensors:
            self._names[self._key(tensor)] = name

    def lies_on_host(self, *tensors: torch.Tensor) -> None:
        """Count the memory of tensors as the host's own, and what was done with it so far as done by the host."""
        for key in map(self._key, tensors):
            self._host.add(key)
            self._accesses.pop(key, None)

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Let all operators run on the host while the block runs, as those of an optimizer in CPU memory do."""
        self._is_on_host = True
        try:
            yield
        finally:
            self._is_on_host = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if is_view or schema.name.startswith(_NO_ACCESS):
            return result
        touched: list[tuple[torch.Tensor, bool]] = []
        for position, argument in enumerate(schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            # Collectives say nothing of what they write.
            touched += [(tensor, is_write or func.namespace == "c10d") for tensor in _tensors(value)]
        inputs = [self._key(tensor) for tensor, _ in touched]
        made = [tensor for tensor in _tensors(result) if self._key(tensor) not in inputs]
        non_blocking = kwargs.get("non_blocking") is True or (len(args) > 2 and args[2] is True)
        self._note(schema.name, touched, made, non_blocking=non_blocking)
        return result

    def _note(
        self, operator: str, touched: list[tuple[torch.Tensor, bool]], made: list[torch.Tensor], *, non_blocking: bool
    ) -> None:
        places = {self._key(tensor) in self._host for tensor, _ in touched}
        runs_on_host = self._is_on_host or places == {True}
        queue = self._double.host if runs_on_host else self._double.current()
        if runs_on_host:
            self.lies_on_host(*made)
        number = queue.tick()
        for tensor, is_write in (*touched, *((tensor, True) for tensor in made)):
            self._access(tensor, Access(operator, queue.name, number, *_span(tensor), is_write), queue)
        if not runs_on_host and True in places and not non_blocking:
            event = self._double.event()
            event.record(queue)
            event.synchronize()

    def _access(self, tensor: torch.Tensor, access: Access, queue: Queue) -> None:
        key = self._key(tensor)
        for other in self._accesses.setdefault(key, []):
            overlaps = other.start < access.stop and access.start < other.stop
            is_ordered = queue.clock.get(other.queue, 0) >= other.number
            if overlaps and (other.is_write or access.is_write) and not is_ordered:
                self.races.append(f"{self._names.get(key, 'a tensor')}: {other}, then {access}")
        self._accesses[key].append(access)

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        self._kept[key] = storage
        return key


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if type(leaf) in _PLAIN and leaf.numel()]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + (int(last) + 1) * tensor.itemsize
