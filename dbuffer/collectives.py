"""The one file that spells PyTorch's collectives.

Every function works in place where the input is this rank's slice of the output, issues nothing on an axis of one
rank, and either completes in stream order or, given ``works``, appends a handle to wait for. Issue order on a
communicator must be the same on every rank; callers own that (docs/design/order.md)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from dbuffer.events import listen, listeners, tell
from dbuffer.gloo import (
    _MOST_EXCHANGED_BYTES,
    _all_reduce_by_message,
    _finish,
    _gather_by_message,
    _gather_from_other,
    _is_gloo,
    _reduce_by_exchange,
    _reduce_by_message,
    _reduce_in_place,
    _reduce_op,
    _same_memory,
    _start,
)
from dbuffer.mesh import MeshAxis
from dbuffer_kernels.switches import is_off

__all__ = [
    "CollectiveCall",
    "Part",
    "Transfer",
    "all_gather",
    "all_reduce",
    "all_reduce_together",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather_together",
    "observe_collectives",
    "reduce_scatter",
    "reduce_together",
    "start_maximum",
]

# torch 2.13 renames these two and warns on the old names; torch 2.11 has only the old names.
_all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_HAS_SINGLE = hasattr(dist.ProcessGroup, "all_gather_single")

# Private in every version, and what FSDP2 and Megatron use.
_coalescing: Callable[..., Any] = dist._coalescing_manager  # type: ignore[attr-defined]

_reduce_scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective as issued: its kind, the axis it ran over, and the bytes of the full (unsharded) side."""

    kind: str
    axis: str
    num_ranks: int
    num_bytes: int


@contextmanager
def observe_collectives(observer: Callable[[CollectiveCall], None]) -> Iterator[None]:
    """Call ``observer`` for every collective that this process issues through this file while the block runs."""

    def hear(action: str, subject: Any) -> None:
        if action == "collective":
            observer(subject)

    with listen(hear):
        yield


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """What a collective that is being issued does to memory, whichever way this machine has to do it."""

    kind: str
    group: dist.ProcessGroup
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One of several tensors that are gathered, or reduced and scattered, together.

    Attributes:
        axis: along which. whole: 1-D, ``axis.size`` shards in rank order. shard: 1-D; may be this rank's slice of it.
        op: of a reduction, "sum" or "avg".
    """

    axis: MeshAxis
    whole: torch.Tensor
    shard: torch.Tensor
    op: str = ""


def _told(
    kind: str, axis: MeshAxis, full: torch.Tensor, group: dist.ProcessGroup, reads: torch.Tensor, *writes: torch.Tensor
) -> Transfer:
    return _told_of(kind, axis, (full,), Transfer(kind, group, (reads,), writes))


def _told_of(kind: str, axis: MeshAxis, wholes: Iterable[torch.Tensor], transfer: Transfer) -> Transfer:
    """Tell what is about to be issued; the caller tells when it was."""
    tell("collective", CollectiveCall(kind, axis.name, axis.size, sum(whole.nbytes for whole in wholes)))
    tell("transfer", transfer)
    return transfer


def _is_traced(tensor: torch.Tensor) -> bool:
    """Whether a compiler looks on, which has to see a function instead of something that happens to memory."""
    return type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter)


def _traced(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return result


def _issue_gather(output: torch.Tensor, source: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool) -> Any:
    """Do what ``dist.all_gather_single`` does with plain tensors of members of a group."""
    options = AllgatherOptions()
    options.asyncOp = async_op
    if output.dtype.is_complex:
        output, source = torch.view_as_real(output), torch.view_as_real(source)
    any_group: Any = group
    if _HAS_SINGLE:
        return any_group.all_gather_single(output, source, options)
    return any_group._allgather_base(output, source, options)


def _issue_reduction(
    output: torch.Tensor, source: torch.Tensor, *, op: Any, group: dist.ProcessGroup, async_op: bool
) -> Any:
    """Do what ``dist.reduce_scatter_single`` does with plain tensors of members of a group."""
    options = ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = async_op
    any_group: Any = group
    if _HAS_SINGLE:
        return any_group.reduce_scatter_single(output, source, options)
    return any_group._reduce_scatter_base(output, source, options)


def all_gather(output: torch.Tensor, shard: torch.Tensor, axis: MeshAxis, works: list[dist.Work] | None = None) -> None:
    """Fill ``output`` (1-D, ``axis.size * shard.numel()`` elements) with every rank's shard, in rank order.

    Args:
        shard: 1-D, this rank's part; may be its slice of ``output``.
        works: when given, the call returns at once and its handle is appended; both tensors must live until then.
    """
    if axis.size == 1:
        if not _same_memory(output, shard):
            output.copy_(shard)
        return
    if _is_traced(shard):
        whole = torch.ops._c10d_functional.all_gather_into_tensor(shard, axis.size, axis.gather_group.group_name)
        output.copy_(_traced(whole))
        return
    told = _told("all_gather", axis, output, axis.gather_group, shard, output) if listeners else None
    if axis.size == 2 and output.is_cpu and output.nbytes and _is_gloo(axis.gather_group):
        _finish(_gather_from_other(output, shard, axis), works)
    else:
        source = shard.clone() if is_off("in-place") else shard
        _finish(_start(_issue_gather, output, source, group=axis.gather_group, waits=works is None), works)
    if told is not None:
        tell("transferred", told)


def reduce_scatter(
    output: torch.Tensor, full: torch.Tensor, axis: MeshAxis, op: str, works: list[dist.Work] | None = None
) -> None:
    """Reduce ``full`` over the ranks of the axis and keep this rank's slice in ``output``.

    Args:
        output: 1-D, ``full.numel() / axis.size`` elements; may be this rank's slice of ``full``. Of a wider dtype the
            sum is made in that, by each rank for itself: no rounding, and no order, of the backend's.
        full: 1-D; its content outside ``output`` is undefined afterwards.
        op: "sum" or "avg".
    """
    if axis.size == 1:
        if not _same_memory(output, full):
            output.copy_(full)
        return
    group = axis.reduce_group
    # The content of all of ``full`` is undefined afterwards.
    told = _told("reduce_scatter", axis, full, group, full, full, output) if listeners else None
    if output.dtype is not full.dtype:
        _finish(_reduce_by_exchange(full, output, axis, op), works)
    elif full.is_cpu and _is_gloo(group):
        is_small = 0 < full.nbytes <= _MOST_EXCHANGED_BYTES
        _finish((_reduce_by_exchange if is_small else _reduce_in_place)(full, output, axis, op), works)
    else:
        reduce_op, waits = _reduce_op(op), works is None
        source = full.clone() if is_off("in-place") else full
        _finish(_start(_issue_reduction, output, source, op=reduce_op, group=group, waits=waits), works)
    if told is not None:
        tell("transferred", told)


def gather_together(parts: Sequence[Part], works: list[dist.Work] | None = None) -> None:
    """Do ``all_gather`` for each part: those along one axis in one collective, whatever their dtypes.

    On gloo tensors of more than 64 MiB in all go one by one: there a copy costs more than a message.
    """
    if len(parts) == 1:
        all_gather(parts[0].whole, parts[0].shard, parts[0].axis, works)
        return
    for axis, group, alike in _alike(parts, lambda axis: axis.gather_group):
        if not _travel_together(alike, group):
            for part in alike:
                all_gather(part.whole, part.shard, axis, works)
            continue
        wholes, shards = [part.whole for part in alike], [part.shard for part in alike]
        told = None
        if listeners:
            told = _told_of("all_gather", axis, wholes, Transfer("all_gather", group, tuple(shards), tuple(wholes)))
        if wholes[0].is_cpu and _is_gloo(group):
            _finish(_gather_by_message(list(zip(wholes, shards, strict=True)), axis), works)
        else:
            sources = [shard.clone() for shard in shards] if is_off("in-place") else shards
            pairs = [
                (whole.view(torch.uint8), shard.view(torch.uint8)) for whole, shard in zip(wholes, sources, strict=True)
            ]
            _coalesced(_all_gather_flat, pairs, group, works)
        if told is not None:
            tell("transferred", told)


def all_reduce_together(parts: Sequence[Part], works: list[dist.Work] | None = None) -> None:
    """Do ``all_reduce`` for each part's ``whole``: those along one axis, of one dtype, in one collective."""
    for axis, group, alike in _alike(parts, lambda axis: axis.reduce_group, is_reduction=True, by_dtype=True):
        wholes, op = [part.whole for part in alike], alike[0].op
        if not _travel_together(alike, group):
            for whole in wholes:
                all_reduce(whole, axis, op, works)
            continue
        told = None
        if listeners:
            transfer = Transfer("all_reduce", group, tuple(wholes), tuple(wholes))
            told = _told_of("all_reduce", axis, wholes, transfer)
        if wholes[0].is_cpu and _is_gloo(group):
            _finish(_all_reduce_by_message(wholes, axis, op), works)
        else:
            with _coalescing(group=group, async_ops=works is not None) as manager:
                for whole in wholes:
                    dist.all_reduce(whole, op=_reduce_op(op), group=group, async_op=works is not None)
            if works is not None:
                works.append(manager)
        if told is not None:
            tell("transferred", told)


def reduce_together(parts: Sequence[Part], works: list[dist.Work] | None = None) -> None:
    """Do ``reduce_scatter`` for each part: those along one axis, with one operation, in one collective.

    Backends other than gloo reduce one dtype at a time. On gloo tensors of more than 64 MiB in all go one by one.
    """
    if len(parts) == 1:
        reduce_scatter(parts[0].shard, parts[0].whole, parts[0].axis, parts[0].op, works)
        return
    for axis, group, alike in _alike(parts, lambda axis: axis.reduce_group, is_reduction=True):
        if not _travel_together(alike, group):
            for part in alike:
                reduce_scatter(part.shard, part.whole, axis, part.op, works)
            continue
        wholes, shards, op = [part.whole for part in alike], [part.shard for part in alike], alike[0].op
        told = None
        if listeners:
            transfer = Transfer("reduce_scatter", group, tuple(wholes), (*wholes, *shards))
            told = _told_of("reduce_scatter", axis, wholes, transfer)
        if _is_wide(alike[0]) or (wholes[0].is_cpu and _is_gloo(group)):
            _finish(_reduce_by_message(list(zip(wholes, shards, strict=True)), axis, op), works)
        else:
            sources = [whole.clone() for whole in wholes] if is_off("in-place") else wholes
            _coalesced(_reduce_scatter_flat, list(zip(shards, sources, strict=True)), group, works, op=_reduce_op(op))
        if told is not None:
            tell("transferred", told)


def _alike(
    parts: Sequence[Part],
    group_of: Callable[[MeshAxis], dist.ProcessGroup],
    *,
    is_reduction: bool = False,
    by_dtype: bool = False,
) -> Iterator[tuple[MeshAxis, dist.ProcessGroup, list[Part]]]:
    """Yield the parts that can travel together, in the order of the first of each."""
    found: dict[object, list[Part]] = {}
    for part in parts:
        group = group_of(part.axis) if part.axis.size > 1 else None
        mixes = not is_reduction or (group is not None and part.whole.is_cpu and _is_gloo(group))
        key = None if mixes and not by_dtype else (_is_wide(part), part.whole.dtype)
        found.setdefault((group, part.op, key), []).append(part)
    for alike in found.values():
        yield alike[0].axis, group_of(alike[0].axis), alike


def _is_wide(part: Part) -> bool:
    """Whether a reduction adds up in a wider dtype than travels."""
    return part.shard.dtype is not part.whole.dtype


def _travel_together(parts: Sequence[Part], group: dist.ProcessGroup) -> bool:
    first = parts[0]
    if len(parts) == 1 or first.axis.size == 1 or _is_traced(first.shard) or is_off("together"):
        return False
    if _is_wide(first):
        return True
    if first.whole.is_cpu and _is_gloo(group):
        return 0 < sum(part.whole.nbytes for part in parts) <= _MOST_EXCHANGED_BYTES
    return _coalesces(group, first.whole.device)


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


def _coalesced(
    collective: Callable[..., Any],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    group: dist.ProcessGroup,
    works: list[dist.Work] | None,
    **options: Any,
) -> None:
    """Issue a collective on several pairs of output and input by one call."""
    is_asynchronous = works is not None
    with _coalescing(group=group, async_ops=is_asynchronous) as manager:
        for output, source in pairs:
            collective(output, source, group=group, async_op=is_asynchronous, **options)
    if works is not None:
        works.append(manager)


def all_reduce(tensor: torch.Tensor, axis: MeshAxis, op: str, works: list[dist.Work] | None = None) -> None:
    """Reduce ``tensor`` over the ranks of the axis, in place on all of them. ``op`` is "sum", "avg" or "max"."""
    if axis.size == 1:
        return
    if _is_traced(tensor):
        tensor.copy_(_traced(torch.ops._c10d_functional.all_reduce(tensor, op, axis.reduce_group.group_name)))
        return
    told = _told("all_reduce", axis, tensor, axis.reduce_group, tensor, tensor) if listeners else None
    reduce_op = dist.ReduceOp.MAX if op == "max" else _reduce_op(op)
    _finish(_start(dist.all_reduce, tensor, op=reduce_op, group=axis.reduce_group, waits=works is None), works)
    if told is not None:
        tell("transferred", told)


def all_to_all(
    output: torch.Tensor,
    source: torch.Tensor,
    axis: MeshAxis,
    sizes: tuple[Sequence[int], Sequence[int]],
    works: list[dist.Work] | None = None,
) -> None:
    """Send a part of ``source`` to every rank of the axis and receive one from each, of any sizes, zero included.

    Args:
        output, source: 1-D, of one dtype; parts for and from the ranks follow each other in rank order.
        sizes: elements received from each rank, and elements sent to each; every rank knows its own.
        works: when given, the call returns at once and its handle is appended; both tensors must live until then.
    """
    received, sent = ([size * output.element_size() for size in each] for each in sizes)
    if axis.size == 1:
        output.copy_(source)
        return
    told = _told("all_to_all", axis, output, axis.reduce_group, source, output) if listeners else None
    parts = output.view(torch.uint8), source.view(torch.uint8)
    splits = {"output_split_sizes": received, "input_split_sizes": sent}
    _finish(_start(dist.all_to_all_single, *parts, group=axis.reduce_group, waits=works is None, **splits), works)
    if told is not None:
        tell("transferred", told)


def start_maximum(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the element-wise maximum over the ranks of a group, in place, and return its handle."""
    work = _start(dist.all_reduce, tensor, op=dist.ReduceOp.MAX, group=group, waits=False)
    assert work is not None
    return work


def barrier() -> None:
    """Wait until every rank of the world is here; no-op without a process group."""
    if dist.is_initialized():
        dist.barrier()


def broadcast(tensor: torch.Tensor, axis: MeshAxis, source: int = 0) -> None:
    """Copy ``tensor`` from the rank at position ``source`` of the axis to all others, in place."""
    if axis.size == 1:
        return
    told = _told("broadcast", axis, tensor, axis.gather_group, tensor, tensor) if listeners else None
    _finish(_start(dist.broadcast, tensor, group=axis.gather_group, group_src=source, waits=True), None)
    if told is not None:
        tell("transferred", told)
