"""Arena: offsets in one block of memory for buffers that come and go, known before the first of them comes.

This is dynamic storage allocation: rectangles, as wide as a buffer is held and as high as it is large, may move up and
down only, and the highest top should be low. It is NP-hard (Garey and Johnson, 1979, problem SR2). Two orders of
placing are tried, by size and by start, each buffer at the lowest or the tightest hole among those it meets; the best
is improved by moving what reaches the top to the front. The most bytes held at once are a lower bound for any
placement, and what is lost against it is part of the plan.
"""

from __future__ import annotations

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


def plan_arena(lifetimes: Sequence[Lifetime], *, alignment: int = ALIGNMENT, max_tries: int = 100) -> ArenaPlan:
    """Choose an offset for every buffer such that no two that are held at one time overlap.

    Args:
        lifetimes: of the buffers; times are any integers. Offsets come back in their order.
        max_tries: orders to try at most. Fewer are where one reaches the lower bound.
    """
    sizes = [aligned(lifetime.num_bytes, alignment) for lifetime in lifetimes]
    starts = [min((start for start, _ in lifetime.spans), default=0) for lifetime in lifetimes]
    neighbours, lower_bound = _meetings(lifetimes, sizes)
    orders = [
        sorted(range(len(sizes)), key=lambda item: (key[item], -sizes[item])) for key in ([0] * len(sizes), starts)
    ]
    best: tuple[int, list[int], list[int]] | None = None
    generator = random.Random(0)
    for number in range(max_tries):
        if best is not None and number >= len(orders):
            # What is at the top, something that it meets and anything else come first.
            top = [item for item, size in enumerate(sizes) if best[1][item] + size == best[0]]
            near = [other for item in top for other in sorted(neighbours[item])]
            moved = {generator.choice(top), generator.choice(near or top), generator.choice(best[2])}
            orders.append(sorted(best[2], key=lambda item: item not in moved))
        offsets = _placed(orders[number], sizes, neighbours, fits_tightly=number % 5 == 4)
        peak = max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)
        if best is None or peak <= best[0]:
            best = peak, offsets, orders[number]
        if best[0] == lower_bound:
            break
    assert best is not None
    return ArenaPlan(tuple(best[1]), best[0], lower_bound)


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """Return bytes rounded up to a multiple of the alignment."""
    return -(-num_bytes // alignment) * alignment


def hole(taken: Sequence[Span], size: int, *, fits_tightly: bool) -> int:
    """Return where the lowest hole of at least ``size`` begins, or the smallest such hole, or the end of all.

    Args:
        taken: bytes in use, in order.
    """
    best, best_size, end = -1, 0, 0
    for start, stop in taken:
        if start - end >= size and (best < 0 or start - end < best_size):
            best, best_size = end, start - end
            if not fits_tightly:
                return best
        end = max(end, stop)
    return end if best < 0 else best


def _placed(
    order: Sequence[int], sizes: Sequence[int], neighbours: Sequence[set[int]], *, fits_tightly: bool
) -> list[int]:
    offsets = [-1] * len(sizes)
    for item in order:
        near = [(offsets[other], offsets[other] + sizes[other]) for other in neighbours[item] if offsets[other] >= 0]
        offsets[item] = hole(sorted(near), sizes[item], fits_tightly=fits_tightly)
    return offsets


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
