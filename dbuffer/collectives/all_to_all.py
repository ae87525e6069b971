"""Send a different tensor from each rank to every other rank. The sizes may differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dbuffer.collectives.gloo_messages import start
from dbuffer.collectives.waits import Works, begin, finish, waiters
from dbuffer.events import listeners
from dbuffer.mesh import MeshAxis


def all_to_all(
    output: torch.Tensor,
    source: torch.Tensor,
    axis: MeshAxis,
    sizes: tuple[Sequence[int], Sequence[int]],
    works: Works = None,
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
    group = axis.reduce_group
    received, sent = ([size * output.element_size() for size in each] for each in sizes)
    told = begin("all_to_all", axis, group, (output,), (source,), (output,)) if listeners else None
    parts = output.view(torch.uint8), source.view(torch.uint8)
    splits = {"output_split_sizes": received, "input_split_sizes": sent}
    if output.is_cpu and axis.reduces_by_gloo:
        work: dist.Work | None = start(dist.all_to_all_single, *parts, group=group, **splits)
    else:
        is_async = works is not None or (waiters != [] and output.is_cpu)
        work = dist.all_to_all_single(*parts, group=group, async_op=is_async, **splits)
    finish(work, works, output, told)


def all_to_all_tensors(
    received: Sequence[torch.Tensor],
    sent: Sequence[torch.Tensor],
    axis: MeshAxis,
    works: Works = None,
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
        started = _one_rank_at_a_time(received, sent, axis)
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


def _one_rank_at_a_time(
    received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], axis: MeshAxis
) -> list[dist.Work]:
    """Exchange tensors with one other rank at a time, because gloo has no all-to-all of lists."""
    works = []
    for step in range(1, axis.size):
        target, source = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
        output, leaving = received[source].view(torch.uint8), sent[target].view(torch.uint8)
        sizes = {
            "output_split_sizes": [output.numel() * (rank == source) for rank in range(axis.size)],
            "input_split_sizes": [leaving.numel() * (rank == target) for rank in range(axis.size)],
        }
        works.append(start(dist.all_to_all_single, output, leaving, group=axis.reduce_group, **sizes))
    return works
