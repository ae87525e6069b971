"""Find an order of tensors in which they fit shards of a given length, and the shortest length that bisection meets.

Everything here counts in pieces of the alignment. docs/design/planner.md, "Search" and "Proof" 5.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from dbuffer.planner.granularity import ShardBound, next_offset

# Tensors that the order looks ahead, and unit multiples tried before any other shard length.
_WINDOW, _STOPS = 8, 4
# Lengths tried between one that works and one that does not: as many for all tensors together.
_BISECTIONS = 2_000
# Legal starts looked at for a multiple among them.
_TRIES = 8

Sizes = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets for one shard length."""

    shard: int
    offsets: tuple[int, ...]


def shortest_layout(sizes: Sizes, num_shards: int, bound: ShardBound) -> Layout:
    """Find a short shard: try the bound, go up until a length works, and bisect.

    Args:
        sizes: for each tensor its slots and the unit that stays together; none empty.
        num_shards: shards to fill.
        bound: of these sizes.
    """
    first = bottom = top = bound.least(bound.floor)
    stride = max(unit for _, unit in sizes)
    # Where a shard is a multiple of a unit, tensors of that unit lie end to end: worth a visit on the way up.
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
    """Return offsets for this shard length, in the caller's order or in one that looks ahead; nothing if none fits."""
    room = shard * num_shards - sum(slots for slots, _ in sizes)
    return _in_order(range(len(sizes)), sizes, shard, room) or _in_order(_look_ahead(sizes, shard), sizes, shard, room)


def _in_order(order: Iterable[int], sizes: Sizes, shard: int, room: int) -> list[int]:
    """Place tensors, each at its first legal offset; return nothing when the gaps do not fit ``room``."""
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
    """Yield the caller's order, but each time the first of the next few tensors that leaves the least gap."""
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
    """Return offsets for the same shard length and order that are multiples of ``pieces``; as they were if none fit.

    A tensor that has no legal multiple near keeps a start that is none.
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
