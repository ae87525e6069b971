"""Gather the shards of all ranks on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from dbuffer.collectives.gloo_messages import Message, exchange, gather_flat, start
from dbuffer.collectives.parts import COPIES, Part, alike, coalesces, copy, is_traced, travel_together
from dbuffer.collectives.waits import Works, begin, finish, waiters
from dbuffer.events import listeners
from dbuffer.mesh import MeshAxis

# torch 2.13 renames the methods of process groups and warns on the old names; torch 2.11 has only the old names.
# Calling the second one costs 10 us of host time for two tensors. PyTorch's private ``_coalescing_manager`` ends in the
# same method and costs 50 us.
_HAS_SINGLE = hasattr(dist.ProcessGroup, "all_gather_single")
_HAS_SINGLE_COALESCED = hasattr(dist.ProcessGroup, "all_gather_single_coalesced")
_COALESCED = "all_gather_single_coalesced" if _HAS_SINGLE_COALESCED else "allgather_into_tensor_coalesced"

# Private in every version of PyTorch, but FSDP2 and Megatron use it too. Needed for broadcasts: no process group
# method combines them.
_coalescing: Callable[..., Any] = dist._coalescing_manager  # type: ignore[attr-defined]


def all_gather(output: torch.Tensor, shard: torch.Tensor, axis: MeshAxis, works: Works = None) -> None:
    """Fill ``output`` (1-D, ``axis.size * shard.numel()`` elements) with every rank's shard, in rank order.

    Args:
        shard: 1-D, this rank's part; may be its slice of ``output``.
        works: when given, the call returns at once and appends its handle; both tensors must live until it completes.
    """
    if axis.size == 1:
        copy(output, shard)
        return
    if type(shard) is not torch.Tensor and is_traced(shard):
        whole = torch.ops._c10d_functional.all_gather_into_tensor(shard, axis.size, axis.gather_group.group_name)
        output.copy_(torch.ops._c10d_functional.wait_tensor(whole))
        return
    if output.dtype.is_complex:
        output, shard = torch.view_as_real(output).view(-1), torch.view_as_real(shard).view(-1)
    group: Any = axis.gather_group
    told = begin("all_gather", axis, group, (output,), (shard,), (output,)) if listeners else None
    if output.is_cpu and axis.gathers_by_gloo:
        work = _gather_by_gloo(output, shard, axis)
    else:
        options = AllgatherOptions()
        options.asyncOp = works is not None or (waiters != [] and output.is_cpu)
        source = shard.clone() if COPIES else shard
        work = (group.all_gather_single if _HAS_SINGLE else group._allgather_base)(output, source, options)
    finish(work, works, output, told)


def all_gather_together(parts: Sequence[Part], works: Works = None) -> None:
    """Run ``all_gather`` for each part. Parts along one axis share one collective, whatever their dtypes.

    On gloo, tensors of more than 64 MiB in total are gathered one by one.
    """
    for together in alike(parts, _group):
        first, group = together[0], _group(together[0])
        by_gloo = group is not None and _is_by_gloo(first)
        if group is None or not travel_together(together, group, by_gloo=by_gloo):
            for part in together:
                all_gather(part.whole, part.shard, part.axis, works)
            continue
        wholes, shards = [part.whole for part in together], [part.shard for part in together]
        told = begin("all_gather", first.axis, group, wholes, shards, wholes) if listeners else None
        if by_gloo:
            work: dist.Work | None = _gather_by_message(together)
        else:
            # A synchronous call makes torch order the current stream after the collective; its handle reports
            # completion.
            work = _gather_coalesced(group, wholes, shards, is_async=works is not None)
        finish(work, works, wholes[0], told)


def all_gather_uneven(parts: Sequence[torch.Tensor], axis: MeshAxis, works: Works = None) -> None:
    """Gather shards of unequal size: receive every other rank's tensor in ``parts``.

    Each part is broadcast once from its owner. All broadcasts share one group call where the backend supports it, as
    NCCL does.

    Args:
        parts: contiguous tensors, one per rank of the axis, of any sizes including zero. Every rank passes all of
            them; ``parts[axis.rank]`` is sent, the others are written.
        works: as in ``all_gather``; nothing is appended where the backend issues one group call.
    """
    if axis.size == 1:
        return
    group, mine = axis.gather_group, parts[axis.rank]
    # Sent as bytes, because not every backend sends every dtype.
    owned = [(rank, part.view(-1).view(torch.uint8)) for rank, part in enumerate(parts) if part.numel()]
    wholes = [part for _, part in owned]
    told = begin("all_gather", axis, group, wholes, (mine,), wholes) if listeners else None
    if owned and not mine.is_cpu and coalesces(group, mine.device):
        with _coalescing(group=group, async_ops=False):
            for rank, part in owned:
                dist.broadcast(part, group=group, group_src=rank)
    else:
        issued = [dist.broadcast(part, group=group, group_src=rank, async_op=True) for rank, part in owned]
        for work, part in zip(issued, wholes, strict=True):
            finish(work, works, part)
    finish(None, None, mine, told)


def start_status_gather(output: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start an all-gather of status values on CPUs, without telling listeners, and return its handle."""
    work: dist.Work = start(gather_flat, output, mine, group=group)
    return work


def _group(part: Part) -> dist.ProcessGroup | None:
    return part.axis.gather_group if part.axis.size > 1 else None


def _is_by_gloo(part: Part) -> bool:
    return part.whole.is_cpu and part.axis.gathers_by_gloo


def _gather_coalesced(
    group: Any, wholes: list[torch.Tensor], shards: list[torch.Tensor], *, is_async: bool
) -> dist.Work | None:
    options = AllgatherOptions()
    options.asyncOp = is_async
    sources = [shard.clone() for shard in shards] if COPIES else shards
    if any(whole.dtype is not wholes[0].dtype for whole in wholes):
        # Viewed as bytes only when dtypes differ, because the views cost 20 us of host time.
        wholes, sources = ([tensor.view(torch.uint8) for tensor in tensors] for tensors in (wholes, sources))
    work: dist.Work | None = getattr(group, _COALESCED)(wholes, sources, options)
    return work


# ---------------------------------------------------------------- gloo


def _gather_by_gloo(output: torch.Tensor, shard: torch.Tensor, axis: MeshAxis) -> dist.Work:
    """Gather by gloo, or by an exchange between two ranks, which avoids gloo's copies of the whole output."""
    if axis.size != 2 or not output.nbytes:
        return start_status_gather(output, shard, axis.gather_group)
    slices = output.view(2, -1)
    copy(slices[axis.rank], shard)
    return exchange(slices[1 - axis.rank], shard, axis, axis.gather_group)


def _gather_by_message(parts: Sequence[Part]) -> dist.Work:
    """Gather several tensors by one exchange; each rank's message holds all of its shards."""
    axis = parts[0].axis
    message = Message([part.shard for part in parts], axis)
    for part, place in zip(parts, message.places, strict=True):
        copy(part.whole.view(axis.size, -1)[axis.rank], part.shard)
        message.leaving[:, place] = part.shard.view(torch.uint8)

    def sort() -> None:
        for part, place in zip(parts, message.places, strict=True):
            rows = part.whole.view(torch.uint8).view(axis.size, -1)
            for row, other in zip(message.arriving, message.others, strict=True):
                if other != axis.rank:
                    rows[other].copy_(row[place])

    return message.send(axis.gather_group, sort)
