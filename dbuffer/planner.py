"""Lay tensors out in flat buffers of equal shards, with as little padding as a bounded search finds and a proof allows.

Input: shapes, a shard count, where each tensor may be cut. Output: ``Plan``. Integer arithmetic only, the same on every
rank: no randomness, no clock, no torch. Problem, choice, rejected ways and proofs: docs/design/planner.md.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from dbuffer.errors import LayoutError
from dbuffer.granularity import Granularity, Row, aligned_sizes, granularity_per_tensor, next_offset, two_piece_shard
from dbuffer.plan import PaddingLimits, Plan, Region, check_padding

_ROWS = Row()
_LIMITS = PaddingLimits()
# Steps, each about a microsecond: real layers need a few hundred. A gap above the ratio buys one longer search.
_STEPS, _MORE_STEPS, _GAP_WORTH_MORE = 4_000, 30_000, 0.002
# Tensors that the cheap order looks ahead, and unit multiples tried before any other shard length.
_WINDOW, _STOPS = 16, 4
# Row-width classes told apart when regions are formed (fewer where many sizes make each bound slow), and splits solved.
_MAX_CLASSES, _MAX_CLASSES_OF_MANY, _MANY_SIZES, _MAX_SPLITS = 6, 3, 256, 3


def plan(
    shapes: Sequence[Sequence[int]],
    num_shards: int,
    *,
    granularity: Granularity | Sequence[Granularity] = _ROWS,
    alignment_bytes: int = 16,
    itemsize: int = 2,
    limits: PaddingLimits = _LIMITS,
) -> Plan:
    """Lay all tensors out in one flat buffer of ``num_shards`` equal shards, as short as can be found.

    The order of the shapes is kept in the buffer when that costs no padding.

    Args:
        shapes: one per tensor; empty tensors and an empty list are fine.
        num_shards: ranks on the sharding axis.
        granularity: where a shard boundary may cut: one for all tensors, or one per tensor.
        alignment_bytes: every tensor and every shard starts at a multiple of it; 0 means no alignment.
        itemsize: bytes of one element.
        limits: how much padding draws a ``PaddingWarning``, how much is refused.
    Raises:
        LayoutError: nonsense input, or padding beyond ``limits``.
    """
    request = _request(shapes, num_shards, granularity, alignment_bytes, itemsize)
    best = _region(request, range(len(request.shapes)))
    check_padding((best,), limits, itemsize)
    return best.plan


def plan_regions(
    shapes: Sequence[Sequence[int]],
    num_shards: int,
    *,
    granularity: Granularity | Sequence[Granularity] = _ROWS,
    max_regions: int = 3,
    alignment_bytes: int = 16,
    itemsize: int = 2,
    limits: PaddingLimits = _LIMITS,
) -> tuple[Region, ...]:
    """Lay tensors out in one flat buffer, or in a few by row width where mixing widths would pad too much.

    Regions come in order of their first tensor and hold every tensor once. Arguments and errors are those of ``plan``;
    ``max_regions`` caps the number of buffers and ``limits`` says what an extra one has to save.
    """
    if max_regions < 1:
        raise LayoutError(f"max_regions is {max_regions}: wanted at least 1.")
    request = _request(shapes, num_shards, granularity, alignment_bytes, itemsize)
    regions: tuple[Region, ...] = (_region(request, range(len(request.shapes))),)
    single = regions[0].plan
    price = max(limits.split_bytes // itemsize, math.ceil(limits.split_ratio * single.data_numel))
    if single.numel - single.data_numel > price:
        for groups in _cheapest_splits(request, max_regions, price):
            split = tuple(_region(request, indices) for indices in groups) if len(groups) > 1 else regions
            regions = min(regions, split, key=lambda found: sum(region.plan.numel + price for region in found))
            if all(region.plan.numel == region.plan.lower_bound_numel for region in split):
                break
    check_padding(regions, limits, itemsize)
    return regions


@dataclass(frozen=True, slots=True)
class _Request:
    """Checked input; ``sizes`` holds the room each tensor takes and what stays together of it, in aligned pieces."""

    shapes: tuple[tuple[int, ...], ...]
    granularities: tuple[Granularity, ...]
    num_shards: int
    alignment: int
    sizes: list[tuple[int, int]]


def _request(
    shapes: Sequence[Sequence[int]],
    num_shards: int,
    granularity: Granularity | Sequence[Granularity],
    alignment_bytes: int,
    itemsize: int,
) -> _Request:
    if num_shards < 1:
        raise LayoutError(f"num_shards is {num_shards}: wanted at least 1.")
    if itemsize < 1 or alignment_bytes < 0 or alignment_bytes % itemsize:
        raise LayoutError(
            f"alignment of {alignment_bytes} bytes for elements of {itemsize} bytes: wanted a multiple of them, or 0."
        )
    checked = tuple(tuple(map(int, shape)) for shape in shapes)
    for tensor, shape in enumerate(checked):
        if min(shape, default=0) < 0:
            raise LayoutError(f"tensor {tensor} has shape {shape}: wanted no negative dim.")
    alignment = alignment_bytes // itemsize or 1
    granularities = granularity_per_tensor(granularity, len(checked))
    return _Request(checked, granularities, num_shards, alignment, aligned_sizes(checked, granularities, alignment))


def _region(request: _Request, indices: Iterable[int]) -> Region:
    """Solve one flat buffer for some of the tensors; empty tensors sit at offset 0."""
    chosen = tuple(indices)
    filled = [tensor for tensor in chosen if request.sizes[tensor][0]]
    sizes = [request.sizes[tensor] for tensor in filled]
    bound = _bound(Counter(sizes), request.num_shards)
    layout = _search(sizes, request.num_shards, bound, _STEPS) if sizes else _Layout(0, (), 0)
    if layout.shard - layout.proved > _GAP_WORTH_MORE * layout.proved:
        more = _search(sizes, request.num_shards, bound, _MORE_STEPS)
        best = min(more, layout, key=lambda candidate: candidate.shard)
        layout = _Layout(best.shard, best.offsets, max(more.proved, layout.proved))
    placed = dict(zip(filled, layout.offsets, strict=True))
    plan_of_chosen = Plan(
        shapes=tuple(request.shapes[tensor] for tensor in chosen),
        granularities=tuple(request.granularities[tensor] for tensor in chosen),
        num_shards=request.num_shards,
        offsets=tuple(placed.get(tensor, 0) * request.alignment for tensor in chosen),
        shard_numel=layout.shard * request.alignment,
        alignment_numel=request.alignment,
        lower_bound_numel=layout.proved * request.num_shards * request.alignment,
        binding=_binding(request, filled, bound, layout.shard),
    )
    return Region(chosen, plan_of_chosen)


@dataclass(frozen=True, slots=True)
class _Bound:
    """What a shard length must satisfy, whatever the order of the tensors.

    Attributes:
        floor: shards hold all data, and every unit whole.
        crowded: the unit size that sets ``floor``, 0 where the data does.
        forcing: distinct units, in descending order of ``halves``.
        halves: a shard shorter than this must be a multiple of the unit.
        multiples: entry n is the least common multiple of the first n of ``forcing``.
    """

    floor: int
    crowded: int
    forcing: tuple[int, ...]
    halves: tuple[int, ...]
    multiples: tuple[int, ...]

    def least(self, at_least: int) -> int:
        """Return the smallest permitted shard length that is no shorter than ``at_least``."""
        forced = sum(half > at_least for half in self.halves)
        while forced:
            shard = -(-at_least // self.multiples[forced]) * self.multiples[forced]
            if shard < self.halves[forced - 1]:
                return shard
            at_least = self.halves[forced - 1]
            forced -= 1
        return at_least


def _bound(kinds: Counter[tuple[int, int]], num_shards: int) -> _Bound:
    """Derive the bound from how many tensors there are of each (slots, unit)."""
    half_of: dict[int, int] = {}
    pieces: Counter[int] = Counter()
    for (slots, unit), count in kinds.items():
        half_of[unit] = max(half_of.get(unit, 0), two_piece_shard(slots, unit))
        pieces[unit] += slots // unit * count
        pieces[slots % unit] += count
    forcing = sorted(half_of, key=lambda unit: (-half_of[unit], unit))
    multiples = [1]
    for unit in forcing:
        # Past the largest half no multiple is ever tried: stop before hundreds of odd widths make huge integers.
        multiples.append(multiples[-1] if multiples[-1] > half_of[forcing[0]] else math.lcm(multiples[-1], unit))
    floor, crowded, seen = -(-sum(slots * count for (slots, _), count in kinds.items()) // num_shards), 0, 0
    for size in sorted(pieces, reverse=True):
        seen += pieces[size]
        if -(-seen // num_shards) * size > floor:
            floor, crowded = -(-seen // num_shards) * size, size
    return _Bound(floor, crowded, tuple(forcing), tuple(half_of[unit] for unit in forcing), tuple(multiples))


@dataclass(frozen=True, slots=True)
class _Layout:
    shard: int
    offsets: tuple[int, ...]
    proved: int


def _search(sizes: list[tuple[int, int]], num_shards: int, bound: _Bound, steps: int) -> _Layout:
    """Find a short shard: try the bound; else bracket and bisect; then take or refute what lies below the find."""
    attempts = _Attempts(sizes, num_shards, steps + 4 * len(sizes))
    bottom = proved = best = bound.least(bound.floor)
    stride = max(unit for _, unit in sizes)
    # Where a shard is a multiple of a unit, tensors of that unit lie end to end: worth a visit on the way up.
    multiples = {*bound.forcing[:_STOPS], *bound.multiples[: _STOPS + 1]}
    stops = sorted({bound.least(-(-best // multiple) * multiple) for multiple in multiples})
    while attempts.at(best) is None:
        best = min(stop for stop in [*stops, bound.least(best + stride)] if stop > best)
        stride *= 2
    top = best
    while attempts.steps_left > 0 and bottom + 1 < top:
        middle = (bottom + top) // 2
        shard = bound.least(middle)
        if shard >= top:
            top = middle
        elif attempts.at(shard) is None:
            bottom = shard
        else:
            top = best = shard
    shard = proved
    while attempts.steps_left > 0 and shard < best:
        if attempts.at(shard) is not None:
            best = shard
            break
        following = bound.least(shard + 1)
        if proved == shard and shard in attempts.refuted:
            proved = following
        shard = following
    return _Layout(best, attempts.found[best], min(proved, best))


class _Attempts:
    """Layouts tried for one set of tensors, by shard length; with no steps left, only the cheap orders are tried."""

    def __init__(self, sizes: list[tuple[int, int]], num_shards: int, steps: int) -> None:
        self.steps_left = steps
        self.found: dict[int, tuple[int, ...]] = {}
        self.refuted: set[int] = set()
        self._failed: set[int] = set()
        self._sizes = sizes
        self._num_shards = num_shards
        self._total = sum(slots for slots, _ in sizes)
        self._members: dict[tuple[int, int], list[int]] = {}
        for index, size in enumerate(sizes):
            self._members.setdefault(size, []).append(index)

    def at(self, shard: int) -> tuple[int, ...] | None:
        """Return offsets for this shard length, None if none were found; ``refuted`` holds it if none exist."""
        if shard not in self.found and shard not in self._failed:
            offsets = next((found for order in self._orders(shard) if (found := self._place(order, shard))), None)
            if offsets is None:
                self._failed.add(shard)
            else:
                self.found[shard] = tuple(offsets)
        return self.found.get(shard)

    def _place(self, order: Iterable[int], shard: int) -> list[int]:
        """Place tensors in this order, each at its first legal offset; return nothing when they do not fit."""
        self.steps_left -= len(self._sizes)
        offsets, cursor = [0] * len(self._sizes), 0
        for index in order:
            slots, unit = self._sizes[index]
            offsets[index] = next_offset(cursor, slots, unit, shard)
            cursor = offsets[index] + slots
        return offsets if cursor <= shard * self._num_shards else []

    def _orders(self, shard: int) -> Iterator[Iterable[int]]:
        """Yield orders worth trying: the caller's own, one that looks ahead, then what a search over orders finds."""
        yield range(len(self._sizes))
        yield self._look_ahead(shard)
        width = self.steps_left // (2 * len(self._members) * len(self._sizes))
        if width > 0:
            yield from self._sequence(shard, width)

    def _look_ahead(self, shard: int) -> Iterator[int]:
        """Yield the caller's order, but each time the first of the next few tensors that leaves the least gap."""
        waiting, cursor = iter(range(len(self._sizes))), 0
        window = list(islice(waiting, _WINDOW))
        while window:
            chosen, start = -1, -1
            for index in window:
                self.steps_left -= 1
                offset = next_offset(cursor, *self._sizes[index], shard)
                if chosen < 0 or offset < start:
                    chosen, start = index, offset
                if start == cursor:
                    break
            yield chosen
            cursor = start + self._sizes[chosen][0]
            window.remove(chosen)
            window.extend(islice(waiting, 1))

    def _sequence(self, shard: int, width: int) -> Iterator[list[int]]:
        """Search all orders for one that fits and yield it; note a refutation if the search was exhaustive.

        A state counts the placed tensors of each size in mixed-radix digits. Of all ways into a state only the one with
        the smallest gaps matters, because the first legal offset never decreases with the cursor. A level beyond
        ``width`` states keeps the most promising, and the search is no longer exhaustive.
        """
        slack, kinds, stride = shard * self._num_shards - self._total, [], 1
        for (slots, unit), members in self._members.items():
            kinds.append((slots, unit, stride, len(members)))
            stride *= len(members) + 1
        level: dict[int, tuple[int, int, int]] = {0: (0, 0, 0)}
        history, is_exhaustive = [], True
        for _ in self._sizes:
            self.steps_left -= len(level) * len(kinds)
            following: dict[int, tuple[int, int, int]] = {}
            for state, (gaps, placed, _) in level.items():
                for kind, (slots, unit, weight, count) in enumerate(kinds):
                    if state // weight % (count + 1) < count:
                        wasted = next_offset(gaps + placed, slots, unit, shard) - placed
                        known = following.get(state + weight)
                        if wasted <= slack and (known is None or wasted < known[0]):
                            following[state + weight] = (wasted, placed + slots, kind)
            if len(following) > width:
                is_exhaustive = False
                # Coarse units first among equals: fine ones can close a gap later, coarse ones cannot.
                best = sorted(following.items(), key=lambda item: (item[1][0], -kinds[item[1][2]][1], -item[1][1]))
                following = dict(best[:width])
            history.append(following)
            level = following
        if level:
            yield self._traced(history, [weight for _, _, weight, _ in kinds])
        elif is_exhaustive:
            self.refuted.add(shard)

    def _traced(self, history: list[dict[int, tuple[int, int, int]]], weights: list[int]) -> list[int]:
        """Return the order of tensors that led to the last state; equal tensors keep the caller's order."""
        members, order = [list(group) for group in self._members.values()], []
        (state,) = history[-1]
        for level in reversed(history):
            kind = level[state][2]
            order.append(members[kind].pop())
            state -= weights[kind]
        return order[::-1]


def _cheapest_splits(request: _Request, max_regions: int, price: int) -> list[list[list[int]]]:
    """Return the splits by row width, as tensors of each region, whose bounds and price of regions sum to least."""
    classes = _classes(request)
    kinds = [Counter(request.sizes[tensor] for tensor in members) for members in classes]
    costs: dict[tuple[int, ...], int] = {}

    def cost(group: tuple[int, ...]) -> int:
        if group not in costs:
            bound = _bound(sum((kinds[number] for number in group), Counter()), request.num_shards)
            costs[group] = bound.least(bound.floor) * request.num_shards * request.alignment + price
        return costs[group]

    splits: list[list[tuple[int, ...]]] = [[]]
    for number in range(len(classes)):
        splits = [
            [*split[:at], (*split[at], number), *split[at + 1 :]] if at < len(split) else [*split, (number,)]
            for split in splits
            for at in range(min(len(split) + 1, max_regions))
        ]
    best = sorted(splits, key=lambda split: sum(map(cost, split)))[:_MAX_SPLITS]
    return [sorted(sorted(chain(*(classes[number] for number in group))) for group in split) for split in best]


def _classes(request: _Request) -> list[list[int]]:
    """Sort tensors by unit, and apart those too long for two shards; small classes beyond the limit go together."""
    total = sum(slots for slots, _ in request.sizes)
    grouped: dict[tuple[int, bool], list[int]] = {}
    for tensor, (slots, unit) in enumerate(request.sizes):
        grouped.setdefault((unit, unit > 1 and slots * request.num_shards > 2 * total), []).append(tensor)
    ranked = sorted(grouped.values(), key=lambda members: -sum(request.sizes[tensor][0] for tensor in members))
    most = (_MAX_CLASSES_OF_MANY if len(set(request.sizes)) > _MANY_SIZES else _MAX_CLASSES) - 1
    rest = [tensor for members in ranked[most:] for tensor in members]
    return [*ranked[:most], rest] if rest else ranked


def _binding(request: _Request, tensors: Sequence[int], bound: _Bound, shard: int) -> str:
    """Say what forces the shard length; tensors are numbered as the caller gave them."""

    def named(unit: int) -> str:
        sizes = ((*request.sizes[tensor], tensor) for tensor in tensors)
        _, _, tensor = max((own == unit, slots, tensor) for slots, own, tensor in sizes if unit in (own, slots % own))
        shape = request.shapes[tensor]
        return f"{request.granularities[tensor].describe(shape)} in tensor {tensor} of shape {shape}"

    forced = [unit for unit, half in zip(bound.forcing, bound.halves, strict=True) if half > shard and unit > 1]
    multiple = math.lcm(*forced)
    if shard == -(-bound.floor // multiple) * multiple > bound.floor:
        names = " and ".join(map(named, forced[:3]))
        return f"{names}: shards are multiples of {multiple * request.alignment}"
    if shard == bound.floor:
        return f"{named(bound.crowded)}: each shard holds whole ones" if bound.crowded else "the data itself"
    if shard in bound.halves:
        return f"{named(bound.forcing[bound.halves.index(shard)])}: it has to fit in two shards"
    return f"gaps between tensors, the widest before {named(max(bound.forcing))}"
