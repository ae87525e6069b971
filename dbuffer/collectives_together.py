"""Collectives of several tensors at once: those along one axis travel in one message."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceCoalescedOptions, ReduceScatterOptions

from dbuffer.collectives import Part, all_gather, all_reduce, begin, finish, is_traced, reduce_scatter
from dbuffer.events import listeners
from dbuffer.gloo import (
    MOST_EXCHANGED_BYTES,
    REDUCE_OPS,
    all_reduce_by_message,
    gather_by_message,
    reduce_by_message,
)
from dbuffer.mesh import MeshAxis
from dbuffer_kernels.switches import is_off

Works = list[dist.Work] | None

# Private in every version, and what FSDP2 and Megatron use. For broadcasts, which no method issues together.
_coalescing: Callable[..., Any] = dist._coalescing_manager  # type: ignore[attr-defined]

# torch 2.13 renames both methods of process groups; torch 2.11 has only the old names. Calling them takes 10 us
# of the host for two tensors; PyTorch's private ``_coalescing_manager``, which ends in them, takes 50.
_HAS_SINGLE = hasattr(dist.ProcessGroup, "all_gather_single_coalesced")
_GATHER_METHOD = "all_gather_single_coalesced" if _HAS_SINGLE else "allgather_into_tensor_coalesced"
_REDUCE_METHOD = "reduce_scatter_single_coalesced" if _HAS_SINGLE else "reduce_scatter_tensor_coalesced"


def gather_together(parts: Sequence[Part], works: Works = None) -> None:
    """Do ``all_gather`` for each part: those along one axis in one collective, whatever their dtypes.

    On gloo tensors of more than 64 MiB in all go one by one: there a copy costs more than a message.
    """
    _together(_GATHER, parts, works)


def reduce_together(parts: Sequence[Part], works: Works = None) -> None:
    """Do ``reduce_scatter`` for each part: those along one axis, with one operation, in one collective.

    Backends other than gloo reduce one dtype at a time. On gloo tensors of more than 64 MiB in all go one by one.
    """
    _together(_REDUCE, parts, works)


def all_reduce_together(parts: Sequence[Part], works: Works = None) -> None:
    """Do ``all_reduce`` for each part's ``whole``: those along one axis, of one dtype, in one collective."""
    _together(_ALL_REDUCE, parts, works)


def gather_uneven(parts: Sequence[torch.Tensor], axis: MeshAxis, works: Works = None) -> None:
    """Fill in the parts of the other ranks of the axis: each part comes from the rank at its position.

    Moves each part to each rank once, and nothing else: broadcasts from the owners, in one group call where the
    backend has one (NCCL).

    Args:
        parts: contiguous, one for each rank, of any sizes, zero included; every rank knows them all.
        works: as in ``all_gather``; nothing is appended where the backend issues one group call.
    """
    if axis.size == 1:
        return
    group, mine = axis.gather_group, parts[axis.rank]
    # As bytes, because not every backend sends every dtype.
    owned = [(rank, part.view(-1).view(torch.uint8)) for rank, part in enumerate(parts) if part.numel()]
    wholes = [part for _, part in owned]
    told = begin("all_gather", axis, group, wholes, (mine,), wholes) if listeners else None
    if owned and not mine.is_cpu and _coalesces(group, mine.device):
        with _coalescing(group=group, async_ops=False):
            for rank, part in owned:
                dist.broadcast(part, group=group, group_src=rank)
    else:
        issued = [dist.broadcast(part, group=group, group_src=rank, async_op=True) for rank, part in owned]
        for work, part in zip(issued, wholes, strict=True):
            finish(work, works, part)
    finish(None, None, mine, told)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A collective of parts.

    Attributes:
        alone: issues it for one part. message: for several, as one message of gloo's.
        launch: for several, as one launch of another backend: (group, parts, is_async) -> handle.
    """

    name: str
    alone: Callable[[Part, Works], None]
    message: Callable[[Sequence[Part]], dist.Work]
    launch: Callable[[Any, Sequence[Part], bool], dist.Work | None]

    def group(self, axis: MeshAxis) -> dist.ProcessGroup:
        return axis.gather_group if self is _GATHER else axis.reduce_group

    def is_by_gloo(self, part: Part) -> bool:
        by_gloo = part.axis.gathers_by_gloo if self is _GATHER else part.axis.reduces_by_gloo
        return part.whole.is_cpu and by_gloo


def _pairs(parts: Sequence[Part]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(part.whole, part.shard) for part in parts]


def _source(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if is_off("in-place") else tensor


def _launch_gathers(group: Any, parts: Sequence[Part], is_async: bool) -> dist.Work | None:
    options = AllgatherOptions()
    options.asyncOp = is_async
    wholes, shards = [part.whole for part in parts], [_source(part.shard) for part in parts]
    if any(whole.dtype is not wholes[0].dtype for whole in wholes):
        # As bytes; views of all parts take 20 us of the host.
        wholes, shards = ([tensor.view(torch.uint8) for tensor in tensors] for tensors in (wholes, shards))
    work: dist.Work | None = getattr(group, _GATHER_METHOD)(wholes, shards, options)
    return work


def _launch_reductions(group: Any, parts: Sequence[Part], is_async: bool) -> dist.Work | None:
    options: Any = ReduceScatterOptions()
    options.reduceOp = REDUCE_OPS[parts[0].op]
    options.asyncOp = is_async
    shards, wholes = [part.shard for part in parts], [_source(part.whole) for part in parts]
    work: dist.Work | None = getattr(group, _REDUCE_METHOD)(shards, wholes, options)
    return work


def _launch_all_reductions(group: Any, parts: Sequence[Part], is_async: bool) -> dist.Work | None:
    options: Any = AllreduceCoalescedOptions()
    options.reduceOp = REDUCE_OPS[parts[0].op]
    options.asyncOp = is_async
    work: dist.Work | None = group.allreduce_coalesced([part.whole for part in parts], options)
    return work


_GATHER = _Kind(
    "all_gather",
    lambda part, works: all_gather(part.whole, part.shard, part.axis, works),
    lambda parts: gather_by_message(_pairs(parts), parts[0].axis),
    _launch_gathers,
)
_REDUCE = _Kind(
    "reduce_scatter",
    lambda part, works: reduce_scatter(part.shard, part.whole, part.axis, part.op, works),
    lambda parts: reduce_by_message(_pairs(parts), parts[0].axis, parts[0].op),
    _launch_reductions,
)
_ALL_REDUCE = _Kind(
    "all_reduce",
    lambda part, works: all_reduce(part.whole, part.axis, part.op, works),
    lambda parts: all_reduce_by_message([part.whole for part in parts], parts[0].axis, parts[0].op),
    _launch_all_reductions,
)


def _together(kind: _Kind, parts: Sequence[Part], works: Works) -> None:
    for alike in _alike(kind, parts):
        if not _travel_together(kind, alike):
            for part in alike:
                kind.alone(part, works)
            continue
        axis, wholes, shards = alike[0].axis, [part.whole for part in alike], [part.shard for part in alike]
        group = kind.group(axis)
        told = None
        if listeners:
            reads = shards if kind is _GATHER else wholes
            writes = [*wholes, *shards] if kind is _REDUCE else wholes
            told = begin(kind.name, axis, group, wholes, reads, writes)
        if _is_wide(kind, alike[0]) or kind.is_by_gloo(alike[0]):
            finish(kind.message(alike), works, wholes[0], told)
            continue
        # torch's own functions let a call that is not asynchronous order the current stream; the handle then says so.
        finish(kind.launch(group, alike, works is not None), works, wholes[0], told)


def _alike(kind: _Kind, parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield the parts that can travel together, in the order of the first of each."""
    found: dict[object, list[Part]] = {}
    for part in parts:
        group = kind.group(part.axis) if part.axis.size > 1 else None
        mixes = kind is _GATHER or (kind is _REDUCE and group is not None and kind.is_by_gloo(part))
        key = None if mixes else (_is_wide(kind, part), part.whole.dtype)
        found.setdefault((group, part.op, key), []).append(part)
    yield from found.values()


def _is_wide(kind: _Kind, part: Part) -> bool:
    """Whether a reduction adds up in a wider dtype than travels."""
    return kind is _REDUCE and part.shard.dtype is not part.whole.dtype


def _travel_together(kind: _Kind, parts: Sequence[Part]) -> bool:
    first = parts[0]
    if len(parts) == 1 or first.axis.size == 1 or is_traced(first.shard) or is_off("together"):
        return False
    if _is_wide(kind, first):
        return True
    if kind.is_by_gloo(first):
        return 0 < sum(part.whole.nbytes for part in parts) <= MOST_EXCHANGED_BYTES
    return _coalesces(kind.group(first.axis), first.whole.device)


_COALESCES: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()


def _coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group issues several collectives as one."""
    known = _COALESCES.get(group)
    if known is None:
        try:
            known = bool(group._get_backend(device).supports_coalescing)
        except RuntimeError:
            # A group written in Python, which has no backends but methods of its own.
            known = True
        _COALESCES[group] = known
    return known
