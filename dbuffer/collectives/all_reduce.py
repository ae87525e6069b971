"""Compute the sum, the average or the maximum over all ranks, for every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceCoalescedOptions

from dbuffer.collectives.gloo_messages import REDUCE_OPS, WorkThen, start, take_scratch
from dbuffer.collectives.parts import Part, alike, is_traced, travel_together
from dbuffer.collectives.waits import Works, begin, finish, waiters
from dbuffer.events import listeners
from dbuffer.mesh import MeshAxis


def all_reduce(tensor: torch.Tensor, axis: MeshAxis, op: str, works: Works = None) -> None:
    """Reduce ``tensor`` over the ranks of the axis, in place on all of them.

    Args:
        op: "sum", "avg" or "max". The maximum is NaN where any rank has NaN.
        works: when given, the call returns at once and appends its handle; the tensor must live until it completes.
    """
    if axis.size == 1:
        return
    if op == "max" and tensor.is_floating_point():
        _keep_nans(tensor, axis, works)
        return
    if type(tensor) is not torch.Tensor and is_traced(tensor):
        reduced = torch.ops._c10d_functional.all_reduce(tensor, op, axis.reduce_group.group_name)
        tensor.copy_(torch.ops._c10d_functional.wait_tensor(reduced))
        return
    group = axis.reduce_group
    told = begin("all_reduce", axis, group, (tensor,), (tensor,), (tensor,)) if listeners else None
    if tensor.is_cpu and axis.reduces_by_gloo:
        work = start(dist.all_reduce, tensor, op=REDUCE_OPS[op], group=group)
    else:
        is_async = works is not None or (waiters != [] and tensor.is_cpu)
        work = dist.all_reduce(tensor, op=REDUCE_OPS[op], group=group, async_op=is_async)
    finish(work, works, tensor, told)


def _keep_nans(tensor: torch.Tensor, axis: MeshAxis, works: Works) -> None:
    """Compute the maximum of floats as that of integers in the same order, because backends lose NaNs."""
    is_double = tensor.dtype is torch.float64
    wide = tensor if is_double else tensor.float()
    # Without its sign, NaN has the largest bits.
    unsigned = torch.where(wide.isnan(), wide.abs(), wide)
    bits = _mirrored(unsigned.view(torch.int64 if is_double else torch.int32))
    issued: Works = None if works is None else []
    all_reduce(bits, axis, "max", issued)

    def take() -> None:
        tensor.copy_(_mirrored(bits).view(wide.dtype))

    if issued:
        assert works is not None
        works.append(WorkThen(issued[0], take))
    else:
        take()


def _mirrored(bits: torch.Tensor) -> torch.Tensor:
    """Return the bits of floats as integers of the same order, and the reverse: negative floats have reversed bits."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def all_reduce_together(parts: Sequence[Part], works: Works = None) -> None:
    """Run ``all_reduce`` for each part's ``whole``. Parts along one axis and of one dtype share one collective.

    On gloo, tensors of more than 64 MiB in total are reduced one by one.
    """
    for together in alike(parts, lambda part: (_group(part), part.op, part.whole.dtype)):
        first, group = together[0], _group(together[0])
        by_gloo = group is not None and first.whole.is_cpu and first.axis.reduces_by_gloo
        if group is None or not travel_together(together, group, by_gloo=by_gloo):
            for part in together:
                all_reduce(part.whole, part.axis, part.op, works)
            continue
        wholes = [part.whole for part in together]
        told = begin("all_reduce", first.axis, group, wholes, wholes, wholes) if listeners else None
        if by_gloo:
            work: dist.Work | None = _all_reduce_by_message(wholes, first.axis, first.op)
        else:
            # As in ``all_gather_together``.
            options: Any = AllreduceCoalescedOptions()
            options.reduceOp = REDUCE_OPS[first.op]
            options.asyncOp = works is not None
            work = group.allreduce_coalesced(wholes, options)
        finish(work, works, wholes[0], told)


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


def start_maximum(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the element-wise maximum over the ranks of a group, in place and untold, and return its handle."""
    work: dist.Work = start(dist.all_reduce, tensor, op=dist.ReduceOp.MAX, group=group)
    return work


def _group(part: Part) -> dist.ProcessGroup | None:
    return part.axis.reduce_group if part.axis.size > 1 else None


def _all_reduce_by_message(tensors: Sequence[torch.Tensor], axis: MeshAxis, op: str) -> dist.Work:
    """Reduce several tensors of one dtype as one buffer, on gloo."""
    sizes = [tensor.numel() for tensor in tensors]
    num_bytes = sum(sizes) * tensors[0].itemsize
    scratch = take_scratch(num_bytes, tensors[0].device)
    whole = scratch[:num_bytes].view(tensors[0].dtype)
    torch.cat([tensor.view(-1) for tensor in tensors], out=whole)
    work = start(dist.all_reduce, whole, op=REDUCE_OPS[op], group=axis.reduce_group)

    def take_apart() -> None:
        for tensor, part in zip(tensors, whole.split(sizes), strict=True):
            tensor.view(-1).copy_(part)

    return WorkThen(work, take_apart, scratch)
