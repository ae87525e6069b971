"""Events: the engine tells its listeners, in host order, what it does. Observers need no patches of the engine.

| action | told when | subject |
|---|---|---|
| collective | a collective is about to be issued | ``CollectiveCall`` |
| transfer, transferred | the memory effect of a collective, before and after it is issued | ``Transfer`` |
| allocated | a flat storage got memory of its own, first or again | ``FlatStorage`` |
| released | a storage is about to return its memory to the allocator | ``torch.UntypedStorage`` |
| exchanged | two storages have exchanged their memory | both storages |
| issue, issued | work starts on a lane; its collectives were issued, handles are in ``ticket.works`` | ``Ticket`` |
| landed | the work after the collectives starts: on the lane's stream, or on the host, which has waited | ``Ticket`` |
| wait, waited | the first time compute waits for a ticket: before and after the wait | ``Ticket`` |
| gather, use, unsharded | a gather is about to be issued; to be waited for; compute may use the weights | ``Unit`` |
| reshard | a unit's gathered weights are about to be released | ``Unit`` |
| refresh, refreshed | stale resting weights are updated from main weights: before and after | ``ParameterGroup`` |
| enter | backward has reached an output of a call | ``Call`` |
| reducing | the reduction of packed gradients was issued | ``GradientBuffer`` |
| closed | backward no longer needs a unit in this pass | ``Unit`` |
| reduce, fold | reductions of a unit were issued; one is about to be waited for | ``Unit`` |
| finish | backward has finished, except for pending reductions | ``Root`` |
| final, completed | gradients are about to be reduced over the remaining axes; they are final | ``ParameterGroup`` |
| summing | an invariant sum is about to be written and, for replicated gradients, gathered | ``DBuffer`` of the sum |
| backward | a backward that ends a gradient accumulation is done | ``Root`` |
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
"""Current listeners. Code that would tell an event for every gradient first checks that this list is not empty."""


def tell(action: str, subject: object) -> None:
    """Call every listener with an event."""
    # A copy, because a listener may unregister itself during the call.
    for listener in (*listeners,):
        listener(action, subject)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call ``listener(action, subject)`` for every event of this process while the block runs."""
    listeners.append(listener)
    try:
        yield
    finally:
        # By identity, because two listeners may compare equal. In place, because other modules import the list.
        listeners[:] = [other for other in listeners if other is not listener]


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One issued collective: its kind, its axis, its number of ranks, and the bytes of the full (unsharded) side."""

    kind: str
    axis: str
    num_ranks: int
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """The tensors that a collective reads and writes, independent of how the backend implements it."""

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
