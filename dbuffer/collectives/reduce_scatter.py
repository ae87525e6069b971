"""Compute the sum over all ranks, of which each rank receives its shard.

If the sum has a wider dtype than the tensors that are sent, each rank adds up the received tensors, on any backend.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceScatterOptions

from dbuffer.collectives.gloo_messages import (
    REDUCE_OPS,
    Message,
    WorkThen,
    exchange,
    start,
    take_scratch,
)
from dbuffer.collectives.parts import COPIES, MOST_EXCHANGED_BYTES, Part, alike, copy, travel_together
from dbuffer.collectives.waits import Works, begin, finish, waiters
from dbuffer.events import listeners
from dbuffer.mesh import MeshAxis

# As in all_gather.py.
_HAS_SINGLE = hasattr(dist.ProcessGroup, "reduce_scatter_single")
_HAS_SINGLE_COALESCED = hasattr(dist.ProcessGroup, "reduce_scatter_single_coalesced")
_COALESCED = "reduce_scatter_single_coalesced" if _HAS_SINGLE_COALESCED else "reduce_scatter_tensor_coalesced"


def reduce_scatter(output: torch.Tensor, full: torch.Tensor, axis: MeshAxis, op: str, works: Works = None) -> None:
    """Reduce ``full`` over the ranks of the axis and keep this rank's slice in ``output``.

    Args:
        output: 1-D, ``full.numel() / axis.size`` elements; may be this rank's slice of ``full``. If its dtype is
            wider than ``full``'s, each rank computes the sum in that dtype itself. The result then does not depend on
            the backend's rounding or summation order.
        full: 1-D; its content outside ``output`` is undefined afterwards.
        op: "sum" or "avg".
        works: when given, the call returns at once and appends its handle; both tensors must live until it completes.
    """
    if axis.size == 1:
        copy(output, full)
        return
    group: Any = axis.reduce_group
    told = begin("reduce_scatter", axis, group, (full,), (full,), (full, output)) if listeners else None
    if output.dtype is not full.dtype or (full.is_cpu and axis.reduces_by_gloo):
        work = _reduce_by_all_to_all(output, full, axis, op)
    else:
        options: Any = ReduceScatterOptions()
        options.reduceOp = REDUCE_OPS[op]
        options.asyncOp = works is not None or (waiters != [] and output.is_cpu)
        source = full.clone() if COPIES else full
        work = (group.reduce_scatter_single if _HAS_SINGLE else group._reduce_scatter_base)(output, source, options)
    finish(work, works, output, told)


def reduce_scatter_together(parts: Sequence[Part], works: Works = None) -> None:
    """Run ``reduce_scatter`` for each part. Parts along one axis and with one operation share one collective.

    Backends other than gloo combine only parts of one dtype. On gloo, tensors of more than 64 MiB in total are reduced
    one by one.
    """
    for together in alike(parts, _key):
        first, group = together[0], _group(together[0])
        by_gloo, is_wide = group is not None and _is_by_gloo(first), _is_wide(first)
        if group is None or not travel_together(together, group, by_gloo=by_gloo, is_wide=is_wide):
            for part in together:
                reduce_scatter(part.shard, part.whole, part.axis, part.op, works)
            continue
        wholes, shards = [part.whole for part in together], [part.shard for part in together]
        told = begin("reduce_scatter", first.axis, group, wholes, wholes, [*wholes, *shards]) if listeners else None
        if by_gloo or is_wide:
            work: dist.Work | None = _reduce_by_message(together)
        else:
            # As in ``all_gather_together``.
            options: Any = ReduceScatterOptions()
            options.reduceOp = REDUCE_OPS[first.op]
            options.asyncOp = works is not None
            sources = [whole.clone() for whole in wholes] if COPIES else wholes
            work = getattr(group, _COALESCED)(shards, sources, options)
        finish(work, works, wholes[0], told)


def _key(part: Part) -> object:
    """Return what parts of one collective have in common."""
    group = _group(part)
    if group is not None and _is_by_gloo(part):
        return group, part.op
    return group, part.op, _is_wide(part), part.whole.dtype


def _group(part: Part) -> dist.ProcessGroup | None:
    return part.axis.reduce_group if part.axis.size > 1 else None


def _is_by_gloo(part: Part) -> bool:
    return part.whole.is_cpu and part.axis.reduces_by_gloo


def _is_wide(part: Part) -> bool:
    """Return whether the sum has a wider dtype than the tensors that are sent."""
    return part.shard.dtype is not part.whole.dtype


# ---------------------------------------------------------------- gloo, and sums of a wider dtype


def _reduce_by_all_to_all(output: torch.Tensor, full: torch.Tensor, axis: MeshAxis, op: str) -> dist.Work:
    """Send every other rank its slice, and sum the slices that arrive.

    This moves half the bytes of an all-reduce and needs a scratch buffer for the received slices. Larger buffers
    are reduced by all-reduce, as in gloo's own reduce-scatter, but in place and with a handle that can be polled:
    gloo's own copies the whole input first, and its handle ignores timeouts.
    """
    slices = full.view(axis.size, -1)
    mine = slices[axis.rank]
    if output.dtype is full.dtype and not 0 < full.nbytes <= MOST_EXCHANGED_BYTES:
        work = start(dist.all_reduce, full, op=REDUCE_OPS[op], group=axis.reduce_group)
        return WorkThen(work, functools.partial(copy, output, mine))
    # Between two ranks, each sends only the slice of the other one.
    sent = slices[1 - axis.rank] if axis.size == 2 else full
    scratch = take_scratch(sent.nbytes, full.device)
    received = scratch[: sent.nbytes]
    work = exchange(received, sent, axis, axis.reduce_group)
    others = received.view(full.dtype).view(-1, output.numel())
    return WorkThen(work, functools.partial(_add_up, output, mine, others, axis, op), scratch)


def _reduce_by_message(parts: Sequence[Part]) -> dist.Work:
    """Reduce-scatter several tensors by one exchange; they are summed as in ``_reduce_by_all_to_all``."""
    axis, op = parts[0].axis, parts[0].op
    slices = [part.whole.view(axis.size, -1) for part in parts]
    message = Message([rows[axis.rank] for rows in slices], axis)
    for part, place in zip(parts, message.places, strict=True):
        rows = part.whole.view(torch.uint8).view(axis.size, -1)
        for row, other in zip(message.leaving, message.others, strict=True):
            row[place].copy_(rows[other])

    def add_up() -> None:
        for part, rows, place in zip(parts, slices, message.places, strict=True):
            others = message.arriving[:, place].contiguous().view(part.whole.dtype)
            _add_up(part.shard, rows[axis.rank], others, axis, op)

    return message.send(axis.reduce_group, add_up)


def _add_up(output: torch.Tensor, mine: torch.Tensor, others: torch.Tensor, axis: MeshAxis, op: str) -> None:
    """Write the sum of this rank's slice and the other ranks' slices into ``output``.

    Args:
        others: (1, elements) from the only other rank, or (ranks, elements) from all; this rank's row is ignored.
        op: "sum", or "avg", which divides. If ``output`` has a wider dtype, the sum is in that dtype and in rank order.
    """
    terms = list(others) if len(others) != 1 else [others[0], others[0]]
    terms[axis.rank] = mine
    if output.dtype is not mine.dtype and output.is_cuda and len(others) > 1:
        # A single kernel launch for any number of ranks.
        others[axis.rank].copy_(mine)
        torch.sum(others, 0, dtype=output.dtype, out=output)
    elif output.dtype is not mine.dtype:
        output.copy_(terms[0])
        for term in terms[1:]:
            output.add_(term)
    else:
        copy(output, mine)
        for rank, term in enumerate(terms):
            if rank != axis.rank:
                output.add_(term)
    if op == "avg":
        output.div_(axis.size)
