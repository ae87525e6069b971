"""Ownership: which rank makes which matrix semi-orthogonal, as a plan of integers that all ranks work out alike.

Any rank may own a matrix, not only those that hold a piece of it: the longest work first, to the rank with the least
so far (LPT; Graham, "Bounds on multiprocessing timing anomalies", 1969); among equals to the one that holds most of
the matrix. With ``max_team`` above 1 a matrix that is too much work for one rank goes to a run of neighbours, each of
which takes a part of its long side.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_fsdp.optim.matrix_views import MatrixBlock
from megatron_fsdp.optim.newton_schulz import newton_schulz_flops, team_flops

__all__ = ["MatrixWork", "Ownership", "Share", "holders_of", "plan_ownership"]

_MAX_TRIALS = 40
_GOOD_ENOUGH = 1.01
# Beyond so many matrices for each rank LPT alone is within a percent, and trials would take long.
_MANY_PER_RANK = 32


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """One matrix.

    Attributes:
        name: of its parameter. block: where in the parameter it lies.
        holders: the shards that hold some of the parameter, with the range of its flattened elements that each has.
        num_steps: of Newton-Schulz.
    """

    name: str
    block: MatrixBlock
    holders: tuple[tuple[int, range], ...]
    num_steps: int = 5

    def flops(self, size: int = 1) -> int:
        """Return the operations of each of ``size`` ranks that share the matrix."""
        rows, columns = self.block.rows, self.block.columns
        if size == 1:
            return newton_schulz_flops(rows, columns, self.num_steps)
        return team_flops(rows, columns, size, self.num_steps)


@dataclass(frozen=True, slots=True)
class Share:
    """A matrix, or one member's part of it, and who works on it.

    Attributes:
        work: position of the matrix. part, size: which part of how many. owner: a rank; see ``Ownership``.
    """

    work: int
    part: int
    size: int
    owner: int


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who owns what.

    Ranks are numbered ``replica * num_shards + shard``: replicas are groups of ranks that hold all shards together.

    Attributes:
        works: the matrices. shares: in order of the matrices, then of their parts.
        num_shards, num_replicas: of the ranks. load_flops, owned_numel: of each rank.
        received_numel: elements that each rank receives in a step: matrices that it owns, updates of what it holds.
    """

    works: tuple[MatrixWork, ...]
    shares: tuple[Share, ...]
    num_shards: int
    num_replicas: int
    load_flops: tuple[int, ...]
    owned_numel: tuple[int, ...]
    received_numel: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks that share the work."""
        return self.num_shards * self.num_replicas

    @property
    def total_flops(self) -> int:
        """Operations of all ranks, what team members repeat included."""
        return sum(self.load_flops)

    @property
    def mean_flops(self) -> float:
        """Operations of a rank on average."""
        return self.total_flops / self.num_ranks

    @property
    def largest_flops(self) -> int:
        """Operations of the largest matrix, or of one member of the team that has it."""
        return max((self.works[share.work].flops(share.size) for share in self.shares), default=0)

    @property
    def max_flops(self) -> int:
        """Operations of the rank that has most."""
        return max(self.load_flops, default=0)

    @property
    def bound_flops(self) -> float:
        """No ownership of these matrices and teams has a smaller maximum.

        It is the largest of the mean, the largest share, and ``k + 1`` times the ``k N + 1``-th largest share: of so
        many shares some rank gets ``k + 1``.
        """
        costs = sorted((self.works[share.work].flops(share.size) for share in self.shares), reverse=True)
        piled = ((k + 1) * costs[k * self.num_ranks] for k in range(-(-len(costs) // self.num_ranks)))
        return max(self.mean_flops, max(piled, default=0))

    @property
    def gap(self) -> float:
        """How far the maximum is above ``bound_flops``, relative to it."""
        return self.max_flops / self.bound_flops - 1 if self.bound_flops else 0.0

    @property
    def matrix_numel(self) -> int:
        """Elements of all matrices."""
        return sum(work.block.numel for work in self.works)

    @property
    def mean_received(self) -> float:
        """Elements that a rank receives on average."""
        return sum(self.received_numel) / self.num_ranks

    @property
    def num_teams(self) -> int:
        """Matrices that several ranks share."""
        return sum(share.size > 1 and share.part == 0 for share in self.shares)


def holders_of(offset: int, numel: int, shard_numel: int) -> tuple[tuple[int, range], ...]:
    """Return the shards of a flat buffer that hold a tensor, with the range of its elements that each has.

    Args:
        offset, numel: of the tensor, in elements. shard_numel: elements of a shard.
    """
    if not numel:
        return ()
    shards = range(offset // shard_numel, (offset + numel - 1) // shard_numel + 1)
    return tuple(
        (shard, range(max(shard * shard_numel - offset, 0), min((shard + 1) * shard_numel - offset, numel)))
        for shard in shards
    )


def plan_ownership(
    works: Sequence[MatrixWork], num_shards: int, num_replicas: int = 1, *, max_team: int = 1
) -> Ownership:
    """Return who owns which matrix; the same on every rank that asks with the same arguments.

    Args:
        works: all matrices that these ranks hold.
        num_shards, num_replicas: of the ranks; owners of one replica's pieces are in that replica.
        max_team: the most ranks that share a matrix; team sizes are powers of two that divide ``num_shards``.
    """
    sizes = [size for size in _powers_of_two(max_team) if num_shards % size == 0]
    teams = _large_teams(works, num_shards * num_replicas, sizes)
    best = _placed(works, teams, (num_shards, num_replicas))
    if len(sizes) > 1 and len(works) <= _MANY_PER_RANK * num_shards * num_replicas:
        for trial in itertools.islice(_more_teams(works, teams, sizes), _MAX_TRIALS):
            if max(best.loads) <= _GOOD_ENOUGH * sum(best.loads) / len(best.loads):
                break
            other = _placed(works, trial, (num_shards, num_replicas))
            if max(other.loads) < max(best.loads):
                best = other
    shares = tuple(sorted(best.shares, key=lambda share: (share.work, share.part)))
    ranks = (num_shards, num_replicas)
    owned, received = _traffic(works, shares, ranks)
    return Ownership(tuple(works), shares, *ranks, tuple(best.loads), tuple(owned), tuple(received))


def _powers_of_two(limit: int) -> Iterator[int]:
    return itertools.takewhile(lambda size: size <= limit, (1 << power for power in itertools.count()))


def _large_teams(works: Sequence[MatrixWork], num_ranks: int, sizes: Sequence[int]) -> list[int]:
    """Return a team size for each matrix: the smallest that brings it under the mean, or that takes least."""
    mean = sum(work.flops() for work in works) / num_ranks
    known: dict[tuple[int, int, int], int] = {}
    teams = []
    for work in works:
        key = (work.block.rows, work.block.columns, work.num_steps)
        if key not in known:
            fitting = [size for size in sizes if work.flops(size) <= mean]
            known[key] = min(fitting) if fitting else min(sizes, key=work.flops)
        teams.append(known[key])
    return teams


def _more_teams(works: Sequence[MatrixWork], teams: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield other team sizes: for a growing part of the largest matrices, the next sizes up."""
    order = sorted(range(len(works)), key=lambda index: -works[index].flops(teams[index]))
    classes: dict[int, list[int]] = {}
    for index in order:
        classes.setdefault(works[index].flops(teams[index]), []).append(index)
    chosen: list[int] = []
    for alike in itertools.islice(classes.values(), 3):
        for eighths in range(1, 9):
            some = chosen + alike[: -(-len(alike) * eighths // 8)]
            for factor in (2, 4):
                trial = list(teams)
                for index in some:
                    trial[index] = max(size for size in sizes if size <= teams[index] * factor)
                yield trial
        chosen += alike


@dataclass(frozen=True, slots=True)
class _Placement:
    shares: list[Share]
    loads: list[int]


def _placed(works: Sequence[MatrixWork], teams: Sequence[int], ranks: tuple[int, int]) -> _Placement:
    """Give each matrix to the rank, or the run of ranks, that has the least, the longest first."""
    num_ranks = ranks[0] * ranks[1]
    costs = [work.flops(size) for work, size in zip(works, teams, strict=True)]
    order = sorted(range(len(works)), key=lambda index: (-costs[index], -works[index].block.numel, index))
    loads, numels = [0] * num_ranks, [0] * num_ranks
    # One heap for each size of team: of (load, elements, first rank), most of which are older than the loads.
    heaps = {size: [(0, 0, first) for first in range(0, num_ranks, size)] for size in set(teams)}
    shares = []
    for index in order:
        size = teams[index]
        first = _least_loaded(heaps[size], size, loads, numels)
        if size == 1:
            first = _holder_among_equals(works[index], first, loads, ranks)
        for part in range(size):
            rank = first + part
            loads[rank] += costs[index]
            numels[rank] += works[index].block.numel // size
            shares.append(Share(index, part, size, rank))
    return _Placement(shares, loads)


def _least_loaded(heap: list[tuple[int, int, int]], size: int, loads: Sequence[int], numels: Sequence[int]) -> int:
    while True:
        load, numel, first = heap[0]
        now = (max(loads[first : first + size]), max(numels[first : first + size]), first)
        # Loads only grow, so an entry that is still true is the least.
        if (load, numel) == now[:2]:
            return first
        heapq.heapreplace(heap, now)


def _holder_among_equals(work: MatrixWork, found: int, loads: Sequence[int], ranks: tuple[int, int]) -> int:
    num_shards, num_replicas = ranks
    for shard, held in sorted(work.holders, key=lambda holder: -len(holder[1])):
        if not work.block.overlap(held):
            continue
        for replica in range(num_replicas):
            rank = replica * num_shards + shard
            if loads[rank] == loads[found]:
                return rank
    return found


def _traffic(
    works: Sequence[MatrixWork], shares: Sequence[Share], ranks: tuple[int, int]
) -> tuple[list[int], list[int]]:
    """Return the elements that each rank owns, and those that it receives in a step."""
    num_shards, num_replicas = ranks
    owned, received = [0] * (num_shards * num_replicas), [0] * (num_shards * num_replicas)
    on_shard = [0] * num_shards
    for share in shares:
        work = works[share.work]
        block = work.block if share.size == 1 else work.block.parts(share.size)[share.part]
        owned[share.owner] += block.numel
        received[share.owner] += block.numel
        for shard, held in work.holders:
            overlap = block.overlap(held)
            on_shard[shard] += overlap
            if shard == share.owner % num_shards:
                # It neither sends to itself what it holds, nor gets the update of that from anybody.
                received[share.owner] -= 2 * overlap
    for rank in range(len(received)):
        received[rank] += on_shard[rank % num_shards]
    return owned, received
