"""Hiding: how much of compute lies between the issue of a lane's work and the moment from which compute comes after it.

A wait that comes too early is no idle one: somebody needs it, later. What it costs shows here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from megatron_fsdp.certify.clocks import Clock, VirtualStreams
from megatron_fsdp.runtime.step.lanes import Ticket

__all__ = ["Hidden", "Hiding", "num_flops"]


@dataclass(frozen=True, slots=True)
class Hidden:
    """What hides the work of one ticket.

    Attributes:
        unit: whose work it is; empty for nobody's. lane: on which. kinds: of its collectives.
        num_operators, flops: of compute, from the issue to the first operator that comes after the work. Both infinite
            where none came after it.
    """

    unit: str
    lane: str
    kinds: tuple[str, ...]
    num_operators: float
    flops: float

    def __str__(self) -> str:
        what = ", ".join(self.kinds) or "no collective"
        return (
            f"unit {self.unit!r}, {self.lane} lane ({what}): {self.num_operators:.0f} operators of compute, "
            f"{self.flops:.3g} FLOPs, before compute comes after it"
        )


@dataclass(slots=True)
class _Open:
    ticket: Ticket
    unit: str
    begin: tuple[int, int]
    kinds: list[str] = field(default_factory=list)
    queues: list[str] = field(default_factory=list)
    end: Clock = field(default_factory=dict)


class Hiding:
    """Counts operators of the compute stream, and notes at which count each ticket is issued and come after.

    Attributes:
        found: tickets that compute comes after, in that order. units: their names by identity.
    """

    def __init__(self, streams: VirtualStreams) -> None:
        self._streams = streams
        self.found: list[Hidden] = []
        self.units: Mapping[int, str] = {}
        self._count = self._flops = 0
        self._open: list[_Open] = []

    def forget(self) -> None:
        """Forget all tickets so far."""
        self.found.clear()
        self._open.clear()

    def issue(self, ticket: Ticket) -> None:
        """Take notice of work that is about to be issued."""
        self._open.append(_Open(ticket, self.units.get(ticket.owner, ""), (self._count, self._flops)))

    def transfer(self, kind: str, communicator: str) -> None:
        """Take notice of a collective, which belongs to what was issued last if that is not all issued."""
        if self._open and not self._open[-1].end:
            self._open[-1].kinds.append(kind)
            self._open[-1].queues.append(communicator)

    def issued(self, ticket: Ticket) -> None:
        """Take notice of the end of what was issued."""
        one = next((one for one in self._open if one.ticket is ticket), None)
        if one is None:
            return
        lane = next(queue for queue in self._streams.lanes if queue.name == f"{ticket.lane} lane")
        one.end = {name: lane.clock.get(name, 0) for name in (lane.name, *one.queues)}

    def compute(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count an operator of the compute stream, which comes after what that stream has waited for."""
        if self._open:
            clock = self._streams.compute.clock
            after = [one for one in self._open if one.end and all(clock.get(k, 0) >= n for k, n in one.end.items())]
            for one in after:
                self._open.remove(one)
                self.found.append(self._hidden(one, self._count - one.begin[0], self._flops - one.begin[1]))
        self._count += 1
        self._flops += num_flops(func, args, kwargs, result)

    def left(self) -> list[Hidden]:
        """Return what no operator came after so far."""
        return [self._hidden(one, math.inf, math.inf) for one in self._open]

    @staticmethod
    def _hidden(one: _Open, num_operators: float, flops: float) -> Hidden:
        return Hidden(one.unit, one.ticket.lane, tuple(dict.fromkeys(one.kinds)), num_operators, flops)


def num_flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the floating-point operations of a matrix product, convolution or attention; 0 for anything else."""
    packet = func._overloadpacket
    # In place: counted as what it does.
    packet = getattr(torch.ops.aten, packet.__name__.rstrip("_"), packet) if packet not in flop_registry else packet
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))
