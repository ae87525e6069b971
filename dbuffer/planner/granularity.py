"""Granularity: where a shard boundary may cut a tensor: between elements, rows, or blocks of rows, or nowhere.

Each tensor has its own granularity. One flat buffer may hold a matrix cut between rows, a quantised weight cut between
blocks of 128 rows, and a bias cut anywhere. docs/design/planner.md, "Proof" 1 to 4, shows how short a shard may be with
these cuts, whatever the order of the tensors.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dbuffer.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Element:
    """Cut anywhere: needs least padding, but a shard may hold part of a row."""

    def unit_numel(self, shape: Sequence[int]) -> int:
        """Return 1: single elements may be separated."""
        return 1

    def describe(self, shape: Sequence[int]) -> str:
        """Return the name of the unit that is never cut: ``elements``."""
        return "elements"


@dataclass(frozen=True, slots=True)
class Row:
    """Cut only between rows: a row is the last dim, and all dims before it count as rows.

    A (8, 28672, 4096) expert weight has 8 * 28672 rows of 4096; a bias has rows of one element.
    """

    def unit_numel(self, shape: Sequence[int]) -> int:
        """Return the number of elements of one row."""
        return row_numel(shape)

    def describe(self, shape: Sequence[int]) -> str:
        """Return the name of the unit that is never cut, such as ``rows of 4096``."""
        return f"rows of {row_numel(shape)}"


@dataclass(frozen=True, slots=True)
class Block:
    """Cut only between blocks of ``rows`` rows, counted from the first row; the last block may be short.

    Raises:
        LayoutError: ``rows`` is not a positive integer.
    """

    rows: int

    def __post_init__(self) -> None:
        if type(self.rows) is not int or self.rows < 1:
            raise LayoutError(
                f"Block(rows={self.rows!r}): rows must be an integer >= 1. fix: use Row() for single rows"
            )

    def unit_numel(self, shape: Sequence[int]) -> int:
        """Return the number of elements of ``rows`` rows. If that exceeds the tensor, the tensor is never cut."""
        return self.rows * row_numel(shape)

    def describe(self, shape: Sequence[int]) -> str:
        """Return the name of the unit that is never cut, such as ``blocks of 128 rows of 4096``."""
        return f"blocks of {self.rows} rows of {row_numel(shape)}"


@dataclass(frozen=True, slots=True)
class Whole:
    """Never cut: one shard stores the whole tensor."""

    def unit_numel(self, shape: Sequence[int]) -> int:
        """Return the number of elements of the tensor."""
        return math.prod(shape)

    def describe(self, shape: Sequence[int]) -> str:
        """Return the name of the unit that is never cut: here all elements of the tensor."""
        return f"all {math.prod(shape)} elements"


Granularity: TypeAlias = Element | Row | Block | Whole


def row_numel(shape: Sequence[int]) -> int:
    """Return the number of elements of one row: the size of the last dim, but 1 for 1-D and 0-d tensors."""
    return shape[-1] if len(shape) >= 2 else 1


def granularity_per_tensor(granularity: Granularity | Sequence[Granularity], count: int) -> tuple[Granularity, ...]:
    """Return one granularity for each of ``count`` tensors; ``granularity`` is one for all, or one per tensor.

    Raises:
        LayoutError: the list has another length, or an entry is not a granularity (e.g. a class, not an instance).
    """
    kinds = (Element, Row, Block, Whole)
    if isinstance(granularity, kinds):
        return (granularity,) * count
    if not isinstance(granularity, Sequence):
        raise LayoutError(
            f"granularity is {granularity!r}. fix: give Element(), Row(), Block(rows), Whole() or a list of these"
        )
    for tensor, entry in enumerate(granularity):
        if not isinstance(entry, kinds):
            raise LayoutError(
                f"granularity of tensor {tensor} is {entry!r}. fix: give an instance, such as Element() or Row()"
            )
    if len(granularity) != count:
        raise LayoutError(
            f"{len(granularity)} granularities for {count} tensors. fix: give one for all, or one for each"
        )
    return tuple(granularity)


def aligned_sizes(
    shapes: Sequence[tuple[int, ...]], granularities: Sequence[Granularity], alignment: int
) -> list[tuple[int, int]]:
    """Return (size, unit) of each tensor, both in pieces of ``alignment`` elements; a unit is never cut.

    Offsets and shards are aligned, so a cut is legal only at a common multiple of the granularity's unit and the
    alignment. A tensor that is never cut is one unit. An empty tensor has size 0.
    """
    tables: dict[Granularity, dict[tuple[int, ...], tuple[int, int]]] = {}
    sizes, last = [], None
    for shape, granularity in zip(shapes, granularities, strict=True):
        if granularity is not last:
            known, last = tables.setdefault(granularity, {}), granularity
        size = known.get(shape)
        if size is None:
            slots = -(-math.prod(shape) // alignment)
            unit = math.lcm(granularity.unit_numel(shape), alignment) // alignment
            size = known[shape] = slots, max(1, min(slots, unit))
        sizes.append(size)
    return sizes


def next_offset(cursor: int, numel: int, unit: int, shard_numel: int) -> int:
    """Return the first offset, from ``cursor`` on, at which no shard boundary cuts a unit of the tensor.

    The result never decreases when ``cursor`` grows. A tensor that spans two boundaries or more must have a unit that
    divides ``shard_numel``; ``two_piece_shard`` says which tensors do.
    """
    room = shard_numel - cursor % shard_numel
    if numel <= room:
        return cursor
    if shard_numel % unit == 0:
        return -(-cursor // unit) * unit
    cut = room // unit * unit
    if cut and numel - cut <= shard_numel:
        return cursor + room - cut
    return cursor + room + (0 if numel <= shard_numel else shard_numel % unit)


def two_piece_shard(numel: int, unit: int) -> int:
    """Return the shortest shard that holds the tensor in at most two pieces of whole units; ``unit <= numel``."""
    below = numel // 2 // unit * unit
    above = below + unit
    return min(numel - below if below else numel, above if above < numel else numel)


@dataclass(frozen=True, slots=True)
class ShardBound:
    """The conditions that a shard length must satisfy.

    Attributes:
        floor: the smallest length at which the shards hold all data, with every unit whole.
        crowded: the unit size that determines ``floor``; 0 if the amount of data does.
        forcing: distinct units, in descending order of ``halves``.
        halves: entry n belongs to ``forcing[n]``: a shard shorter than this must be a multiple of that unit.
        multiples: entry n is the least common multiple of the first n units of ``forcing``.
    """

    floor: int
    crowded: int
    forcing: tuple[int, ...]
    halves: tuple[int, ...]
    multiples: tuple[int, ...]

    def least(self, at_least: int) -> int:
        """Return the smallest permitted shard length that is at least ``at_least``."""
        forced = sum(half > at_least for half in self.halves)
        while forced:
            shard = -(-at_least // self.multiples[forced]) * self.multiples[forced]
            if shard < self.halves[forced - 1]:
                return shard
            at_least = self.halves[forced - 1]
            forced -= 1
        return at_least


def shard_bound(kinds: Counter[tuple[int, int]], num_shards: int) -> ShardBound:
    """Return the bound for tensors given as counts per (size, unit)."""
    half_of: dict[int, int] = {}
    pieces: Counter[int] = Counter()
    data = 0
    for (slots, unit), count in kinds.items():
        half = two_piece_shard(slots, unit)
        if half > half_of.get(unit, 0):
            half_of[unit] = half
        whole, tail = divmod(slots, unit)
        pieces[unit] += whole * count
        if tail:
            pieces[tail] += count
        data += slots * count
    forcing = sorted(half_of, key=lambda unit: (-half_of[unit], unit))
    multiples = [1]
    for unit in forcing:
        # Multiples above the largest half are never tried, so stop before many odd widths give a huge integer.
        multiples.append(multiples[-1] if multiples[-1] > half_of[forcing[0]] else math.lcm(multiples[-1], unit))
    floor, crowded, seen = -(-data // num_shards), 0, 0
    for size in sorted(pieces, reverse=True):
        seen += pieces[size]
        if -(-seen // num_shards) * size > floor:
            floor, crowded = -(-seen // num_shards) * size, size
    return ShardBound(floor, crowded, tuple(forcing), tuple(half_of[unit] for unit in forcing), tuple(multiples))
