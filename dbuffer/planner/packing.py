"""Packing: find a tensor order that fits shards of a given length, and bisect for a short length that works.

Sizes in this file count units of the alignment. See docs/design/planner.md, "Search" and "Proof" 5.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from dbuffer.planner.granularity import ShardBound, next_offset

# How many tensors the second order looks ahead; how many unit multiples are tried as shard lengths first.
_WINDOW, _STOPS = 8, 4
# Bisection steps: this many divided by the number of tensors, plus 4.
_BISECTIONS = 2_000
# Legal starts that are tried until one is a multiple of the wanted alignment.
_TRIES = 8

Sizes = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets of all tensors for one shard length."""

    shard: int
    offsets: tuple[int, ...]


def shortest_layout(sizes: Sizes, num_shards: int, bound: ShardBound) -> Layout:
    """Return a layout with a short shard: start at the bound, increase the length until one works, then bisect.

    Args:
        sizes: (size, unit) of each tensor, none empty.
        num_shards: number of shards to fill.
        bound: the bound for these sizes.
    """
    first = bottom = top = bound.least(bound.floor)
    stride = max(unit for _, unit in sizes)
    # If a shard is a multiple of a unit, tensors of that unit lie end to end, so these lengths are worth trying.
    multiples = {*bound.forcing[:_STOPS], *bound.multiples[: _STOPS + 1]}
    stops = sorted({bound.least(-(-first // multiple) * multiple) for multiple in multiples})
    while not (offsets := _placed(sizes, num_shards, top)):
        top = min(stop for stop in [*stops, bound.least(top + stride)] if stop > top)
        stride *= 2
    best = top
    for _ in range(4 + _BISECTIONS // len(sizes)):
        if bottom + 1 >= top:
            break
        middle = (bottom + top) // 2
        shard = bound.least(middle)
        if shard >= top:
            top = middle
        elif found := _placed(sizes, num_shards, shard):
            top, best, offsets = shard, shard, found
        else:
            bottom = shard
    return Layout(best, tuple(offsets))


def _placed(sizes: Sizes, num_shards: int, shard: int) -> list[int]:
    """Return offsets for this shard length, in the given order or the look-ahead order; an empty list if none fits."""
    room = shard * num_shards - sum(slots for slots, _ in sizes)
    return _in_order(range(len(sizes)), sizes, shard, room) or _in_order(_look_ahead(sizes, shard), sizes, shard, room)


def _in_order(order: Iterable[int], sizes: Sizes, shard: int, room: int) -> list[int]:
    """Place each tensor at its first legal offset; return an empty list if the gaps exceed ``room``."""
    offsets, cursor = [0] * len(sizes), 0
    for index in order:
        slots, unit = sizes[index]
        start = cursor if slots <= shard - cursor % shard else next_offset(cursor, slots, unit, shard)
        room -= start - cursor
        if room < 0:
            return []
        offsets[index], cursor = start, start + slots
    return offsets


def _look_ahead(sizes: Sizes, shard: int) -> Iterator[int]:
    """Yield an order: each time, of the next few tensors, the first one that leaves the smallest gap."""
    cursor, waiting = 0, iter(range(len(sizes)))
    window = list(islice(waiting, _WINDOW))
    while window:
        chosen, start, room = -1, -1, shard - cursor % shard
        for index in window:
            slots, unit = sizes[index]
            offset = cursor if slots <= room else next_offset(cursor, slots, unit, shard)
            if chosen < 0 or offset < start:
                chosen, start = index, offset
            if start == cursor:
                break
        yield chosen
        cursor = start + sizes[chosen][0]
        window.remove(chosen)
        window.extend(islice(waiting, 1))


def aligned_starts(layout: Layout, sizes: Sizes, num_shards: int, pieces: int) -> tuple[int, ...]:
    """Return offsets for the same shard length and order that are multiples of ``pieces`` where possible.

    A tensor without a near legal multiple keeps an unaligned start. If the result would not fit, the offsets are
    returned unchanged.
    """
    shard, offsets, cursor = layout.shard, list(layout.offsets), 0
    for index in sorted(range(len(sizes)), key=layout.offsets.__getitem__):
        size = sizes[index]
        start = first = next_offset(cursor, *size, shard)
        for _ in range(_TRIES):
            if start % pieces == 0:
                break
            start = next_offset(-(-start // pieces) * pieces, *size, shard)
        offsets[index] = start if start % pieces == 0 else first
        cursor = offsets[index] + size[0]
    return tuple(offsets) if cursor <= shard * num_shards else layout.offsets
