"""How the ranks of a mesh exchange the packed gradients of a group, and where they receive them: numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dbuffer import Flat
from dbuffer.placements import BufferPlacement

__all__ = ["Cut", "ExchangePlan", "Hop", "cut_order", "gather_turns", "num_counters", "piece_of"]

_ALIGNMENT = 16


def piece_of(numel: int, size: int, rank: int) -> slice:
    """Return which elements one rank of an axis adds up, of so many: the last ranks have fewer, or none."""
    share = -(-numel // size)
    return slice(min(rank * share, numel), min((rank + 1) * share, numel))


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def gather_turns(numel: int, size: int, scratch_bytes: int, itemsize: int) -> list[slice]:
    """Return the parts of each rank's piece of so many elements that are gathered by way of scratch, one at a time."""
    step = max(scratch_bytes // itemsize // size, 1)
    return [slice(start, start + step) for start in range(0, -(-numel // size), step)]


def num_counters(num_leaves: int) -> int:
    """Return the most tensors that a binary counter holds while it adds up so many."""
    return (num_leaves + 1).bit_length() - 1


def cut_order(sizes: Sequence[int], placements: Sequence[BufferPlacement]) -> list[int]:
    """Return the axes that gradients are exchanged over: those of shards first, from major to minor.

    What the optimizer holds whole is cut after them.
    """
    axes = (index for index in range(len(sizes)) if sizes[index] > 1)
    return sorted(axes, key=lambda index: (placements[index] != Flat(), -index))


@dataclass(frozen=True, slots=True)
class Cut:
    """An axis that is exchanged over: its number of ranks, and this one's place."""

    size: int
    rank: int


@dataclass(frozen=True, slots=True)
class Hop:
    """One exchange over an axis: each rank keeps its piece of a row, and receives the others' rows of that piece.

    Attributes:
        axis: position of the axis. row: position of the row that is cut. pieces: of the row, by rank.
        start: in scratch, of what others send; below 0: it lies in the packed buffer, from ``-1 - start`` on.
    """

    axis: int
    row: int
    pieces: tuple[slice, ...]
    start: int


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """All exchanges of a packed buffer.

    Attributes:
        scratch_numel: elements of scratch that they receive in on the rank that needs the most.
        num_ranks: of the longest axis.
    """

    hops: tuple[Hop, ...]
    scratch_numel: int
    num_ranks: int

    @classmethod
    def of(cls, numel: int, cuts: Sequence[Cut]) -> ExchangePlan:
        """Return the plan for a buffer of ``numel`` elements, cut over one axis after the other.

        What was sent over the first axis is of no use any more, so what comes over the second is received there.
        """
        hops: list[Hop] = []
        rows, scratch = [numel], 0
        sent: dict[int, slice] = {}
        for position, cut in enumerate(cuts):
            pieces = [tuple(piece_of(row, cut.size, rank) for rank in range(cut.size)) for row in rows]
            for row, each in enumerate(pieces):
                needed = (cut.size - 1) * _length(each[cut.rank])
                if row in sent and needed <= _length(sent[row]):
                    hops.append(Hop(position, row, each, -1 - sent[row].start))
                else:
                    hops.append(Hop(position, row, each, scratch))
                    scratch += needed
            sent = {rank: piece for rank, piece in enumerate(pieces[0]) if position == 0 and rank != cut.rank}
            rows = [_length(each[cut.rank]) for _ in range(cut.size) for each in pieces]
        if any(cut.rank for cut in cuts):
            # The first rank's pieces are the longest.
            scratch = cls.of(numel, [Cut(cut.size, 0) for cut in cuts]).scratch_numel
        return cls(tuple(hops), scratch, max((cut.size for cut in cuts), default=0))

    def scratch_bytes(self, itemsize: int) -> int:
        """Return the bytes of scratch, the same on all ranks, as they are laid out one group after the other.

        At least enough for an element of any dtype from each rank.
        """
        if not self.scratch_numel:
            return 0
        return max(-(-self.scratch_numel * itemsize // _ALIGNMENT), self.num_ranks) * _ALIGNMENT
