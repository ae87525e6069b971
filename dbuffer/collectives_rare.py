"""Collectives outside a ZeRO-3 step: all-to-all with unequal sizes, broadcast, and small reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dbuffer import gloo
from dbuffer.collectives import all_reduce, begin, finish, waiters
from dbuffer.events import listeners
from dbuffer.mesh import MeshAxis


def exchange(
    received: Sequence[torch.Tensor],
    sent: Sequence[torch.Tensor],
    axis: MeshAxis,
    works: list[dist.Work] | None = None,
) -> None:
    """Send one tensor to every other rank of the axis and receive one from each, without staging copies.

    Args:
        received, sent: contiguous tensors of any sizes, one per rank in rank order. This rank's own entry is untouched.
        works: when given, the call returns at once and appends handles; all tensors must live until these complete.
    """
    if axis.size == 1:
        return
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    reads, writes = ([each[rank] for rank in others] for each in (sent, received))
    told = begin("all_to_all", axis, axis.reduce_group, sent, reads, writes) if listeners else None
    if sent[0].is_cpu and axis.reduces_by_gloo:
        started = gloo.exchange_each(received, sent, axis)
    else:
        outputs, inputs = (
            [tensor[: tensor.numel() * (rank != axis.rank)] for rank, tensor in enumerate(each)]
            for each in (received, sent)
        )
        work: dist.Work | None = dist.all_to_all(outputs, inputs, group=axis.reduce_group, async_op=works is not None)
        started = [] if work is None else [work]
    for each in started:
        finish(each, works, writes[0])
    finish(None, works, writes[0], told)


def all_to_all(
    output: torch.Tensor,
    source: torch.Tensor,
    axis: MeshAxis,
    sizes: tuple[Sequence[int], Sequence[int]],
    works: list[dist.Work] | None = None,
) -> None:
    """Send a part of ``source`` to every rank of the axis and receive a part from each. Sizes may differ or be zero.

    Args:
        output, source: 1-D, of one dtype; the parts from and for each rank follow one another in rank order.
        sizes: the numbers of elements received from each rank, and sent to each rank. Every rank passes its own.
        works: when given, the call returns at once and appends its handle; both tensors must live until it completes.
    """
    if axis.size == 1:
        output.copy_(source)
        return
    received, sent = ([size * output.element_size() for size in each] for each in sizes)
    told = begin("all_to_all", axis, axis.reduce_group, (output,), (source,), (output,)) if listeners else None
    parts = output.view(torch.uint8), source.view(torch.uint8)
    splits = {"output_split_sizes": received, "input_split_sizes": sent}
    by_gloo, waits = axis.reduces_by_gloo, works is None
    work = _start(dist.all_to_all_single, *parts, group=axis.reduce_group, by_gloo=by_gloo, waits=waits, **splits)
    finish(work, works, output, told)


def broadcast(tensor: torch.Tensor, axis: MeshAxis, source: int = 0) -> None:
    """Copy ``tensor`` from the rank at position ``source`` of the axis to all others, in place."""
    if axis.size == 1:
        return
    group, by_gloo = axis.gather_group, axis.gathers_by_gloo
    told = begin("broadcast", axis, group, (tensor,), (tensor,), (tensor,)) if listeners else None
    work = _start(dist.broadcast, tensor, group=group, by_gloo=by_gloo, waits=True, group_src=source)
    finish(work, None, tensor, told)


@contextmanager
def wait_with(waiter: Callable[[dist.Work], None]) -> Iterator[None]:
    """Use ``waiter`` to wait for all collectives on CPU tensors while the block runs."""
    waiters.append(waiter)
    try:
        yield
    finally:
        waiters[:] = [other for other in waiters if other is not waiter]


def start_gather_untold(output: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start an all-gather of status values on CPUs, without telling listeners, and return its handle."""
    work: dist.Work = gloo.start(gloo.gather_flat, output, mine, group=group)
    return work


def start_maximum(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the element-wise maximum over the ranks of a group, in place, and return its handle."""
    work: dist.Work = gloo.start(dist.all_reduce, tensor, op=dist.ReduceOp.MAX, group=group)
    return work


def _start(
    collective: Callable[..., Any],
    *tensors: torch.Tensor,
    group: dist.ProcessGroup,
    by_gloo: bool,
    waits: bool,
    **options: Any,
) -> dist.Work | None:
    """Issue a collective: asynchronously on gloo or when a wait function is set, otherwise as ``waits`` says."""
    on_cpu = tensors[0].is_cpu
    if on_cpu and by_gloo:
        work: dist.Work | None = gloo.start(collective, *tensors, group=group, **options)
    else:
        work = collective(*tensors, group=group, async_op=not waits or (bool(waiters) and on_cpu), **options)
    return work


def reduce_numbers(numbers: Iterable[tuple[Sequence[MeshAxis], torch.Tensor]], op: str) -> list[torch.Tensor]:
    """Return 0-d tensors of one dtype, each reduced over its own axes, with one collective for each set of axes.

    Every rank must call this with numbers over the same axes in the same order.
    """
    found = list(numbers)
    places: dict[tuple[int, ...], list[int]] = {}
    for place, (axes, _) in enumerate(found):
        places.setdefault(tuple(id(axis.gather_group) for axis in axes), []).append(place)
    results = [number for _, number in found]
    for same in places.values():
        axes, first = found[same[0]]
        stacked = torch.stack([results[place].to(first.device) for place in same])
        for axis in axes:
            all_reduce(stacked, axis, op)
        for place, number in zip(same, stacked.unbind(), strict=True):
            results[place] = number
    return results
