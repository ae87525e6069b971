"""Ordered queues of collectives and what follows them, beside compute: one for gathers, one for reductions, one last.

On CPU a lane is gloo's own worker: collectives are issued asynchronously, and what follows one (the fold of a reduced
gradient) runs when somebody waits for it. On CUDA it is a stream (``cuda_lane.py``; docs/design/order.md, "Streams").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from dbuffer.collectives import wait_for
from dbuffer.events import listeners, tell

__all__ = ["LANES", "CpuLane", "Ticket", "forget_unused_streams", "join_lanes", "lane"]

Operation = Callable[[list[dist.Work] | None], None]


class Ticket:
    """Work that was submitted to a lane.

    Attributes:
        lane: the name of the lane. owner: the identity of the object whose work it is, 0 for none.
        works: handles of its collectives, on CPU, until somebody waits.
    """

    __slots__ = ("_on_host", "_then", "lane", "owner", "works")

    def __init__(
        self, lane: str, owner: int, then: Callable[[], None] | None, on_host: Callable[[], None] | None
    ) -> None:
        self.lane, self.owner = lane, owner
        self.works: list[dist.Work] = []
        self._then, self._on_host = then, on_host

    def wait(self) -> None:
        """Make all later compute see the result. On CUDA this orders streams and does not block the host.

        One that was interrupted is not over: it may be made again.
        """
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
        """Order a stream after the work, where there are streams."""

    def give_up(self) -> None:
        """Wait until nothing is written any more; whether it failed or not, there will be no result."""
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
        """Queue ``operation`` after all compute issued so far, and ``then`` after it.

        Args:
            operation: issues collectives; it is given a list for their handles, or None where stream order suffices.
            then: device work on their result; on CPU it runs in ``Ticket.wait``.
            on_host: work of the CPU on what ``then`` copied to it; ``Ticket.wait`` blocks the host for it.
            owner: told to listeners with the ticket.
            after: of other lanes, on a device with streams: compute need not have come after them.
            tickets: these get the ticket before anything is issued: if that raises, ``give_up`` is left to call.
        """
        ticket = Ticket(self._name, owner, then, on_host)
        for known in tickets:
            known.append(ticket)
        if listeners:
            tell("issue", ticket)
        operation(ticket.works)
        if listeners:
            tell("issued", ticket)
        return ticket

    def join(self) -> None:
        """Order compute after all that was submitted, where there are streams."""


LANES: dict[tuple[str, torch.device], CpuLane] = {}
"""The lanes of the process, by their names and devices."""


MAKERS: list[Callable[[str, torch.device], CpuLane]] = []
"""What makes a lane of a name on a device (``cuda_lane.py``)."""


def lane(name: str, device: torch.device) -> CpuLane:
    """Return the process's lane of that name ("gather", "reduce" or "last") on a device."""
    key = (name, device)
    if key not in LANES:
        LANES[key] = MAKERS[0](name, device)
    return LANES[key]


COMPUTE: dict[torch.device, Any] = {}
"""The streams on which compute runs, ``Compute``, of each device that has any."""


def forget_unused_streams() -> None:
    """Let lanes wait no more for streams that were not used since the last call; nothing to do on CPU."""
    for compute in COMPUTE.values():
        compute.forget_unused()


def join_lanes() -> None:
    """Order compute after everything that was submitted to lanes; nothing to do on CPU."""
    for each in LANES.values():
        each.join()
