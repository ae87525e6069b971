"""Collectives of several tensors at once: those along one axis travel in one message."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dbuffer.collectives import (
    Part,
    Transfer,
    _finish,
    _is_gloo,
    _is_traced,
    _told_of,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from dbuffer.events import listeners, tell
from dbuffer.gloo import (
    _MOST_EXCHANGED_BYTES,
    REDUCE_OPS,
    _all_reduce_by_message,
    _exchange_each,
    _gather_by_message,
    _reduce_by_message,
)
from dbuffer.mesh import MeshAxis
from dbuffer_kernels.switches import is_off

__all__ = ["all_reduce_together", "exchange", "gather_together", "reduce_numbers", "reduce_together"]

# torch 2.13 renames these two and warns on the old names; torch 2.11 has only the old names.
_all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Private in every version, and what FSDP2 and Megatron use.
_coalescing: Callable[..., Any] = dist._coalescing_manager  # type: ignore[attr-defined]

_reduce_scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
            _finish(_gather_by_message(list(zip(wholes, shards, strict=True)), axis), works, wholes[0])
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
            _finish(_all_reduce_by_message(wholes, axis, op), works, wholes[0])
        else:
            with _coalescing(group=group, async_ops=works is not None) as manager:
                for whole in wholes:
                    dist.all_reduce(whole, op=REDUCE_OPS[op], group=group, async_op=works is not None)
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
            _finish(_reduce_by_message(list(zip(wholes, shards, strict=True)), axis, op), works, wholes[0])
        else:
            sources = [whole.clone() for whole in wholes] if is_off("in-place") else wholes
            _coalesced(_reduce_scatter_flat, list(zip(shards, sources, strict=True)), group, works, op=REDUCE_OPS[op])
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


def exchange(
    received: Sequence[torch.Tensor],
    sent: Sequence[torch.Tensor],
    axis: MeshAxis,
    works: list[dist.Work] | None = None,
) -> None:
    """Send a tensor to every other rank of the axis and receive one from each, from and to where they lie.

    Args:
        received, sent: contiguous, of any sizes, one for each rank in order; this rank's own are left alone.
        works: when given, the call returns at once and handles are appended; all tensors must live until then.
    """
    if axis.size == 1:
        return
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    group, on_cpu = axis.reduce_group, sent[0].is_cpu
    reads, writes = (tuple(each[rank] for rank in others) for each in (sent, received))
    told = _told_of("all_to_all", axis, sent, Transfer("all_to_all", group, reads, writes)) if listeners else None
    if on_cpu and _is_gloo(group):
        started = _exchange_each(received, sent, axis)
    else:
        outputs, inputs = (
            [tensor[: tensor.numel() * (rank != axis.rank)] for rank, tensor in enumerate(each)]
            for each in (received, sent)
        )
        work: dist.Work | None = dist.all_to_all(outputs, inputs, group=group, async_op=works is not None)
        started = [] if work is None else [work]
    for each in started:
        _finish(each, works, writes[0])
    if told is not None:
        tell("transferred", told)


def reduce_numbers(numbers: Iterable[tuple[Sequence[MeshAxis], torch.Tensor]], op: str) -> list[torch.Tensor]:
    """Return 0-d tensors of one dtype, each reduced over its own axes, with one collective for each set of axes.

    Every rank calls it, with numbers over the same axes in the same order.
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
