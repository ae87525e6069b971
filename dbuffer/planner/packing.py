"""Search for an order of tensors in which they fit shards of a given length, and for the shortest such length.

Everything here counts in pieces of the alignment. Steps are counted, not timed, so that all ranks find the same.
docs/design/planner.md, "Search" and "Proof" 5 and 6.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

from dbuffer.planner.granularity import ShardBound, next_offset

# Tensors that the cheap order looks ahead, and unit multiples tried before any other shard length.
_WINDOW, _STOPS = 8, 4
# Tensors whose starts are moved one by one where not all can be, and legal starts looked at for each.
_MAX_MOVED, _TRIES = 512, 8

Sizes = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets for one shard length, and the length below which no layout exists."""

    shard: int
    offsets: tuple[int, ...]
    proved: int


def shortest_layout(sizes: Sizes, num_shards: int, bound: ShardBound, steps: int) -> Layout:
    """Find a short shard: try the bound, else bracket and bisect, then take or refute what lies below the find.

    Args:
        sizes: for each tensor its slots and the unit that stays together; none empty.
        num_shards: shards to fill.
        bound: of these sizes.
        steps: to take besides a few passes over the tensors, each about 0.3 microseconds.
    """
    attempts = _Attempts(sizes, num_shards, steps + 4 * len(sizes))
    proved = bound.least(bound.floor)
    best = _bracketed(attempts, sizes, bound, proved)
    best, proved = _tightened(attempts, bound, best, proved)
    return Layout(best, attempts.found[best], proved)


def _bracketed(attempts: "_Attempts", sizes: Sizes, bound: ShardBound, first: int) -> int:
    """Return the first shard length that works, of lengths ever further up."""
    stride = max(unit for _, unit in sizes)
    # Where a shard is a multiple of a unit, tensors of that unit lie end to end: worth a visit on the way up.
    multiples = {*bound.forcing[:_STOPS], *bound.multiples[: _STOPS + 1]}
    stops = sorted({bound.least(-(-first // multiple) * multiple) for multiple in multiples})
    best = first
    while attempts.at(best) is None:
        best = min(stop for stop in [*stops, bound.least(best + stride)] if stop > best)
        stride *= 2
    return best


def _tightened(attempts: "_Attempts", bound: ShardBound, best: int, proved: int) -> tuple[int, int]:
    """Return a shard length that works and one below which none does, from such two, closer while steps last."""
    bottom, top = proved, best
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
    return best, min(proved, best)


class _Attempts:
    """Layouts tried for one set of tensors, by shard length; with no steps left, only the cheap orders are tried."""

    def __init__(self, sizes: Sizes, num_shards: int, steps: int) -> None:
        self.steps_left = steps
        self.found: dict[int, tuple[int, ...]] = {}
        self.refuted: set[int] = set()
        self._failed: set[int] = set()
        self._sizes = sizes
        self._num_shards = num_shards
        self._total = sum(slots for slots, _ in sizes)
        self._num_kinds = len(set(sizes))
        self._members: dict[tuple[int, int], list[int]] = {}

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
        sizes, offsets, cursor = self._sizes, [0] * len(self._sizes), 0
        gaps_left = shard * self._num_shards - self._total
        self.steps_left -= len(sizes) // 2
        for index in order:
            slots, unit = sizes[index]
            if slots > shard - cursor % shard:
                start = next_offset(cursor, slots, unit, shard)
                gaps_left -= start - cursor
                if gaps_left < 0:
                    return []
                cursor = start
            offsets[index] = cursor
            cursor += slots
        return offsets

    def _orders(self, shard: int) -> Iterator[Iterable[int]]:
        """Yield orders worth trying: the caller's own, one that looks ahead, then what a search over orders finds."""
        yield range(len(self._sizes))
        yield self._look_ahead(shard)
        width = self.steps_left // (2 * self._num_kinds * len(self._sizes))
        if width > 0:
            yield from self._sequence(shard, width)

    def _look_ahead(self, shard: int) -> Iterator[int]:
        """Yield the caller's order, but each time the first of the next few tensors that leaves the least gap."""
        sizes, cursor = self._sizes, 0
        waiting = iter(range(len(sizes)))
        window = list(islice(waiting, _WINDOW))
        while window:
            chosen, start, room = -1, -1, shard - cursor % shard
            for index in window:
                slots, unit = sizes[index]
                offset = cursor if slots <= room else next_offset(cursor, slots, unit, shard)
                if chosen < 0 or offset < start:
                    chosen, start = index, offset
                self.steps_left -= 1
                if start == cursor:
                    break
            yield chosen
            cursor = start + sizes[chosen][0]
            window.remove(chosen)
            window.extend(islice(waiting, 1))

    def _sequence(self, shard: int, width: int) -> Iterator[list[int]]:
        """Search all orders for one that fits and yield it; note a refutation if the search was exhaustive.

        A state counts the placed tensors of each size in mixed-radix digits. Of all ways into a state only the one with
        the smallest gaps matters, because the first legal offset never decreases with the cursor. A level beyond
        ``width`` states keeps the most promising, and the search is no longer exhaustive.
        """
        if not self._members:
            # Coarse units first: they win among equal states, since fine ones can still close a gap later.
            order = sorted(range(len(self._sizes)), key=lambda index: -self._sizes[index][1])
            for index in order:
                self._members.setdefault(self._sizes[index], []).append(index)
        slack, kinds, stride = shard * self._num_shards - self._total, [], 1
        for kind, ((slots, unit), members) in enumerate(self._members.items()):
            kinds.append((kind, slots, unit, stride, len(members) + 1, shard % unit))
            stride *= len(members) + 1
        level: _Level = {0: (0, 0, 0)}
        history, is_exhaustive = [], True
        for _ in self._sizes:
            self.steps_left -= len(level) * len(kinds)
            level = _following(level, kinds, shard, slack)
            if len(level) > width:
                is_exhaustive = False
                level = dict(sorted(level.items(), key=itemgetter(1))[:width])
            history.append(level)
            if not level:
                break
        if level:
            yield self._traced(history, [kind[3] for kind in kinds])
        elif is_exhaustive:
            self.refuted.add(shard)

    def _traced(self, history: list["_Level"], weights: list[int]) -> list[int]:
        """Return the order of tensors that led to the last state; equal tensors keep the caller's order."""
        members, order = [list(group) for group in self._members.values()], []
        (state,) = history[-1]
        for level in reversed(history):
            kind = level[state][1]
            order.append(members[kind].pop())
            state -= weights[kind]
        return order[::-1]


# State -> gaps so far, last kind, slots placed times -1: the less, the better. Tuples, for this is the innermost loop.
_Level = dict[int, tuple[int, int, int]]
# Number, slots, unit, weight of its digit, radix of its digit, shard modulo unit.
_Kind = tuple[int, int, int, int, int, int]


def _following(level: _Level, kinds: list[_Kind], shard: int, slack: int) -> _Level:
    """Return the states one tensor further, each with the smallest gaps; ``next_offset`` is written out for speed."""
    following: _Level = {}
    for state, (gaps, _, unplaced) in level.items():
        cursor = gaps - unplaced
        room = shard - cursor % shard
        for kind, slots, unit, weight, radix, excess in kinds:
            if (state // weight + 1) % radix == 0:
                continue
            if slots <= room:
                wasted = gaps
            elif not excess:
                wasted = gaps + -cursor % unit
            else:
                cut = room - room % unit
                if cut and slots - cut <= shard:
                    wasted = gaps + room - cut
                else:
                    wasted = gaps + room + (excess if slots > shard else 0)
            if wasted <= slack:
                known = following.get(state + weight)
                if known is None or wasted < known[0]:
                    following[state + weight] = (wasted, kind, unplaced - slots)
    return following


def aligned_starts(layout: Layout, sizes: Sizes, num_shards: int, pieces: int) -> tuple[int, ...]:
    """Return offsets for the same shard length of which as many as fit, from the front on, are multiples of ``pieces``.

    The order of the tensors is kept, and every offset stays legal.
    """
    order = sorted(range(len(sizes)), key=layout.offsets.__getitem__)
    end = layout.shard * num_shards

    def moved(num_moved: int) -> list[int]:
        offsets, cursor = [0] * len(sizes), 0
        for position, index in enumerate(order):
            slots, unit = sizes[index]
            start = next_offset(cursor, slots, unit, layout.shard)
            if position < num_moved and start % pieces:
                start = _aligned_offset(start, sizes[index], layout.shard, pieces)
            offsets[index], cursor = start, start + slots
        return offsets if cursor <= end else []

    if not any(offset % pieces for offset in layout.offsets):
        return layout.offsets
    if found := moved(len(sizes)):
        return tuple(found)
    if len(sizes) > _MAX_MOVED:
        return layout.offsets
    fitting, tight = 0, len(sizes)
    while fitting + 1 < tight:
        middle = (fitting + tight) // 2
        if moved(middle):
            fitting = middle
        else:
            tight = middle
    return tuple(moved(fitting)) if fitting else layout.offsets


def _aligned_offset(first: int, size: tuple[int, int], shard: int, pieces: int) -> int:
    """Return the first legal multiple of ``pieces`` from a legal offset on, or that offset if none is near."""
    start = first
    for _ in range(_TRIES):
        start = next_offset(-(-start // pieces) * pieces, *size, shard)
        if start % pieces == 0:
            return start
    return first
