"""Combined collectives: several tensors along one axis travel in one message."""

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

# Private in every version of PyTorch, but FSDP2 and Megatron use it too. Needed for broadcasts: no process group
# method combines them.
_coalescing: Callable[..., Any] = dist._coalescing_manager  # type: ignore[attr-defined]

# torch 2.13 renames both methods of process groups; torch 2.11 has only the old names. Calling them costs 10 us of host
# time for two tensors. PyTorch's private ``_coalescing_manager`` ends in the same methods and costs 50 us.
_HAS_SINGLE = hasattr(dist.ProcessGroup, "all_gather_single_coalesced")
_GATHER_METHOD = "all_gather_single_coalesced" if _HAS_SINGLE else "allgather_into_tensor_coalesced"
_REDUCE_METHOD = "reduce_scatter_single_coalesced" if _HAS_SINGLE else "reduce_scatter_tensor_coalesced"


def gather_together(parts: Sequence[Part], works: Works = None) -> None:
    """Run ``all_gather`` for each part. Parts along one axis share one collective, whatever their dtypes.

    On gloo, tensors of more than 64 MiB in total are gathered one by one: there a copy costs more than a message.
    """
    _together(_GATHER, parts, works)


def reduce_together(parts: Sequence[Part], works: Works = None) -> None:
    """Run ``reduce_scatter`` for each part. Parts along one axis and with one operation share one collective.

    Backends other than gloo combine only parts of one dtype. On gloo, tensors of more than 64 MiB in total are reduced
    one by one.
    """
    _together(_REDUCE, parts, works)


def all_reduce_together(parts: Sequence[Part], works: Works = None) -> None:
    """Run ``all_reduce`` for each part's ``whole``. Parts along one axis and of one dtype share one collective."""
    _together(_ALL_REDUCE, parts, works)


def gather_uneven(parts: Sequence[torch.Tensor], axis: MeshAxis, works: Works = None) -> None:
    """All-gather shards of unequal size: receive every other rank's tensor in ``parts``.

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
    """One kind of collective over parts.

    Attributes:
        alone: issues it for one part. message: issues it for several parts as one gloo message.
        launch: issues it for several parts as one launch on another backend: (group, parts, is_async) -> handle.
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
        # Viewed as bytes only when dtypes differ, because the views cost 20 us of host time.
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
        # A synchronous call makes torch order the current stream after the collective; its handle reports completion.
        finish(kind.launch(group, alike, works is not None), works, wholes[0], told)


def _alike(kind: _Kind, parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield lists of parts that can share one collective, in the order of each list's first part."""
    found: dict[object, list[Part]] = {}
    for part in parts:
        group = kind.group(part.axis) if part.axis.size > 1 else None
        mixes = kind is _GATHER or (kind is _REDUCE and group is not None and kind.is_by_gloo(part))
        key = None if mixes else (_is_wide(kind, part), part.whole.dtype)
        found.setdefault((group, part.op, key), []).append(part)
    yield from found.values()


def _is_wide(kind: _Kind, part: Part) -> bool:
    """Return whether a reduction sums in a wider dtype than it sends."""
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
    """Return whether a group's backend can issue several collectives as one."""
    known = _COALESCES.get(group)
    if known is None:
        try:
            known = bool(group._get_backend(device).supports_coalescing)
        except RuntimeError:
            # A process group written in Python has no backends; it implements the methods itself.
            known = True
        _COALESCES[group] = known
    return known
