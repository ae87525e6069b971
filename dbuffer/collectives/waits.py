"""Wait for issued collectives, and tell listeners which collectives are issued."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from dbuffer.collectives.gloo_messages import WorkThen
from dbuffer.events import CollectiveCall, Transfer, tell
from dbuffer.mesh import MeshAxis
from dbuffer.whereabouts import SOON, wait_longer

Works = list[dist.Work] | None
"""Where an asynchronous collective appends its handle; None for a collective that is waited for."""

waiters: list[Callable[[dist.Work], None]] = []
"""Functions that wait for collectives on CPU tensors (``wait_with``). The last one is used; empty: wait normally."""


def wait_for(work: dist.Work, written: torch.Tensor | None = None) -> None:
    """Wait for a collective, with the innermost ``wait_with`` function if one is set.

    Args:
        written: the tensor that the collective writes; None: CPU memory. On a GPU, waiting only orders streams. No
            wait function is called then: it would need timed waits, which block the host, and NCCL aborts the
            communicator when a timed wait expires.
    """
    if written is not None and not written.is_cpu:
        work.wait()
    elif waiters:
        waiters[-1](work)
    elif type(work) not in (dist.Work, WorkThen):
        # A user's own handle may not accept a timeout.
        work.wait()
    else:
        try:
            work.wait(SOON)
        except RuntimeError:
            wait_longer(work)


@contextmanager
def wait_with(waiter: Callable[[dist.Work], None]) -> Iterator[None]:
    """Use ``waiter`` to wait for all collectives on CPU tensors while the block runs."""
    waiters.append(waiter)
    try:
        yield
    finally:
        waiters[:] = [other for other in waiters if other is not waiter]


def begin(
    kind: str,
    axis: MeshAxis,
    group: dist.ProcessGroup,
    wholes: Sequence[torch.Tensor],
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
) -> Transfer:
    """Tell listeners which collective is about to be issued; ``finish`` tells them that it was issued."""
    transfer = Transfer(kind, group, tuple(reads), tuple(writes))
    tell("collective", CollectiveCall(kind, axis.name, axis.size, sum(whole.nbytes for whole in wholes)))
    tell("transfer", transfer)
    return transfer


def finish(work: dist.Work | None, works: Works, written: torch.Tensor, told: Transfer | None = None) -> None:
    """Wait for an issued collective, or append its handle to ``works``. ``work`` is None if it already completed."""
    if work is not None and works is not None:
        works.append(work)
    elif work is not None:
        wait_for(work, written)
    if told is not None:
        tell("transferred", told)
