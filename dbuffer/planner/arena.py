"""Arena: offsets in one block of memory for buffers that come and go, known before the first of them comes.

This is dynamic storage allocation: rectangles, as wide as a buffer is held and as high as it is large, may move up and
down only, and the highest top should be low. It is NP-hard (Garey and Johnson, 1979, problem SR2), so several orders
of placing are tried, each buffer at the lowest or the tightest hole among those it meets, and the best order is
improved by moving what reaches the top to the front. The most bytes held at once are a lower bound for any placement,
and what is lost against it is part of the plan.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["ALIGNMENT", "ArenaPlan", "Lifetime", "Recorder", "aligned", "hole", "plan_arena"]

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
        max_tries: orders to try at most, beyond a dozen. Fewer are where one reaches the lower bound.
    """
    sizes = [aligned(lifetime.num_bytes, alignment) for lifetime in lifetimes]
    stretches = _stretches(lifetimes, sizes)
    lower_bound = max((stretch.num_bytes for stretch in stretches), default=0)
    search = _Search(sizes, _neighbours(lifetimes), lower_bound)
    for order in _orders(lifetimes, sizes, stretches):
        for fits_tightly in (False, True):
            search.try_order(order, fits_tightly=fits_tightly)
    search.improve(max_tries)
    return ArenaPlan(tuple(search.offsets), search.peak, search.lower_bound)


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """Return bytes rounded up to a multiple of the alignment."""
    return -(-num_bytes // alignment) * alignment


class Recorder:
    """Notes when buffers come and go, in the order in which it is told.

    Args:
        held: the buffers that are there at the start, with their bytes.
    """

    def __init__(self, held: Mapping[Hashable, int] | None = None) -> None:
        self._first = dict(held or {})
        # What comes, its bytes, and whether it comes ahead; 0 bytes: it goes.
        self._events: list[tuple[Hashable, int, bool]] = []

    def begin(self, buffer: Hashable, num_bytes: int, *, comes_ahead: bool = False) -> None:
        """Note that a buffer comes; one without bytes never does.

        Args:
            comes_ahead: once the order is known, such buffers come before those that came before them go. Where these
                have gone already, both count as there at once.
        """
        if num_bytes:
            self._events.append((buffer, num_bytes, comes_ahead))

    def end(self, buffer: Hashable) -> None:
        """Note that it goes; nothing where it was not there."""
        self._events.append((buffer, 0, False))

    @property
    def num_begun(self) -> int:
        """How many came."""
        return sum(num_bytes > 0 for _, num_bytes, _ in self._events)

    def __len__(self) -> int:
        return len(self._events)

    def held(self) -> dict[Hashable, int]:
        """Return the buffers that are there now, with their bytes."""
        found = dict(self._first)
        for buffer, num_bytes, _ in self._events:
            if num_bytes:
                found[buffer] = num_bytes
            else:
                found.pop(buffer, None)
        return found

    def lifetimes(self, start: int = 0) -> tuple[Lifetime, ...]:
        """Return what was there at the start and what came, in that order, named by the buffer.

        A buffer that is there at the start and at the end is at one place then: the end is followed by the start.

        Args:
            start: the time at which it begins.
        """
        found: list[tuple[Hashable, int, list[Span]]] = [(name, size, []) for name, size in self._first.items()]
        held = {name: (number, 0) for number, name in enumerate(self._first)}
        gone: dict[Hashable, int] = {}
        ahead = _Ahead()
        for now, (buffer, num_bytes, comes_ahead) in enumerate(self._events, start=1):
            if num_bytes:
                since = max(ahead.since(buffer, now, held), gone.get(buffer, 0)) if comes_ahead else 2 * now
                held[buffer] = len(found), since
                found.append((buffer, num_bytes, []))
            elif buffer in held:
                ahead.is_over = True
                number, since = held.pop(buffer)
                gone[buffer] = 2 * now
                found[number][2].append((since, 2 * now))
        end = 2 * len(self._events) + 2
        numbers = {name: number for number, name in enumerate(self._first)}
        for name, (number, since) in held.items():
            found[number][2].append((since, end))
            # One place at the end and at the start.
            first = numbers.get(name, number)
            if first != number:
                found[number][2].extend(found[first][2])
                found[first][2].clear()
        return tuple(
            Lifetime(size, tuple((begin + start, stop + start) for begin, stop in spans), name)
            for name, size, spans in found
        )


@dataclass(slots=True)
class _Ahead:
    """The buffers that came last among those that come ahead, with nothing gone in between.

    Attributes:
        is_over: something has gone since.
    """

    is_over: bool = True
    _members: list[Hashable] = field(default_factory=list)
    _latest: int = 0
    _since: int | None = None

    def since(self, buffer: Hashable, now: int, held: Container[Hashable]) -> int:
        """Return since when a buffer counts as there."""
        if self.is_over:
            has_gone = bool(self._members) and not any(member in held for member in self._members)
            self._since = 2 * self._latest + 1 if has_gone else None
            self._members.clear()
            self.is_over = False
        self._members.append(buffer)
        self._latest = now
        return 2 * now if self._since is None else self._since


class _Search:
    """The best placement so far.

    Attributes:
        offsets: of it. peak: its highest top.
    """

    def __init__(self, sizes: Sequence[int], neighbours: Sequence[Sequence[int]], lower_bound: int) -> None:
        self.lower_bound = lower_bound
        self.offsets = [0] * len(sizes)
        self.peak = 0
        self._sizes = sizes
        self._neighbours = neighbours
        self._order: list[int] = []
        self._fits_tightly = False

    def try_order(self, order: Sequence[int], *, fits_tightly: bool) -> None:
        """Place buffers in an order, and keep the outcome if it is no higher."""
        if self._order and self.peak == self.lower_bound:
            return
        offsets = _placed(order, self._sizes, self._neighbours, fits_tightly=fits_tightly)
        peak = max((offset + size for offset, size in zip(offsets, self._sizes, strict=True)), default=0)
        if not self._order or peak <= self.peak:
            self.offsets, self.peak = offsets, peak
            self._order, self._fits_tightly = list(order), fits_tightly

    def improve(self, num_tries: int) -> None:
        """Move buffers at the top, one that they meet and any other to the front of the best order, and try again."""
        generator = random.Random(0)
        for _ in range(num_tries):
            if self.peak == self.lower_bound:
                return
            top = [item for item, size in enumerate(self._sizes) if self.offsets[item] + size == self.peak]
            near = [other for item in top for other in self._neighbours[item]]
            moved = {generator.choice(top), generator.choice(near or top), generator.choice(self._order)}
            order = sorted(self._order, key=lambda item: item not in moved)
            self.try_order(order, fits_tightly=self._fits_tightly ^ (generator.random() < 0.2))


def _placed(
    order: Sequence[int], sizes: Sequence[int], neighbours: Sequence[Sequence[int]], *, fits_tightly: bool
) -> list[int]:
    offsets = [-1] * len(sizes)
    for item in order:
        near = [(offsets[other], offsets[other] + sizes[other]) for other in neighbours[item] if offsets[other] >= 0]
        offsets[item] = hole(sorted(near), sizes[item], fits_tightly=fits_tightly)
    return offsets


def hole(taken: Sequence[Span], size: int, *, fits_tightly: bool) -> int:
    """Return where the lowest hole of at least ``size`` begins, or the smallest such hole, or the end of all.

    Args:
        taken: bytes in use, in order.
    """
    best, best_size, end = -1, 0, 0
    for start, stop in taken:
        hole = start - end
        if hole >= size and (best < 0 or hole < best_size):
            best, best_size = end, hole
            if not fits_tightly:
                return best
        end = max(end, stop)
    return end if best < 0 else best


def _orders(lifetimes: Sequence[Lifetime], sizes: Sequence[int], stretches: Sequence[_Stretch]) -> Iterator[list[int]]:
    """Yield orders to place buffers in: by size, from the times at which most is held outwards, by area, by length."""
    lengths = [sum(stop - start for start, stop in lifetime.spans) for lifetime in lifetimes]
    starts = [min((start for start, _ in lifetime.spans), default=0) for lifetime in lifetimes]
    stops = [stretch.stop for stretch in stretches]
    away = [
        min((stretches[bisect_left(stops, span[1])].distance(span) for span in lifetime.spans), default=0)
        if lifetime.num_bytes
        else 0
        for lifetime in lifetimes
    ]
    items = range(len(sizes))
    yield sorted(items, key=lambda item: (-sizes[item], starts[item]))
    yield sorted(items, key=lambda item: (away[item], -sizes[item]))
    yield sorted(items, key=lambda item: (-sizes[item] * lengths[item], starts[item]))
    yield sorted(items, key=lambda item: (-lengths[item], -sizes[item]))
    yield sorted(items, key=lambda item: (starts[item], -sizes[item]))
    yield sorted(items, key=lambda item: (-starts[item], -sizes[item]))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Time between two at which nothing is held: its end, the most bytes held, and the times since when so much is."""

    stop: int
    num_bytes: int
    fullest: tuple[int, ...]

    def distance(self, span: Span) -> int:
        """Return how far a span is from the nearest of the fullest times, 0 where one lies in it."""
        after = bisect_left(self.fullest, span[0])
        gaps = [span[0] - self.fullest[after - 1]] if after else []
        gaps += [max(self.fullest[after] - span[1] + 1, 0)] if after < len(self.fullest) else []
        return min(gaps)


def _changes(lifetimes: Sequence[Lifetime]) -> list[tuple[int, bool, int]]:
    """Return all begins and ends by time; what ends at a time makes room for what begins at it."""
    return sorted(
        (time, is_begin, item)
        for item, lifetime in enumerate(lifetimes)
        if lifetime.num_bytes
        for span in lifetime.spans
        for time, is_begin in ((span[0], True), (span[1], False))
    )


def _stretches(lifetimes: Sequence[Lifetime], sizes: Sequence[int]) -> list[_Stretch]:
    found: list[_Stretch] = []
    held, most = 0, 0
    times: list[int] = []
    for time, is_begin, item in _changes(lifetimes):
        held += sizes[item] if is_begin else -sizes[item]
        if is_begin and held >= most:
            times = [*times, time] if held == most else [time]
            most = held
        if not held:
            found.append(_Stretch(time, most, tuple(times)))
            most, times = 0, []
    return found


def _neighbours(lifetimes: Sequence[Lifetime]) -> list[list[int]]:
    """Return for each buffer those that are held at some time with it."""
    found: list[set[int]] = [set() for _ in lifetimes]
    held: set[int] = set()
    for _, is_begin, item in _changes(lifetimes):
        if not is_begin:
            held.discard(item)
            continue
        for other in held:
            found[other].add(item)
        found[item] |= held
        held.add(item)
    return [sorted(others) for others in found]
