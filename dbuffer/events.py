"""Events: what the engine does, told in host order to whoever listens. The one way to observe it; nothing is patched.

| action | told when | subject |
|---|---|---|
| collective | one is about to be issued | ``CollectiveCall`` |
| transfer, transferred | it does this to memory; it was issued | ``Transfer`` |
| allocated | a flat storage has memory of its own, new or again | ``FlatStorage`` |
| released | a storage is about to give its memory back to the allocator | ``torch.UntypedStorage`` |
| exchanged | two storages have exchanged their memory | both |
| placed | a storage is about to get a place in an arena | the slot's storage, and the arena, a uint8 tensor |
| issue, issued | work goes to a lane; its collectives are issued, their handles in ``ticket.works`` | ``Ticket`` |
| landed | what follows the collectives comes now: on the lane's stream, or on the host, which has waited | ``Ticket`` |
| wait, waited | compute waits for a ticket, the first time; it goes on | ``Ticket`` |
| gather, use, unsharded | a gather is about to be issued, to be waited for; compute may use the weights | ``Unit`` |
| reshard | a unit's gathered weights are about to be released | ``Unit`` |
| refresh, refreshed | weights at rest are brought up to date with main weights | ``ParameterGroup`` |
| enter | backward has reached an output of a call | ``Call`` |
| reducing | the reduction of packed gradients was issued | ``GradientBuffer`` |
| closed | backward has what it wants of a unit in this pass | ``Unit`` |
| reduce, fold | reductions of a unit were issued; one is about to be waited for | ``Unit`` |
| finish | backward is through, but for what is still being reduced | ``Root`` |
| final, completed | sums are about to be reduced over the axes that are left; they are final | ``ParameterGroup`` |
| summing | an invariant sum is about to be written, and put together where it rests whole | ``DBuffer`` of the sum |
| backward | a backward that ends an accumulation is done | ``Root`` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Listener = Callable[[str, Any], None]

listeners: list[Listener] = []
"""Whoever listens; who would tell something for every gradient looks whether there is anybody first."""


def tell(action: str, subject: object) -> None:
    """Tell all listeners what happens to what."""
    # A copy, for one may stop to listen.
    for listener in (*listeners,):
        listener(action, subject)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call ``listener(action, subject)`` for every event of this process while the block runs."""
    listeners.append(listener)
    try:
        yield
    finally:
        # By identity: two listeners may compare equal. In place: others have the list itself.
        listeners[:] = [other for other in listeners if other is not listener]


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective as issued: its kind, the axis it ran over, and the bytes of the full (unsharded) side."""

    kind: str
    axis: str
    num_ranks: int
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """What a collective that is being issued does to memory, whichever way this machine has to do it."""

    kind: str
    group: dist.ProcessGroup
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]


@contextmanager
def observe_collectives(observer: Callable[[CollectiveCall], None]) -> Iterator[None]:
    """Call ``observer`` for every collective that the engine issues in this process while the block runs."""

    def hear(action: str, subject: Any) -> None:
        if action == "collective":
            observer(subject)

    with listen(hear):
        yield
