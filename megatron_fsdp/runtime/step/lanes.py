"""Ordered queues of collectives and what follows them, beside compute: one for gathers, one for reductions, one last.

On CPU a lane is gloo's own worker: collectives are issued asynchronously, and what follows one (the fold of a reduced
gradient) runs when somebody waits for it. On CUDA it is a stream (``streams.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from dbuffer.collectives import wait_for
from dbuffer.events import listeners, tell
from megatron_fsdp.runtime.step.freshness import CHECKS
from megatron_fsdp.runtime.step.streams import COMPUTES, LANES, LATEST, Compute, compute_of

__all__ = [
    "HOST_READS", "HOST_WRITES", "Lane", "Ticket", "end_of_compute", "forget_unused_streams", "join_captured",
    "join_lanes", "lane", "settle_host", "settle_host_writes",
]  # fmt: skip

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
        self._event: Any = None
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
        if self._on_host is not None:
            self._event.synchronize()
            with compute.streams.on_host():
                self._on_host()
            self._on_host = None
        if listeners:
            tell("waited", self)

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
        self._last: Any = None
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
