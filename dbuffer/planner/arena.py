"""Arena: offsets in one block of memory for buffers that come and go, known before the first of them comes.

This is dynamic storage allocation: rectangles, as wide as a buffer is held and as high as it is large, may move up and
down only, and the highest top should be low. It is NP-hard (Garey and Johnson, 1979, problem SR2). The most bytes held
at once are a lower bound. Buffers are placed one by one, by start or by size, each as low, or as high below the bound,
as those before leave room that it meets. From the best of these, with all of them low or all high, annealing turns runs
of buffers near one that lies above the bound; what is placed after them moves only where it meets what has moved.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

ALIGNMENT = 512
"""Bytes that offsets are multiples of: what the CUDA caching allocator aligns its blocks to."""

Span = tuple[int, int]
"""From a time on, until before another."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of ``num_bytes`` that is held in each of ``spans``, at one place in all of them.

    Attributes:
        name: whatever tells it from others; the planner does not look at it.
    """

    num_bytes: int
    spans: tuple[Span, ...]
    name: Hashable = None


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """Where buffers lie.

    Attributes:
        offsets: of each buffer, in bytes, multiples of the alignment. num_bytes: of the whole arena.
        lower_bound: the most bytes that buffers, each rounded up to the alignment, hold at once.
    """

    offsets: tuple[int, ...]
    num_bytes: int
    lower_bound: int

    @property
    def gap(self) -> float:
        """How much larger the arena is than its lower bound, as a share of that; 0 where nothing is better."""
        return self.num_bytes / self.lower_bound - 1 if self.lower_bound else 0.0


def plan_arena(lifetimes: Sequence[Lifetime], *, alignment: int = ALIGNMENT, max_tries: int = 2000) -> ArenaPlan:
    """Choose an offset for every buffer such that no two that are held at one time overlap.

    Args:
        lifetimes: of the buffers; times are any integers. Offsets come back in their order.
        max_tries: changes to try at most. None are where one order reaches the lower bound.
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
    """Return bytes rounded up to a multiple of the alignment."""
    return -(-num_bytes // alignment) * alignment


def hole(taken: Sequence[Span], size: int) -> int:
    """Return where the lowest hole of at least ``size`` bytes begins, between what is taken or after it.

    Args:
        taken: bytes in use, in order.
    """
    end = 0
    for start, stop in taken:
        if start - end >= size:
            break
        end = max(end, stop)
    return end


class _Placing:
    """Buffers that are placed in an order; all lists go by their place in it.

    Attributes:
        sizes, offsets, is_high: of each. excess: how many bytes all of them together lie above the bound.
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
        self.excess = sum(map(self._above, range(len(order)), self.offsets))

    def _above(self, at: int, offset: int) -> int:
        return max(offset + self.sizes[at] - self._bound, 0)

    def _place(self, at: int, offsets: Sequence[int], is_high: bool) -> int:
        size = self.sizes[at]
        taken = [(offsets[other], offsets[other] + self.sizes[other]) for other in self._earlier[at]]
        if is_high:
            # The lowest hole upside down; there is none where it reaches below 0.
            upside_down = sorted((self._bound - stop, self._bound - start) for start, stop in taken)
            offset = self._bound - size - hole(upside_down, size)
            if offset >= 0:
                return offset
        return hole(sorted(taken), size)

    def improved(self, max_tries: int) -> list[int]:
        """Return better offsets, if some of the tries find any."""
        generator, least, best = random.Random(5), self.excess, self.offsets
        for _ in range(max_tries if self.excess else 0):
            at = generator.choice([at for at, offset in enumerate(self.offsets) if self._above(at, offset)])
            length = int(2 ** (1 + 4 * generator.random()))
            first = max(at - generator.randrange(length + 1), 0)
            end = generator.choice((True, False, None))
            is_high = self.is_high.copy()
            for near in range(first, min(first + length, len(is_high))):
                is_high[near] = generator.random() < 0.5 if end is None else end
            self._try(is_high, generator.random())
            if self.excess < least:
                least, best = self.excess, self.offsets
            if not least:
                break
        return best

    def _try(self, is_high: list[bool], chance: float) -> None:
        """Place what is turned, and what meets that, again; keep it where it is better, or worse by a small chance."""
        offsets, excess = self.offsets.copy(), self.excess
        waiting = [at for at, (one, other) in enumerate(zip(is_high, self.is_high, strict=True)) if one is not other]
        seen = set(waiting)
        while waiting:
            at = heapq.heappop(waiting)
            offset = self._place(at, offsets, is_high[at])
            if offset != offsets[at]:
                excess += self._above(at, offset) - self._above(at, offsets[at])
                offsets[at] = offset
                for other in self._later[at]:
                    if other not in seen:
                        seen.add(other)
                        heapq.heappush(waiting, other)
        # A tenth for what is worse by the largest buffer.
        if excess <= self.excess or chance < 0.1 ** ((excess - self.excess) / max(self.sizes)):
            self.offsets, self.is_high, self.excess = offsets, is_high, excess


def _meetings(lifetimes: Sequence[Lifetime], sizes: Sequence[int]) -> tuple[list[set[int]], int]:
    """Return for each buffer those that are held at some time with it, and the most bytes held at once."""
    # What ends at a time makes room for what begins at it.
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
    """Notes when buffers come and go, in the order in which it is told.

    Attributes:
        now: the number of what came and went.
    """

    def __init__(self) -> None:
        self.now = 0
        self._found: list[tuple[Hashable, int, int]] = []
        # When each that came went, by its number; the number of what is there now.
        self._ends: dict[int, int] = {}
        self._held: dict[Hashable, int] = {}

    def begin(self, buffer: Hashable, num_bytes: int) -> None:
        """Note that a buffer comes; one without bytes never does."""
        if num_bytes:
            self.now += 1
            self._held[buffer] = len(self._found)
            self._found.append((buffer, num_bytes, self.now))

    def end(self, buffer: Hashable) -> None:
        """Note that it goes; nothing where it was not there."""
        if buffer in self._held:
            self.now += 1
            self._ends[self._held.pop(buffer)] = self.now

    def lifetimes(self, start: int = 0) -> tuple[Lifetime, ...]:
        """Return what came, in that order, named by the buffer; what is there still is until the end.

        Args:
            start: the time at which it begins.
        """
        return tuple(
            Lifetime(num_bytes, ((start + begin, start + self._ends.get(number, self.now + 1)),), name)
            for number, (name, num_bytes, begin) in enumerate(self._found)
        )
