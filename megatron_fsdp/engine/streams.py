"""Streams and lanes: the order of work on a device's compute streams and on the engine's communication streams.

This is the only file that uses streams and events, through ``Streams``. Tests replace ``Streams`` by a double that
records every wait (``drive_with``; docs/design/order.md, "Streams"). A CPU has no streams: a lane issues a collective
at once, and ``Ticket.wait`` blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from dbuffer.collectives.waits import wait_for
from dbuffer.events import listeners, tell
from dbuffer_kernels.switches import is_off
from megatron_fsdp.engine.optimizer_steps import STEP_CHECKS

__all__ = [
    "COMPUTES",
    "HOST_READS",
    "HOST_WRITES",
    "LANES",
    "CallerStreams",
    "Compute",
    "Event",
    "Lane",
    "LastTurn",
    "Streams",
    "Ticket",
    "Turns",
    "compute_of",
    "drive_with",
    "end_of_compute",
    "expect_host_read",
    "forget_unused_streams",
    "is_capturing",
    "join_captured",
    "join_lanes",
    "lane",
    "latest_submission",
    "turns",
    "wait_for_event",
    "wait_for_host_reads",
    "wait_for_host_writes",
    "wait_on_host",
]


Event = torch.Event


class Streams:
    """The stream operations of CUDA that lanes use; a test's double has the same methods.

    Streams and events are ``torch.Stream`` and ``torch.Event``, whose methods are C++. The methods of ``torch.cuda``
    are Python: 5.4 us instead of 0.8 for ``wait_stream``, 10 to 29 instead of 3 to issue work on another stream, 3.6
    instead of 1.7 for a new event and its record (torch 2.13 on the host alone; docs/performance.md).
    """

    def new(self, device: torch.device, name: str) -> Any:
        """Return a new high-priority stream for the lane ``name``."""
        return torch.Stream(device=device, priority=0 if is_off("priority") else -1)

    def current(self, device: torch.device) -> Any:
        """Return the current stream of this thread."""
        return torch.accelerator.current_stream(device)

    def current_id(self, device: torch.device) -> int:
        """Return a number that identifies the current stream; called for every gradient."""
        number: int = torch._C._cuda_getCurrentRawStream(device.index)
        return number

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` and its device current inside a ``with`` block."""
        context: AbstractContextManager[Any] = stream
        return context

    def on_host(self) -> AbstractContextManager[Any]:
        """Enclose the host's work on memory that a lane has copied to; a double records it."""
        return nullcontext()

    def event(self) -> Any:
        """Return a new event."""
        return torch.Event("cuda")

    def is_capturing(self) -> bool:
        """Return True if the current stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()


class Compute:
    """The compute streams of one device: all streams on which the engine was called.

    A model may run a branch on a separate stream. All compute streams share one allocator, which may hand out memory
    that another branch has released. So a lane waits for all compute streams, and all compute streams wait for a lane.
    """

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        self.device = device
        self.streams = streams or Streams()
        self._known: dict[int, Any] = {}
        # Numbers of the streams that were used since the forward pass began.
        self._used: set[int] = set()

    def note(self) -> None:
        """Add the current stream to the compute streams."""
        number = self.streams.current_id(self.device)
        if number in self._used:
            return
        self._used.add(number)
        if number not in self._known:
            self._known[number] = self.streams.current(self.device)

    def forget_unused(self) -> None:
        """Remove the streams that were not used since the last call; called when a forward pass begins.

        The current stream waits for each removed one. Every compute stream costs one wait per submission and per
        ``Ticket.wait``.
        """
        current, is_capturing = self.streams.current(self.device), self.streams.is_capturing()
        for number in self._known.keys() - self._used:
            if self.is_captured(self._known[number]) is is_capturing:
                stream = self._known.pop(number)
                current.wait_stream(stream)
        self._used.clear()
        # The pass may submit nothing to a lane, if all of its weights are still gathered.
        self.note()

    def all(self) -> list[Any]:
        """Return the compute streams with the current one: during a capture the captured ones, else the others."""
        self.note()
        if len(self._known) == 1:
            return list(self._known.values())
        is_capturing = self.streams.is_capturing()
        return [stream for stream in self._known.values() if self.is_captured(stream) is is_capturing]

    def is_captured(self, stream: Any) -> bool:
        """Return True if ``stream`` is being captured."""
        with self.streams.use(stream):
            return self.streams.is_capturing()


class LastTurn:
    """The number of the stream that had the last turn at a buffer; None before the first turn."""

    __slots__ = ("stream",)

    def __init__(self) -> None:
        self.stream: int | None = None


class Turns:
    """Orders the writes of several compute streams to one buffer as the host issues them.

    Autograd runs the backward of a branch, and the hooks on its gradients, on the stream of its forward.

    Args:
        last: the last turn, which gradient hooks read before they call ``take``.
    """

    def __init__(self, compute: Compute, last: LastTurn) -> None:
        self._compute = compute
        last.stream = None
        self._last = last
        self._stream: torch.Stream | None = None

    def take(self, finish_turn: Callable[[], None]) -> None:
        """Make the current stream wait for the stream that had the last turn.

        Args:
            finish_turn: called on that stream before, to finish its work on the buffer.
        """
        compute = self._compute
        streams = compute.streams
        number = streams.current_id(compute.device)
        if number == self._last.stream:
            return
        stream, before = streams.current(compute.device), self._stream
        if before is not None and compute.is_captured(before) is streams.is_capturing():
            with streams.use(before):
                finish_turn()
            stream.wait_stream(before)
        compute.note()
        self._last.stream, self._stream = number, stream


COMPUTES: dict[torch.device, Compute] = {}
LANES: dict[tuple[str, torch.device], Lane] = {}
"""The process's lanes, by name and device (``lane``)."""
_latest: Event | None = None
"""The event after the last submission to any lane of a device; see ``latest_submission``."""
_DOUBLES: list[Any] = []


def compute_of(device: torch.device) -> Compute | None:
    """Return the compute streams of a device; None for a CPU."""
    if device not in COMPUTES:
        if not _DOUBLES and device.type != "cuda":
            return None
        COMPUTES[device] = Compute(device, _DOUBLES[-1] if _DOUBLES else None)
    return COMPUTES[device]


def turns(device: torch.device, last: LastTurn | None = None) -> Turns | None:
    """Return a new ``Turns`` for a buffer; None on a device without streams. ``last``: see ``Turns``."""
    compute = compute_of(device)
    return None if compute is None else Turns(compute, last or LastTurn())


def is_capturing(device: torch.device) -> bool:
    """Return True if work issued now is captured into a graph."""
    compute = compute_of(device)
    return compute is not None and compute.streams.is_capturing()


def wait_on_host(device: torch.device) -> None:
    """Block the host until the current stream has finished; do nothing on CPU."""
    compute = compute_of(device)
    if compute is not None:
        event = compute.streams.event()
        event.record(compute.streams.current(device))
        event.synchronize()


def wait_for_event(event: torch.Event, device: torch.device) -> None:
    """Make the current stream, and later work of all lanes, wait for an event; do nothing on CPU."""
    compute = compute_of(device)
    if compute is not None:
        compute.streams.current(device).wait_event(event)


def latest_submission() -> Event | None:
    """Return the event after the last submission to any lane of a device; any thread may query it.

    None before the first submission, and after one that was captured into a graph: its event does not follow replays.
    """
    return _latest


@contextmanager
def drive_with(streams: Any) -> Iterator[None]:
    """Use the double ``streams`` for every device inside a ``with`` block; make and use models inside of the block."""
    known: tuple[dict[Any, Any], ...] = (LANES, COMPUTES)
    global _latest
    before, latest = [dict(each) for each in known], _latest
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
        _latest = latest


# ---------------------------------------------------------------- lanes
#
# A lane is an ordered queue of collectives and of the device work on their results, parallel to compute. There are
# three per device: "gather", "reduce", and "last" for the reductions at the end of a step.


Operation = Callable[[list[dist.Work] | None], None]


class Ticket:
    """A submission to a lane; ``wait`` makes its result visible to compute.

    Attributes:
        lane: the name of the lane. owner: ``id`` of the unit that submitted the work; 0 for no unit.
        works: on CPU, handles of the collectives, until ``wait``.
    """

    __slots__ = ("_compute", "_event", "_followed", "_on_host", "_then", "lane", "owner", "works")

    def __init__(self, lane: str, owner: int, compute: Compute | None, on_host: Callable[[], None] | None) -> None:
        self.lane, self.owner = lane, owner
        self.works: list[dist.Work] = []
        self._then: Callable[[], None] | None = None
        self._on_host, self._compute = on_host, compute
        self._event: Event | None = None
        # Identities of the streams that wait already: the groups of a unit share a ticket, and each calls ``wait``.
        self._followed: frozenset[int] = frozenset()

    def wait(self) -> None:
        """Make the result visible to all later compute: order streams on CUDA, block on CPU.

        On CUDA the host blocks too if it has work on the result (``on_host``). Call it again after an interruption.
        """
        if self._compute is not None:
            self._wait_on_streams(self._compute)
            return
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

    def _wait_on_streams(self, compute: Compute) -> None:
        streams = [stream for stream in compute.all() if id(stream) not in self._followed]
        if not streams:
            return
        if listeners:
            tell("wait", self)
        for stream in streams:
            stream.wait_event(self._event)
        if self._on_host is not None and self._event is not None:
            self._event.synchronize()
            with compute.streams.on_host():
                self._on_host()
            self._on_host = None
        # Last, so that a wait that was interrupted is made again.
        self._followed = self._followed.union(map(id, streams))
        if listeners:
            tell("waited", self)

    def is_completed(self) -> bool:
        """Return True if ``wait`` would not block or order anything."""
        if self._event is not None:
            return bool(self._event.query())
        return all(work.is_completed() for work in self.works)

    def cancel(self) -> None:
        """Cancel the work on the result, and wait until the collectives no longer write; ignore their failures."""
        self._then = self._on_host = None
        if self._event is not None:
            self.wait()
        for work in self.works:
            with suppress(RuntimeError):
                wait_for(work)
        self.works = []


class Lane:
    """An ordered queue of collectives, on a stream of its own if the device has streams.

    Args:
        compute: the compute streams of the device; None for a CPU.
    """

    def __init__(self, name: str, compute: Compute | None = None) -> None:
        self._name, self._compute = name, compute
        self._stream = None if compute is None else compute.streams.new(compute.device, name)
        # The event after the last submission, and whether it was captured: an event is valid in its capture only.
        self._last: Event | None = None
        self._is_last_captured = False

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
        """Queue ``operation`` after all compute issued so far, and ``then`` after it.

        Args:
            operation: issues collectives. Called with a list for their handles, or with None if stream order suffices.
            then: device work on the result; on CPU it runs in ``Ticket.wait``.
            on_host: the CPU's work on memory that ``then`` copied to; ``Ticket.wait`` blocks the host for it.
            owner: ``Ticket.owner``, for listeners.
            tickets: lists that get the ticket before anything is issued. If ``operation`` raises, the caller calls
                ``cancel`` of the ticket.
            after: tickets of other lanes to wait for, on a device with streams; compute does not wait for them.
        """
        ticket = Ticket(self._name, owner, self._compute, on_host)
        for known in tickets:
            known.append(ticket)
        if self._compute is not None:
            self._run(self._compute, ticket, operation, then, after)
            return ticket
        ticket._then = then
        if listeners:
            tell("issue", ticket)
        operation(ticket.works)
        if listeners:
            tell("issued", ticket)
        return ticket

    def _run(
        self,
        compute: Compute,
        ticket: Ticket,
        operation: Operation,
        then: Callable[[], None] | None,
        after: Iterable[Ticket],
    ) -> None:
        """Run the operation on the lane's stream, after all work of the compute streams so far."""
        global _latest
        streams, mine = compute.streams, self._stream
        assert mine is not None
        # The wait also covers memory: the allocator may hand out, on this stream, a block that compute has released.
        for stream in compute.all():
            mine.wait_stream(stream)
        for other in after:
            mine.wait_event(other._event)
        with streams.use(mine):
            event = streams.event()
            try:
                if listeners:
                    tell("issue", ticket)
                operation(None)
                if listeners:
                    tell("landed", ticket)
                if then is not None:
                    then()
            finally:
                event.record(mine)
                ticket._event = self._last = event
                self._is_last_captured = streams.is_capturing()
        _latest = None if self._is_last_captured else event
        if listeners:
            tell("issued", ticket)

    def join(self) -> None:
        """Make the compute streams wait for all submissions; do nothing on CPU."""
        compute = self._compute
        if compute is not None and self._last is not None and self._is_last_captured is compute.streams.is_capturing():
            for stream in compute.all():
                stream.wait_event(self._last)
            if self._is_last_captured:
                # The next capture must not wait for this event, and cannot be told from this capture.
                self._last = None

    def synchronize(self) -> None:
        """Block the host until all submissions have finished; do nothing on CPU."""
        if self._last is not None and not self._is_last_captured:
            self._last.synchronize()


def lane(name: str, device: torch.device) -> Lane:
    """Return the process's lane ``name`` ("gather", "reduce" or "last") on a device; make it at the first call."""
    key = (name, device)
    if key not in LANES:
        LANES[key] = Lane(name, compute_of(device))
    return LANES[key]


def join_lanes() -> None:
    """Make the compute streams wait for all submissions to all lanes; do nothing on CPU."""
    for each in LANES.values():
        each.join()


def join_captured() -> None:
    """Make the compute streams wait for the submissions of this capture, and forget their events.

    Outside of captures it does nothing. A later capture must not wait for these events, which deleting a model in it
    would do.
    """
    for each in LANES.values():
        if each._is_last_captured:
            each.join()


def forget_unused_streams() -> None:
    """Remove compute streams that were not used since the last call; do nothing on CPU."""
    for compute in COMPUTES.values():
        compute.forget_unused()


def end_of_compute(device: torch.device) -> Callable[[], None]:
    """Return a function that blocks any thread until the current stream has finished the work issued before."""
    compute = compute_of(device)
    if compute is None:
        return lambda: None
    event = compute.streams.event()
    event.record(compute.streams.current(device))
    wait: Callable[[], None] = event.synchronize
    return wait


class CallerStreams:
    """Orders gathers of weights (``transfer/``), and the device streams on which the caller uses the tensors.

    Weights are gathered in buckets of several tensors, on the current stream. The caller gets one tensor after the
    other, and may take each on another stream, as vLLM does. It may use a tensor on the stream that was current when it
    got the tensor. All methods do nothing on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute = compute_of(device)
        self._landed: Event | None = None
        # Numbers of the streams that wait for the bucket that the caller has now.
        self._following: set[int] = set()

    def before_gather(self) -> None:
        """Make the current stream, which gathers next, wait for all others, which trained or read earlier buckets."""
        if self._compute is not None:
            current = self._compute.streams.current(self._device)
            for stream in self._compute.all():
                if stream != current:
                    current.wait_stream(stream)

    def bucket_landed(self) -> None:
        """Record that the work issued on the current stream so far fills a bucket."""
        if self._compute is not None:
            self._landed = self._compute.streams.event()
            self._landed.record(self._compute.streams.current(self._device))
            self._following = set()

    def hand_over(self, memory: torch.Tensor) -> None:
        """Make the current stream wait for the bucket that has the next tensor; ``memory`` is the bucket."""
        if self._compute is None or self._landed is None:
            return
        number = self._compute.streams.current_id(self._device)
        if number in self._following:
            return
        self._following.add(number)
        self._compute.note()
        stream = self._compute.streams.current(self._device)
        stream.wait_event(self._landed)
        # The bucket may have been allocated for another stream, while the one before it was used.
        if memory.is_cuda:
            memory.record_stream(stream)

    def end(self) -> None:
        """Make all streams wait for the last gather: an optimizer on one of them writes the weights that it reads."""
        if self._compute is not None and self._landed is not None:
            for stream in self._compute.all():
                stream.wait_event(self._landed)


# ---------------------------------------------------------------- weights and gradients in CPU memory (offload)


HOST_READS: set[torch.device] = set()
"""Devices whose gathers may still read main weights in CPU memory; ``wait_for_host_reads`` waits for them."""

HOST_WRITES: set[torch.device] = set()
"""Devices whose reductions may still write ``main_grad`` in CPU memory; ``wait_for_host_writes`` waits for them."""


def expect_host_read(device: torch.device) -> None:
    """Record that a gather reads main weights in CPU memory, so that the next optimizer step waits for it."""
    HOST_READS.add(device)
    if wait_for_host_reads not in STEP_CHECKS:
        STEP_CHECKS.append(wait_for_host_reads)


def wait_for_host_reads(_: object = None) -> None:
    """Block the host until no gather reads main weights in CPU memory, so that they may be written."""
    while HOST_READS:
        gathers = LANES.get(("gather", HOST_READS.pop()))
        if gathers is not None:
            gathers.synchronize()
    if wait_for_host_reads in STEP_CHECKS:
        STEP_CHECKS.remove(wait_for_host_reads)


def wait_for_host_writes() -> None:
    """Block the host until reductions have written ``main_grad`` in CPU memory, once for all units."""
    while HOST_WRITES:
        reductions = LANES.get(("reduce", HOST_WRITES.pop()))
        if reductions is not None:
            reductions.synchronize()
