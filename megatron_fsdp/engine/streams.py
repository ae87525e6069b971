"""Streams: what the engine asks of a device that has them, and the streams on which it was called; a CPU has none.

The only file that touches streams and events, all of them by way of ``Streams``, in whose place a
test puts a double that notes what waits for what (docs/design/order.md, "Streams").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from dbuffer.collectives import wait_for
from dbuffer.events import listeners, tell
from dbuffer_kernels.switches import is_off
from megatron_fsdp.engine.freshness import CHECKS

__all__ = [
    "COMPUTES",
    "HOST_READS",
    "HOST_WRITES",
    "LANES",
    "LATEST",
    "CallerStreams",
    "Compute",
    "Event",
    "Lane",
    "Streams",
    "Ticket",
    "Turns",
    "compute_of",
    "drive_with",
    "end_of_compute",
    "forget_unused_streams",
    "is_capturing",
    "join_captured",
    "join_lanes",
    "lane",
    "latest_submission",
    "settle_host",
    "settle_host_writes",
    "turns",
    "wait_for_event",
    "wait_on_host",
]


Event = torch.Event


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
        self._stream: torch.Stream | None = None

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


# ---------------------------------------------------------------- lanes
#
# Ordered queues of collectives and what follows them, beside compute: for gathers, for reductions, and for what is left
# to reduce last.


Operation = Callable[[list[dist.Work] | None], None]


class Ticket:
    """Work that was submitted to a lane.

    Attributes:
        lane: the name of the lane. owner: the identity of the object whose work it is, 0 for none.
        works: handles of its collectives, on CPU, until somebody waits.
    """

    __slots__ = ("_compute", "_event", "_followed", "_on_host", "_then", "lane", "owner", "works")

    def __init__(self, lane: str, owner: int, compute: Compute | None, on_host: Callable[[], None] | None) -> None:
        self.lane, self.owner = lane, owner
        self.works: list[dist.Work] = []
        self._then: Callable[[], None] | None = None
        self._on_host, self._compute = on_host, compute
        self._event: Event | None = None
        # Streams that wait already, by identity: groups of a unit share a ticket, and each waits for it.
        self._followed: frozenset[int] = frozenset()

    def wait(self) -> None:
        """Make all later compute see the result. On CUDA this orders streams; the host waits where it has work to do.

        One that was interrupted is not over: it may be made again.
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
        self._followed = self._followed.union(map(id, streams))
        if self._on_host is not None and self._event is not None:
            self._event.synchronize()
            with compute.streams.on_host():
                self._on_host()
            self._on_host = None
        if listeners:
            tell("waited", self)

    def is_completed(self) -> bool:
        """Whether ``wait`` would not have to wait."""
        if self._event is not None:
            return bool(self._event.query())
        return all(work.is_completed() for work in self.works)

    def give_up(self) -> None:
        """Wait until nothing is written any more; whether it failed or not, there will be no result."""
        self._then = self._on_host = None
        if self._event is not None:
            self.wait()
        for work in self.works:
            with suppress(RuntimeError):
                wait_for(work)
        self.works = []


class Lane:
    """A queue beside compute.

    Args:
        compute: the streams of its device; None where that has none.
    """

    def __init__(self, name: str, compute: Compute | None = None) -> None:
        self._name, self._compute = name, compute
        self._stream = None if compute is None else compute.streams.new(compute.device, name)
        # The end of what was submitted last, and whether that was captured: an event lives in its capture alone.
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
            operation: issues collectives; it is given a list for their handles, or None where stream order suffices.
            then: device work on their result; on CPU it runs in ``Ticket.wait``.
            on_host: work of the CPU on what ``then`` copied to it; ``Ticket.wait`` blocks the host for it.
            owner: told to listeners with the ticket.
            after: of other lanes, on a device with streams: compute need not have come after them.
            tickets: these get the ticket before anything is issued: if that raises, ``give_up`` is left to call.
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
        """Run the operation on the lane's stream, after what compute streams hold now."""
        streams, mine = compute.streams, self._stream
        assert mine is not None
        # The wait also covers memory: a block that compute has finished with may be handed out again on this stream.
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
        LATEST[:] = [] if self._is_last_captured else [event]
        if listeners:
            tell("issued", ticket)

    def join(self) -> None:
        """Order compute after all that was submitted, where there are streams."""
        compute = self._compute
        if compute is not None and self._last is not None and self._is_last_captured is compute.streams.is_capturing():
            for stream in compute.all():
                stream.wait_event(self._last)
            if self._is_last_captured:
                # The next capture may not wait for it, and nothing tells one capture from another.
                self._last = None

    def settle(self) -> None:
        """Let the host wait until all that was submitted is done, where there are streams."""
        if self._last is not None and not self._is_last_captured:
            self._last.synchronize()


def lane(name: str, device: torch.device) -> Lane:
    """Return the process's lane of that name ("gather", "reduce" or "last") on a device."""
    key = (name, device)
    if key not in LANES:
        LANES[key] = Lane(name, compute_of(device))
    found: Lane = LANES[key]
    return found


def join_lanes() -> None:
    """Order compute after everything that was submitted to lanes; nothing to do on CPU."""
    for each in LANES.values():
        each.join()


def join_captured() -> None:
    """Order compute after what this capture submitted to lanes, and forget its events; outside of captures do nothing.

    A later capture may not wait for them, and would when a model is deleted in it.
    """
    for each in LANES.values():
        if each._is_last_captured:
            each.join()


def forget_unused_streams() -> None:
    """Let lanes wait no more for streams that were not used since the last call; nothing to do on CPU."""
    for compute in COMPUTES.values():
        compute.forget_unused()


def end_of_compute(device: torch.device) -> Callable[[], None]:
    """Return what lets any thread wait until the current stream has done all that it was given before this call."""
    compute = compute_of(device)
    if compute is None:
        return lambda: None
    event = compute.streams.event()
    event.record(compute.streams.current(device))
    wait: Callable[[], None] = event.synchronize
    return wait


class CallerStreams:
    """Orders the gathers of a stream of weights and the device streams on which its caller takes the tensors.

    The caller may take each tensor on another device stream: vLLM packs one buffer after the other on streams of its
    own. A tensor may be used on the stream that was current when it was handed over. Does nothing on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute = compute_of(device)
        self._landed: Event | None = None
        # Streams, by number, that follow the arrival of the bucket that the caller has now.
        self._following: set[int] = set()

    def before_gather(self) -> None:
        """Let the current stream, which gathers follow, follow all others: they trained, or read earlier buckets."""
        if self._compute is not None:
            current = self._compute.streams.current(self._device)
            for stream in self._compute.all():
                if stream != current:
                    current.wait_stream(stream)

    def bucket_landed(self) -> None:
        """Note that what the current stream has been given so far fills a bucket."""
        if self._compute is not None:
            self._landed = self._compute.streams.event()
            self._landed.record(self._compute.streams.current(self._device))
            self._following = set()

    def hand_over(self, memory: torch.Tensor) -> None:
        """Let the current stream follow the arrival of the bucket, of which a tensor is handed over."""
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
        """Let all streams follow the last gather: an optimizer that steps on one of them writes what it reads."""
        if self._compute is not None and self._landed is not None:
            for stream in self._compute.all():
                stream.wait_event(self._landed)


HOST_READS: set[torch.device] = set()
"""Devices to which gathers may still copy main weights: the host must not write these before ``settle_host``."""


HOST_WRITES: set[torch.device] = set()
"""Devices whose reductions may still copy sums to CPU memory; the host may use these after ``settle_host_writes``."""


def settle_host_writes() -> None:
    """Let the host use sums in CPU memory: it waits, once for all units, until reductions have copied them there."""
    while HOST_WRITES:
        reductions = LANES.get(("reduce", HOST_WRITES.pop()))
        if reductions is not None:
            reductions.settle()


def settle_host(_: object = None) -> None:
    """Let the host write main weights in CPU memory again: it waits until no gather reads them."""
    while HOST_READS:
        gathers = LANES.get(("gather", HOST_READS.pop()))
        if gathers is not None:
            gathers.settle()
    if settle_host in CHECKS:
        CHECKS.remove(settle_host)
