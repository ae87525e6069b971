"""Lay tensors out in flat buffers of equal shards, with little padding, in a bounded search with a proved lower bound.

The input is shapes, a number of shards, and where each tensor may be cut. The output is a ``Plan``. The search is
integer arithmetic without randomness, clocks or torch, so every rank gets the same result. The design, the alternatives
and the proofs are in docs/design/planner.md.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dbuffer.errors import LayoutError
from dbuffer.planner.granularity import (
    Element,
    Granularity,
    Row,
    ShardBound,
    aligned_sizes,
    granularity_per_tensor,
    shard_bound,
)
from dbuffer.planner.packing import Layout, aligned_starts, shortest_layout
from dbuffer.planner.plan import PaddingLimits, Plan, Region, check_padding
from dbuffer.planner.splits import cheapest_splits

_ROWS, _ELEMENTS = Row(), Element()
_LIMITS = PaddingLimits()
# Tensors start at multiples of this if no shard gets longer: whole memory transactions of a GPU.
_START_BYTES = 128
# Most rounds of relaxation; each round relaxes the tensors that determine the size.
_MAX_RELAXATIONS = 8


def plan(
    shapes: Sequence[Sequence[int]],
    num_shards: int,
    *,
    granularity: Granularity | Sequence[Granularity] = _ROWS,
    alignment_bytes: int = 16,
    itemsize: int = 2,
    limits: PaddingLimits = _LIMITS,
) -> Plan:
    """Lay all tensors out in one flat buffer of ``num_shards`` equal shards, as short as the search finds.

    Tensors keep their order if that costs no padding. They start at multiples of 128 bytes where that costs no padding.

    Args:
        shapes: one per tensor; empty tensors and an empty list are allowed.
        num_shards: ranks on the sharding axis.
        granularity: where a shard boundary may cut, one for all tensors or one per tensor.
        alignment_bytes: every tensor and every shard starts at a multiple of it; 0: no alignment.
        itemsize: bytes of one element.
        limits: how much padding causes a ``PaddingWarning`` or an error.
    Raises:
        LayoutError: an argument is invalid, or the padding exceeds ``limits``.
    """
    request = _request(shapes, num_shards, granularity, alignment_bytes, itemsize)
    best = _region(request, range(len(request.shapes)))
    check_padding((best,), limits, itemsize)
    return best.plan


def plan_regions(
    shapes: Sequence[Sequence[int]],
    num_shards: int,
    *,
    granularity: Granularity | Sequence[Granularity] | None = None,
    max_regions: int = 3,
    alignment_bytes: int = 16,
    itemsize: int = 2,
    limits: PaddingLimits = _LIMITS,
) -> tuple[Region, ...]:
    """Lay tensors out in one flat buffer, or in several if mixing row widths would pad too much.

    Regions are ordered by their first tensor; every tensor is in exactly one. Arguments and errors are those of
    ``plan``, except for these:

    Args:
        granularity: one for all tensors, or one per tensor; it is kept unless ``limits.fallback`` permits a finer one.
            None: ``Row()``, with ``Element()`` as the fallback. ``Region.relaxed`` names the tensors that fell back.
        max_regions: the most buffers.
        limits: as for ``plan``; also how much an extra buffer must save, and how much padding triggers the fallback.
    """
    if max_regions < 1:
        raise LayoutError(f"max_regions is {max_regions}. fix: give at least 1")
    if granularity is None:
        granularity, limits = _ROWS, replace(limits, fallback=limits.fallback or _ELEMENTS)
    request = _request(shapes, num_shards, granularity, alignment_bytes, itemsize)
    regions = _regions(request, max_regions, limits)
    if limits.fallback is not None and limits.is_relaxed_from(_padding(regions), request.data_numel, itemsize):
        regions = _relaxed(request, regions, max_regions, limits)
    check_padding(regions, limits, itemsize)
    return regions


@dataclass(frozen=True, slots=True)
class _Request:
    """Checked arguments. ``sizes`` has (size, unit) of each tensor, in pieces of the alignment."""

    shapes: tuple[tuple[int, ...], ...]
    granularities: tuple[Granularity, ...]
    num_shards: int
    alignment: int
    itemsize: int
    data_numel: int
    sizes: list[tuple[int, int]]

    def start_pieces(self) -> int:
        """Return the wanted alignment of starts, in pieces; 1 if the buffer's alignment needs no improvement."""
        wanted = _START_BYTES // self.itemsize
        return wanted // self.alignment if self.alignment > 1 and wanted % self.alignment == 0 else 1

    def with_finer(self, tensors: set[int], finer: Granularity) -> "_Request":
        """Return the same request with granularity ``finer`` for some of the tensors."""
        granularities = tuple(
            finer if tensor in tensors else granularity for tensor, granularity in enumerate(self.granularities)
        )
        return replace(
            self, granularities=granularities, sizes=aligned_sizes(self.shapes, granularities, self.alignment)
        )


def _request(
    shapes: Sequence[Sequence[int]],
    num_shards: int,
    granularity: Granularity | Sequence[Granularity],
    alignment_bytes: int,
    itemsize: int,
) -> _Request:
    if num_shards < 1:
        raise LayoutError(f"num_shards is {num_shards}. fix: give at least 1")
    if itemsize < 1 or alignment_bytes < 0 or alignment_bytes % itemsize:
        raise LayoutError(
            f"alignment of {alignment_bytes} bytes for elements of {itemsize} bytes. fix: give a multiple of "
            f"{itemsize}, or 0"
        )
    checked = tuple(tuple(map(int, shape)) for shape in shapes)
    for tensor, shape in enumerate(checked):
        if min(shape, default=0) < 0:
            raise LayoutError(f"tensor {tensor} has shape {shape}. fix: give dims of at least 0")
    alignment = alignment_bytes // itemsize or 1
    granularities = granularity_per_tensor(granularity, len(checked))
    sizes = aligned_sizes(checked, granularities, alignment)
    return _Request(checked, granularities, num_shards, alignment, itemsize, sum(map(math.prod, checked)), sizes)


def _regions(request: _Request, max_regions: int, limits: PaddingLimits) -> tuple[Region, ...]:
    """Return the cheapest regions: one, or a promising split if one pads by more than the price of a region."""
    price = _price(request, limits)
    single = tuple(range(len(request.shapes)))
    solved: dict[tuple[int, ...], Region] = {}
    bound = _bound(request, single)
    promised = bound.least(bound.floor) * request.num_shards * request.alignment
    if max_regions == 1 or promised - request.data_numel <= price:
        solved[single] = _region(request, single, bound)
        if max_regions == 1 or solved[single].plan.numel - request.data_numel <= price:
            return (solved[single],)
    splits = cheapest_splits(request.sizes, request.num_shards, max_regions, price // request.alignment)
    best: tuple[Region, ...] = ()
    cost = 0
    for split in splits:
        if best and cost <= split.cost * request.alignment:
            break
        for group in split.groups:
            if group not in solved:
                solved[group] = _region(request, group)
        regions = tuple(solved[group] for group in split.groups)
        found = sum(region.plan.numel for region in regions) + price * (len(regions) - 1)
        if not best or found < cost:
            best, cost = regions, found
    return best


def _relaxed(
    request: _Request, strict: tuple[Region, ...], max_regions: int, limits: PaddingLimits
) -> tuple[Region, ...]:
    """Use the fallback for as few of the tensors that determine the size as bring the padding within the limits."""
    assert limits.fallback is not None
    regions, chosen = strict, set[int]()
    for _ in range(_MAX_RELAXATIONS):
        if not limits.is_relaxed_from(_padding(regions), request.data_numel, request.itemsize):
            break
        relaxed = request.with_finer(chosen, limits.fallback)
        binding = _binding_tensors(relaxed, regions, limits.fallback)
        if not binding:
            break
        chosen |= binding
        regions = _regions(request.with_finer(chosen, limits.fallback), max_regions, limits)
    fewer = _fewer(request, chosen, max_regions, limits)
    if fewer != chosen:
        found = _regions(request.with_finer(fewer, limits.fallback), max_regions, limits)
        if not limits.is_relaxed_from(_padding(found), request.data_numel, request.itemsize):
            regions, chosen = found, fewer
    if _padding(regions) >= _padding(strict):
        return strict
    return tuple(
        replace(region, relaxed=tuple(tensor for tensor in region.indices if tensor in chosen)) for region in regions
    )


def _fewer(request: _Request, chosen: set[int], max_regions: int, limits: PaddingLimits) -> set[int]:
    """Return ``chosen`` without the sizes that, by the bounds, need no relaxation; the largest are tried first."""
    assert limits.fallback is not None
    tensors_of: dict[tuple[int, int], set[int]] = {}
    for tensor in sorted(chosen):
        tensors_of.setdefault(request.sizes[tensor], set()).add(tensor)
    by_data = sorted(tensors_of, key=lambda size: (-size[0] * len(tensors_of[size]), size))
    for size in by_data[:_MAX_RELAXATIONS] if len(by_data) > 1 else []:
        fewer = chosen - tensors_of[size]
        sizes = request.with_finer(fewer, limits.fallback).sizes
        best = cheapest_splits(sizes, request.num_shards, max_regions, _price(request, limits) // request.alignment)
        padding = best[0].cost * request.alignment - request.data_numel
        if fewer and not limits.is_relaxed_from(padding, request.data_numel, request.itemsize):
            chosen = fewer
    return chosen


def _binding_tensors(request: _Request, regions: Sequence[Region], finer: Granularity) -> set[int]:
    """Return the tensors of one unit size that determine the size of the region with the most padding.

    If several unit sizes do, return the tensors of the size with the least data, so that few elements are relaxed.
    """
    for region in sorted(regions, key=lambda region: region.plan.data_numel - region.plan.numel):
        found: dict[int, list[int]] = {}
        units = {request.sizes[region.indices[tensor]][1] for tensor in region.plan.binding_tensors}
        for tensor in region.indices:
            shape, unit = request.shapes[tensor], request.sizes[tensor][1]
            if unit in units and finer.unit_numel(shape) < request.granularities[tensor].unit_numel(shape):
                found.setdefault(unit, []).append(tensor)
        if found:
            return set(min(found.values(), key=lambda tensors: sum(request.sizes[tensor][0] for tensor in tensors)))
    return set()


def _price(request: _Request, limits: PaddingLimits) -> int:
    """Return the number of elements that each extra region has to save."""
    return max(limits.split_bytes // request.itemsize, math.ceil(limits.split_ratio * request.data_numel))


def _padding(regions: Sequence[Region]) -> int:
    return sum(region.plan.numel - region.plan.data_numel for region in regions)


def _bound(request: _Request, tensors: Iterable[int]) -> ShardBound:
    sizes = (request.sizes[tensor] for tensor in tensors)
    return shard_bound(Counter(size for size in sizes if size[0]), request.num_shards)


def _region(request: _Request, indices: Iterable[int], bound: ShardBound | None = None) -> Region:
    """Return one flat buffer for some of the tensors; empty tensors lie at offset 0."""
    chosen = tuple(indices)
    filled = [tensor for tensor in chosen if request.sizes[tensor][0]]
    sizes = [request.sizes[tensor] for tensor in filled]
    bound = bound or _bound(request, chosen)
    layout = shortest_layout(sizes, request.num_shards, bound) if sizes else Layout(0, ())
    offsets = layout.offsets
    if (pieces := request.start_pieces()) > 1:
        offsets = aligned_starts(layout, sizes, request.num_shards, pieces)
    placed = dict(zip(filled, offsets, strict=True))
    binding, named = _certificate(request, filled, bound, layout.shard)
    position = {tensor: place for place, tensor in enumerate(chosen)}
    plan_of_chosen = Plan(
        shapes=tuple(request.shapes[tensor] for tensor in chosen),
        granularities=tuple(request.granularities[tensor] for tensor in chosen),
        num_shards=request.num_shards,
        offsets=tuple(placed.get(tensor, 0) * request.alignment for tensor in chosen),
        shard_numel=layout.shard * request.alignment,
        alignment_numel=request.alignment,
        lower_bound_numel=bound.least(bound.floor) * request.num_shards * request.alignment,
        binding=binding,
        binding_tensors=tuple(position[tensor] for tensor in named),
    )
    return Region(chosen, plan_of_chosen)


def _certificate(
    request: _Request, tensors: Sequence[int], bound: ShardBound, shard: int
) -> tuple[str, tuple[int, ...]]:
    """Return, in words, what determines the shard length, and the tensors named there, in the caller's numbering."""
    forced = [unit for unit, half in zip(bound.forcing, bound.halves, strict=True) if half > shard and unit > 1]
    multiple = math.lcm(*forced)
    if shard == -(-bound.floor // multiple) * multiple > bound.floor:
        units, reason = forced, f": shards are multiples of {multiple * request.alignment}"
    elif shard == bound.floor:
        units, reason = [bound.crowded] if bound.crowded else [], ": each shard holds whole ones"
    elif shard in bound.halves:
        units, reason = [bound.forcing[bound.halves.index(shard)]], ": it has to fit in two shards"
    else:
        units, reason = [max(bound.forcing)], ""
    if not units:
        return "the data itself", ()
    named = [_largest_with(request, tensors, unit) for unit in units[:3]]
    words = " and ".join(
        f"{request.granularities[tensor].describe(request.shapes[tensor])} in tensor {tensor} of shape "
        f"{request.shapes[tensor]}"
        for tensor in named
    )
    text = words + reason if reason else f"gaps between tensors, the widest before {words}"
    return text, tuple(named)


def _largest_with(request: _Request, tensors: Sequence[int], unit: int) -> int:
    """Return the largest tensor with this unit size; if there is none, the largest whose last unit has this size."""
    sizes = ((*request.sizes[tensor], tensor) for tensor in tensors)
    return max((own == unit, slots, -tensor) for slots, own, tensor in sizes if unit in (own, slots % own))[2] * -1
