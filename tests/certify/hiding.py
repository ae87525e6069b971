"""Hiding: how much of compute lies between the issue of a lane's work and the moment from which compute comes after it.

The cost of a wait that comes too early shows here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dbuffer.events import listen
from megatron_fsdp.certify.clocks import Clock, VirtualStreams


@dataclass(eq=False)
class Hidden:
    """The compute that hides the work of one ticket.

    Attributes:
        unit: whose work it is. lane: on which. kinds: of its collectives.
        flops: of compute, from the issue to the first operator that comes after the work; infinite where none did.
    """

    ticket: Any
    unit: str
    lane: str
    begin: int
    kinds: list[str] = field(default_factory=list)
    queues: list[str] = field(default_factory=list)
    end: Clock = field(default_factory=dict)
    flops: float = math.inf


class Hiding(TorchDispatchMode):
    """Counts operations of the compute stream while it is entered, inside of ``watching``.

    Args:
        units: names by identity.
    Attributes:
        found: tickets that compute comes after, in that order.
    """

    def __init__(self, streams: VirtualStreams, units: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._streams, self._units = streams, units
        self.found: list[Hidden] = []
        self._open: list[Hidden] = []
        self._flops = 0

    def __enter__(self) -> Hiding:
        self._listening = listen(self._hear)
        self._listening.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._listening.__exit__(*error)

    def _hear(self, action: str, subject: Any) -> None:
        if action == "issue":
            self._open.append(Hidden(subject, self._units.get(subject.owner, ""), subject.lane, self._flops))
        elif action == "transfer" and self._open and not self._open[-1].end:
            group = subject.group
            ranks = ",".join(map(str, torch.distributed.get_process_group_ranks(group)))
            self._open[-1].kinds.append(subject.kind)
            self._open[-1].queues.append(f"{group.group_desc} {group.group_name} of ranks {ranks}")
        elif action == "issued":
            one = next(one for one in self._open if one.ticket is subject)
            lane = next(queue for queue in self._streams.lanes if queue.name == f"{subject.lane} lane")
            one.end = {name: lane.clock.get(name, 0) for name in (lane.name, *one.queues)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._streams.current() is self._streams.compute:
            clock = self._streams.compute.clock
            for one in [one for one in self._open if one.end and all(clock.get(k, 0) >= n for k, n in one.end.items())]:
                self._open.remove(one)
                one.flops = self._flops - one.begin
                self.found.append(one)
            packet = func._overloadpacket
            # An in-place operator has the FLOPs of its functional form.
            packet = packet if packet in flop_registry else getattr(torch.ops.aten, packet.__name__.rstrip("_"), packet)
            count = flop_registry.get(packet)
            self._flops += 0 if count is None else int(count(*args, **kwargs, out_val=result))
        return result
