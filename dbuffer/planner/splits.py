"""Which tensors of a unit should share a flat buffer: all ways to deal a few items into a few regions, by their bounds.

An item is a tensor, or many that are dealt together. docs/design/planner.md, "Regions".
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dbuffer.planner.granularity import two_piece_shard

# Items dealt at most, fewer where the lengths to compare are many; and splits worth solving.
_MAX_ITEMS, _MAX_CLASSES, _MAX_CLASSES_OF_MANY, _MANY_SIZES, _MAX_SPLITS = 8, 6, 3, 256, 2
# Equal tensors with less than this part of the data are not dealt apart from others.
_SHARE_OF_DUST = 200

Sizes = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Split:
    """One way to form regions.

    Attributes:
        groups: tensors of each region, ascending; regions in order of their first tensor.
        cost: no layout of these regions takes fewer slots, the price of each further region included.
    """

    groups: tuple[tuple[int, ...], ...]
    cost: int


def cheapest_splits(sizes: Sizes, num_shards: int, max_regions: int, price: int) -> list[Split]:
    """Return the splits worth solving, cheapest first: those whose bounds and prices sum to least.

    Args:
        sizes: slots and unit of each tensor, at least one.
        num_shards: shards of each region.
        max_regions: at least 1.
        price: slots that each region beyond the first has to save.
    """
    items = _items(sizes, num_shards)
    dealer = _Dealer(sizes, items, num_shards, price)
    dealer.deal((1 << len(items)) - 1, max_regions, 0, ())
    splits = []
    for spent, _, masks in sorted(dealer.kept, reverse=True):
        members = [sorted(tensor for item in _bits(mask) for tensor in items[item]) for mask in masks]
        splits.append(Split(tuple(sorted(map(tuple, members))), -spent - price))
    return splits


class _Dealer:
    """Deals items, bits of a mask, into regions; keeps the cheapest few ways, as a heap with the dearest first."""

    def __init__(self, sizes: Sizes, items: list[list[int]], num_shards: int, price: int) -> None:
        self.kept: list[tuple[int, int, tuple[int, ...]]] = []
        self._num_shards = num_shards
        self._price = price
        self._num_seen = 0
        self._data = [0]
        self._costs: dict[int, int] = {}
        demands: dict[tuple[int, int], int] = {}
        for number, item in enumerate(items):
            slots = sum(sizes[tensor][0] for tensor in item)
            self._data += [before + slots for before in self._data]
            for size in {sizes[tensor] for tensor in item}:
                if size[1] > 1:
                    key = two_piece_shard(*size), size[1]
                    demands[key] = demands.get(key, 0) | 1 << number
        self._demands = [(half, unit, mask) for (half, unit), mask in sorted(demands.items(), reverse=True)]

    def deal(self, rest: int, regions_left: int, spent: int, groups: tuple[int, ...]) -> None:
        """Deal the items of ``rest``; a region takes the lowest one left, so that no way is met twice."""
        if not rest:
            self._num_seen += 1
            heapq.heappush(self.kept, (-spent, -self._num_seen, groups))
            if len(self.kept) > _MAX_SPLITS:
                heapq.heappop(self.kept)
            return
        lowest = rest & -rest
        others = rest ^ lowest
        companions = others
        while True:
            group = companions | lowest
            cost = spent + self._cost(group) + self._price
            remaining = rest ^ group
            at_least = cost + self._data[remaining] + (self._price if remaining else 0)
            is_promising = len(self.kept) < _MAX_SPLITS or at_least < -self.kept[0][0]
            if is_promising and (regions_left > 1 or not remaining):
                self.deal(remaining, regions_left - 1, cost, (*groups, group))
            if not companions or regions_left == 1:
                return
            companions = (companions - 1) & others

    def _cost(self, group: int) -> int:
        """Return the slots that a region of these items takes at least: what ``ShardBound.least`` says of the data."""
        if group not in self._costs:
            shard = -(-self._data[group] // self._num_shards)
            demands = [demand for demand in self._demands if demand[2] & group]
            while True:
                multiple, smallest = 1, 0
                for half, unit, _ in demands:
                    if half <= shard:
                        break
                    multiple, smallest = math.lcm(multiple, unit), half
                found = -(-shard // multiple) * multiple
                if found < smallest or multiple == 1:
                    break
                shard = smallest
            self._costs[group] = found * self._num_shards
        return self._costs[group]


def _items(sizes: Sizes, num_shards: int) -> list[list[int]]:
    """Sort tensors by unit, and apart those too long for two shards; then take the largest sets apart while they last.

    Tensors too small to matter stay together, and small classes beyond the limit go together.
    """
    total = sum(slots for slots, _ in sizes)
    grouped: dict[tuple[int, bool], list[int]] = {}
    for tensor, (slots, unit) in enumerate(sizes):
        grouped.setdefault((unit, unit > 1 and slots * num_shards > 2 * total), []).append(tensor)
    ranked = sorted(grouped.values(), key=lambda members: -sum(sizes[tensor][0] for tensor in members))
    if len(set(sizes)) > _MANY_SIZES:
        return _merged(ranked, _MAX_CLASSES_OF_MANY)
    items = _merged(ranked, _MAX_CLASSES)
    while len(items) < _MAX_ITEMS:
        item = max(items, key=lambda item: len(item) > 1 and _largest_kind(item, sizes)[0])
        slots, largest = _largest_kind(item, sizes)
        if len(item) == 1 or slots * _SHARE_OF_DUST < total:
            break
        items.remove(item)
        taken = [tensor for tensor in item if sizes[tensor] == largest]
        others = [tensor for tensor in item if sizes[tensor] != largest]
        items += [taken, others] if others else [taken[:1], taken[1:]]
    return items


def _merged(ranked: list[list[int]], most: int) -> list[list[int]]:
    rest = [tensor for members in ranked[most - 1 :] for tensor in members]
    return [*ranked[: most - 1], rest] if rest else ranked


def _largest_kind(item: list[int], sizes: Sizes) -> tuple[int, tuple[int, int]]:
    """Return which equal tensors of an item have most slots together, after those slots."""
    slots_of: Counter[tuple[int, int]] = Counter()
    for tensor in item:
        slots_of[sizes[tensor]] += sizes[tensor][0]
    return max((slots, size) for size, slots in slots_of.items())


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1
