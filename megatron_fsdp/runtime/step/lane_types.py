"""What a lane is, whatever does the work: a queue of collectives and of what follows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch.distributed as dist

__all__ = ["Lane", "Operation", "Ticket"]

Operation = Callable[[list[dist.Work] | None], None]


class Ticket(Protocol):
    """Work that was submitted to a lane.

    Attributes:
        lane: the name of the lane. owner: the identity of the object whose work it is, 0 for nobody's.
        works: handles of its collectives, on CPU, until somebody waits.
    """

    lane: str
    owner: int
    works: list[dist.Work]

    def wait(self) -> None:
        """Make all later compute see the result. On CUDA this orders streams and does not block the host.

        One that was interrupted is not over: it may be made again.
        """

    def lead(self, stream: Any) -> None:
        """Order a stream after the work, where there are streams."""

    def give_up(self) -> None:
        """Wait until nothing is written any more; whether it failed or not, there will be no result."""


class Lane(Protocol):
    """A queue of device work."""

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
            then: device work on their result.
            on_host: work of the CPU on what ``then`` copied to it; ``Ticket.wait`` blocks the host for it.
            owner: told to listeners with the ticket.
            after: of other lanes, on a device with streams: compute need not have come after them.
            tickets: these get the ticket before anything is issued: if that raises, somebody has to ``give_up``.
        """
