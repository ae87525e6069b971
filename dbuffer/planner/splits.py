"""Splits: choose which tensors of a unit share a flat buffer, from all groupings of a few items, by their bounds.

An item is one tensor, or several that always share a buffer. See docs/design/planner.md, "Regions".
"""

import functools
import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dbuffer.planner.granularity import shard_bound

# Most items; most items with many distinct sizes; the number of sizes that counts as many; most splits to solve.
_MAX_ITEMS, _MAX_CLASSES, _MAX_CLASSES_OF_MANY, _MANY_SIZES, _MAX_SPLITS = 8, 6, 3, 256, 2
# A set of equal tensors with less than 1/200 of the data is not made an item of its own.
_SHARE_OF_DUST = 200

Sizes = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Split:
    """A grouping of tensors into regions.

    Attributes:
        groups: the tensors of each region, ascending; regions are ordered by their first tensor.
        cost: a lower bound on the slots of these regions, including the price of each extra region.
    """

    groups: tuple[tuple[int, ...], ...]
    cost: int


def cheapest_splits(sizes: Sizes, num_shards: int, max_regions: int, price: int) -> list[Split]:
    """Return the splits worth solving, cheapest first by the sum of their bounds and prices.

    Args:
        sizes: (size, unit) of each tensor; at least one tensor.
        num_shards: shards of each region.
        max_regions: at least 1.
        price: slots that each extra region has to save.
    """
    items = _items(sizes, num_shards)
    kinds = [Counter(size for tensor in item if (size := sizes[tensor])[0]) for item in items]

    @functools.cache
    def together(group: tuple[int, ...]) -> Counter[tuple[int, int]]:
        return together(group[:-1]) + kinds[group[-1]] if group else Counter()

    @functools.cache
    def cost(group: tuple[int, ...]) -> int:
        bound = shard_bound(together(group), num_shards)
        return bound.least(bound.floor) * num_shards + price

    ways = heapq.nsmallest(_MAX_SPLITS, _ways(len(items), max_regions), key=lambda groups: sum(map(cost, groups)))
    return [
        Split(
            tuple(sorted(tuple(sorted(tensor for item in group for tensor in items[item])) for group in groups)),
            sum(map(cost, groups)) - price,
        )
        for groups in ways
    ]


def _ways(num_items: int, max_groups: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield all ways to divide items into at most ``max_groups`` groups, starting with a single group."""
    if not num_items:
        yield ()
        return
    last = num_items - 1
    for groups in _ways(last, max_groups):
        for place, group in enumerate(groups):
            yield (*groups[:place], (*group, last), *groups[place + 1 :])
        if len(groups) < max_groups:
            yield (*groups, (last,))


def _items(sizes: Sizes, num_shards: int) -> list[list[int]]:
    """Group tensors into items, by unit and by whether they are too long for two shards.

    While the number of items permits, the largest sets of equal tensors become items of their own. Tensors with little
    data stay together, and small groups beyond the limit are merged.
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
    """Return the equal tensors of an item that have the most slots in total, as (total slots, (size, unit))."""
    slots_of: Counter[tuple[int, int]] = Counter()
    for tensor in item:
        slots_of[sizes[tensor]] += sizes[tensor][0]
    return max((slots, size) for size, slots in slots_of.items())
