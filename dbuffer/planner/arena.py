"""Arena: fixed offsets in one block of memory for buffers with known lifetimes.

This is the dynamic storage allocation problem. Each buffer is a rectangle: its width is its lifetime, its height its
size. Rectangles may move only vertically, and the highest top shall be low. The problem is NP-hard (Garey and Johnson,
1979, problem SR2). The most bytes held at once are a lower bound.

Buffers are placed one by one, ordered by start or by size, each as low as possible, or as high as possible below the
bound, next to the buffers that it overlaps in time. That gives four plans: two orders, all low or all high. Annealing
improves the best of them. It picks a buffer that lies above the bound and flips neighbours in the order between low and
high. Later buffers move only if they meet a moved one.
"""

from __future__ import annotations

import heapq
import operator
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

ALIGNMENT = 512
"""Offsets are multiples of this many bytes, the block alignment of the CUDA caching allocator."""

Span = tuple[int, int]
"""A half-open interval: of time, (first, end), or of bytes, (offset, end)."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of ``num_bytes`` that is held during each of ``spans``, always at the same offset.

    Attributes:
        name: identifies the buffer for the caller; the planner does not use it.
    """

    num_bytes: int
    spans: tuple[Span, ...]
    name: Hashable = None


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """The offsets of all buffers in one arena.

    Attributes:
        offsets: offset of each buffer in bytes, a multiple of the alignment. num_bytes: size of the arena.
        lower_bound: the most bytes held at once, with each buffer rounded up to the alignment.
    """

    offsets: tuple[int, ...]
    num_bytes: int
    lower_bound: int

    @property
    def gap(self) -> float:
        """How much larger the arena is than its lower bound, relative to the bound; 0.0: the arena is optimal."""
        return self.num_bytes / self.lower_bound - 1 if self.lower_bound else 0.0


def plan_arena(lifetimes: Sequence[Lifetime], *, alignment: int = ALIGNMENT, max_tries: int = 2000) -> ArenaPlan:
    """Choose an offset for every buffer, such that no two buffers that are held at the same time overlap.

    Args:
        lifetimes: the buffers; times may be any integers. The offsets are returned in the same order.
        max_tries: the most annealing steps. None are taken if a first placement reaches the lower bound.
    """
    sizes = [aligned(lifetime.num_bytes, alignment) for lifetime in lifetimes]
    starts = [min((start for start, _ in lifetime.spans), default=0) for lifetime in lifetimes]
    neighbours, bound = _meetings(lifetimes, sizes)
    items = range(len(sizes))
    by_start = sorted(items, key=lambda item: (starts[item], -sizes[item]))
    by_size = sorted(items, key=lambda item: (-sizes[item], starts[item]))
    placings = [
        _Placing(order, sizes, neighbours, bound, is_high) for order in (by_start, by_size) for is_high in (False, True)
    ]
    best = min(placings, key=lambda placing: placing.excess)
    offsets = best.improved(max_tries)
    top = max((offset + size for offset, size in zip(offsets, best.sizes, strict=True)), default=0)
    return ArenaPlan(tuple(offset for _, offset in sorted(zip(best.order, offsets, strict=True))), top, bound)


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """Return ``num_bytes`` rounded up to a multiple of the alignment."""
    return -(-num_bytes // alignment) * alignment


def hole(taken: Sequence[Span], size: int) -> int:
    """Return the start of the lowest hole of at least ``size`` bytes, between the taken spans or after them.

    Args:
        taken: the byte spans in use, sorted.
    """
    end = 0
    for start, stop in taken:
        if start - end >= size:
            break
        end = max(end, stop)
    return end


class _Placing:
    """Buffers placed one after another. Lists are indexed by the position in that order.

    Attributes:
        sizes, offsets, is_high: of each buffer. above: the buffers that end above the bound. excess: by how many bytes
            these end above it, summed.
    """

    def __init__(
        self, order: list[int], sizes: Sequence[int], neighbours: Sequence[set[int]], bound: int, is_high: bool
    ) -> None:
        self.order = order
        self.sizes = [sizes[item] for item in order]
        self.is_high = [is_high] * len(order)
        self._bound = bound
        at_of = {item: at for at, item in enumerate(order)}
        near = [sorted(at_of[other] for other in neighbours[item]) for item in order]
        self._earlier = [[other for other in others if other < at] for at, others in enumerate(near)]
        self._later = [[other for other in others if other > at] for at, others in enumerate(near)]
        self.offsets: list[int] = []
        for at in range(len(order)):
            self.offsets.append(self._place(at, self.offsets, self.is_high[at]))
        self.above = {at for at, offset in enumerate(self.offsets) if self._above(at, offset)}
        self.excess = sum(self._above(at, self.offsets[at]) for at in self.above)

    @property
    def top(self) -> int:
        """The end of the highest buffer."""
        return max(map(operator.add, self.offsets, self.sizes), default=0)

    def _above(self, at: int, offset: int) -> int:
        return max(offset + self.sizes[at] - self._bound, 0)

    def _place(self, at: int, offsets: Sequence[int], is_high: bool) -> int:
        size = self.sizes[at]
        taken = [(offsets[other], offsets[other] + self.sizes[other]) for other in self._earlier[at]]
        if is_high:
            # The lowest hole in the mirrored arena; it is rejected if it reaches below offset 0.
            upside_down = sorted((self._bound - stop, self._bound - start) for start, stop in taken)
            offset = self._bound - size - hole(upside_down, size)
            if offset >= 0:
                return offset
        return hole(sorted(taken), size)

    def improved(self, max_tries: int) -> list[int]:
        """Return the best offsets found in ``max_tries`` annealing steps, or the present ones."""
        generator, least, best = random.Random(5), self.top, self.offsets
        for _ in range(max_tries if self.excess else 0):
            at = generator.choice(sorted(self.above))
            length = int(2 ** (1 + 4 * generator.random()))
            first = max(at - generator.randrange(length + 1), 0)
            end = generator.choice((True, False, None))
            run = range(first, min(first + length, len(self.order)))
            self._try({near: generator.random() < 0.5 if end is None else end for near in run}, generator.random())
            if (top := self.top) < least:
                least, best = top, self.offsets
            if not self.excess:
                break
        return best

    def _try(self, ends: dict[int, bool], chance: float) -> None:
        """Place the flipped buffers again, and those that meet them. Keep the result if better, seldom if worse."""
        offsets, is_high, above, excess = self.offsets.copy(), self.is_high.copy(), self.above.copy(), self.excess
        waiting = [at for at, end in ends.items() if is_high[at] is not end]
        for at in waiting:
            is_high[at] = ends[at]
        seen = set(waiting)
        while waiting:
            at = heapq.heappop(waiting)
            offset = self._place(at, offsets, is_high[at])
            if offset != offsets[at]:
                excess += self._above(at, offset) - self._above(at, offsets[at])
                offsets[at] = offset
                (above.add if self._above(at, offset) else above.discard)(at)
                for other in self._later[at]:
                    if other not in seen:
                        seen.add(other)
                        heapq.heappush(waiting, other)
        # A result that is worse by the size of the largest buffer is kept with probability 0.1.
        if excess <= self.excess or chance < 0.1 ** ((excess - self.excess) / max(self.sizes)):
            self.offsets, self.is_high, self.above, self.excess = offsets, is_high, above, excess


def _meetings(lifetimes: Sequence[Lifetime], sizes: Sequence[int]) -> tuple[list[set[int]], int]:
    """Return, for each buffer, the buffers that are held at the same time, and the most bytes held at once."""
    # At equal times ends sort before begins: a buffer that ends makes room for one that begins.
    changes = sorted(
        (time, is_begin, item)
        for item, lifetime in enumerate(lifetimes)
        if lifetime.num_bytes
        for span in lifetime.spans
        for time, is_begin in ((span[0], True), (span[1], False))
    )
    neighbours: list[set[int]] = [set() for _ in lifetimes]
    held, num_bytes, most = set[int](), 0, 0
    for _, is_begin, item in changes:
        num_bytes += sizes[item] if is_begin else -sizes[item]
        most = max(most, num_bytes)
        if is_begin:
            neighbours[item] |= held
            for other in held:
                neighbours[other].add(item)
            held.add(item)
        else:
            held.discard(item)
    return neighbours, most


class Recorder:
    """Records when buffers are allocated and released. Time is the number of events so far.

    Attributes:
        now: the number of recorded events.
    """

    def __init__(self) -> None:
        self.now = 0
        self._found: list[tuple[Hashable, int, int]] = []
        # Release times by allocation number; and the allocation number of each held buffer.
        self._ends: dict[int, int] = {}
        self._held: dict[Hashable, int] = {}

    def begin(self, buffer: Hashable, num_bytes: int) -> None:
        """Record an allocation. Empty buffers are ignored."""
        if num_bytes:
            self.now += 1
            self._held[buffer] = len(self._found)
            self._found.append((buffer, num_bytes, self.now))

    def end(self, buffer: Hashable) -> None:
        """Record a release. Unknown buffers are ignored."""
        if buffer in self._held:
            self.now += 1
            self._ends[self._held.pop(buffer)] = self.now

    def lifetimes(self, start: int = 0) -> tuple[Lifetime, ...]:
        """Return the lifetimes in order of allocation, named by buffer. Held buffers end after the last event.

        Args:
            start: added to all times.
        """
        return tuple(
            Lifetime(num_bytes, ((start + begin, start + self._ends.get(number, self.now + 1)),), name)
            for number, (name, num_bytes, begin) in enumerate(self._found)
        )
