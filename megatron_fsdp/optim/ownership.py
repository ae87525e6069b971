"""Ownership: which rank makes which matrix semi-orthogonal, as a plan of integers that all ranks work out alike.

Any rank may own a matrix, not only those that hold a piece of it: the longest work first, to the rank with the least
so far (LPT; Graham, "Bounds on multiprocessing timing anomalies", 1969); among equals to the one that holds most of
the matrix. With ``max_team`` above 1 a matrix that is too much work for one rank goes to a run of neighbours, each of
which takes a part of its long side.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_fsdp.optim.matrix_views import MatrixBlock
from megatron_fsdp.optim.newton_schulz import newton_schulz_flops, team_flops

__all__ = ["MatrixWork", "Ownership", "Share", "holders_of", "plan_ownership"]

# Of the search: when it is over, what a round of trials has to gain, and how long it may take.
_GOOD_ENOUGH = 1.015
_WORTH_IT = 0.998
_MAX_CLASSES = 3
_MAX_TRIED_MATRICES = 20_000
_MAX_SWAPS = 4
# A rank that owns so many times the mean of elements receives 1.3 times the mean.
_MOST_OWNED = 1.55
_SWAP_PARTNERS = 4


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
    ranks = _Ranks(num_shards, num_replicas)
    sizes = [size for size in _powers_of_two(max_team) if num_shards % size == 0]
    preferred = [_preferred(work) for work in works]
    best = _Placement(works, _large_teams(works, ranks.count, sizes), preferred, ranks)
    for width in sizes if len(sizes) > 1 else ():
        if best.is_good:
            break
        teams = _teams_of_runs(works, preferred, ranks, sizes, width)
        best = min(best, _Placement(works, teams, preferred, ranks), key=lambda each: each.score)
    shares = tuple(best.shares())
    owned, received = _traffic(works, shares, ranks)
    counts = (num_shards, num_replicas)
    return Ownership(tuple(works), shares, *counts, tuple(best.loads), tuple(owned), tuple(received))


@dataclass(frozen=True, slots=True)
class _Ranks:
    num_shards: int
    num_replicas: int

    @property
    def count(self) -> int:
        return self.num_shards * self.num_replicas


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


def _teams_of_runs(
    works: Sequence[MatrixWork], preferred: Sequence[Sequence[int]], ranks: _Ranks, sizes: Sequence[int], width: int
) -> list[int]:
    """Return team sizes for runs of ``width`` ranks that act as one: what fits few runs fits many ranks as well."""
    runs = _Ranks(ranks.num_shards // width, ranks.num_replicas)
    within = [size // width for size in sizes if size >= width]
    place = functools.partial(_Placement, preferred=[()] * len(works) if width > 1 else preferred, ranks=runs)
    first = place(works, _large_teams(works, runs.count, within))
    return [size * width for size in _improved(works, first, within, place).teams]


def _improved(
    works: Sequence[MatrixWork], best: _Placement, sizes: Sequence[int], place: Callable[..., _Placement]
) -> _Placement:
    """Make more teams as long as that lowers the largest load, or the most elements of a rank, by something."""
    num_trials = max(_MAX_TRIED_MATRICES // max(len(works), 1), 1)
    for trials_of in (_joint_teams, *(_more_teams,) * num_trials):
        if best.is_good or num_trials <= 0:
            break
        trials = list(itertools.islice(trials_of(works, best.teams, sizes), num_trials))
        num_trials -= len(trials)
        found = min((place(works, teams) for teams in trials), key=lambda each: each.score, default=best)
        if found.score <= _WORTH_IT * best.score:
            best = found
        elif trials_of is _more_teams:
            break
    return best


def _heaviest(works: Sequence[MatrixWork], teams: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return the classes of equal matrices that together are most work: their team size, and which they are."""
    classes: dict[tuple[int, int], list[int]] = {}
    for index, work in enumerate(works):
        classes.setdefault((work.flops(), teams[index]), []).append(index)
    heaviest = sorted(classes.items(), key=lambda entry: -entry[0][0] * len(entry[1]))
    return [(size, alike) for (_, size), alike in heaviest[:_MAX_CLASSES]]


def _joint_teams(works: Sequence[MatrixWork], teams: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield other team sizes: larger ones for whole classes at once."""
    classes = _heaviest(works, teams)
    choices = [[other for other in sizes if other >= size][:3] for size, _ in classes]
    for chosen in itertools.islice(itertools.product(*choices), 1, None):
        trial = list(teams)
        for size, (_, alike) in zip(chosen, classes, strict=True):
            for index in alike:
                trial[index] = size
        yield trial


def _more_teams(works: Sequence[MatrixWork], teams: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield other team sizes: larger ones for some of a class."""
    for size, alike in _heaviest(works, teams):
        for larger in [other for other in sizes if other > size][:2]:
            for eighths in (6, 4, 2, 1):
                trial = list(teams)
                for index in alike[: -(-len(alike) * eighths // 8)]:
                    trial[index] = larger
                yield trial


class _Placement:
    """Matrices as they are given out: to the rank, or the run of ranks, that has the least, the longest first.

    Args:
        works: with team sizes for each. preferred: for each, shards that hold some of it, those with most first.
    """

    def __init__(
        self, works: Sequence[MatrixWork], teams: Sequence[int], preferred: Sequence[Sequence[int]], ranks: _Ranks
    ) -> None:
        self.teams = list(teams)
        self._works, self._preferred, self._ranks = works, preferred, ranks
        self._costs = _costs(works, teams)
        self.loads, self._numels = [0] * ranks.count, [0] * ranks.count
        self.owners = [0] * len(works)
        order = sorted(range(len(works)), key=lambda index: (-self._costs[index], -works[index].block.numel, index))
        # One heap for each size of team: of (load, elements, first rank), most of which are older than the loads.
        heaps = {size: [(0, 0, first) for first in range(0, ranks.count, size)] for size in set(teams)}
        for index in order:
            self._give(index, heaps[teams[index]])
        self._swap()

    @property
    def largest(self) -> int:
        """The largest load."""
        return max(self.loads)

    @property
    def score(self) -> float:
        """The largest load over the mean, and more where a rank owns far more elements than others."""
        loads, numels = self.loads, self._numels
        excess = max(numels) * len(numels) / max(sum(numels), 1) - _MOST_OWNED
        return self.largest * len(loads) / max(sum(loads), 1) + max(excess, 0.0)

    @property
    def is_good(self) -> bool:
        """Whether no other ownership would be much better."""
        mean = sum(self.loads) / len(self.loads)
        limit = _GOOD_ENOUGH * max(mean, max(self._costs, default=0))
        return self.score * mean <= limit

    def shares(self) -> Iterator[Share]:
        """Yield all shares in order."""
        for index, (first, size) in enumerate(zip(self.owners, self.teams, strict=True)):
            for part in range(size):
                yield Share(index, part, size, first + part)

    def _give(self, index: int, heap: list[tuple[int, int, int]]) -> None:
        size, loads, numels = self.teams[index], self.loads, self._numels
        while True:
            load, numel, first = heap[0]
            now = (max(loads[first : first + size]), max(numels[first : first + size]), first)
            # Loads only grow, so an entry that is still true is the least.
            if (load, numel) == now[:2]:
                break
            heapq.heapreplace(heap, now)
        if size == 1:
            first = self._holder_among_equals(index, first)
        self.owners[index] = first
        for rank in range(first, first + size):
            loads[rank] += self._costs[index]
            numels[rank] += self._works[index].block.numel // size

    def _holder_among_equals(self, index: int, found: int) -> int:
        for shard in self._preferred[index]:
            for rank in range(shard, self._ranks.count, self._ranks.num_shards):
                if self.loads[rank] == self.loads[found]:
                    return rank
        return found

    def _swap(self) -> None:
        """Exchange single matrices between the rank that has most and those with least while that lowers the most."""
        owned: list[list[int]] = [[] for _ in self.loads]
        for index, (rank, size) in enumerate(zip(self.owners, self.teams, strict=True)):
            if size == 1:
                owned[rank].append(index)
        limit = _GOOD_ENOUGH * max(sum(self.loads) / len(self.loads), max(self._costs, default=0))
        for _ in range(_MAX_SWAPS * len(self.loads)):
            if self.largest <= limit:
                return
            most = max(range(len(self.loads)), key=self.loads.__getitem__)
            for least in heapq.nsmallest(_SWAP_PARTNERS, range(len(self.loads)), key=self.loads.__getitem__):
                pair = self._best_pair(owned[most], owned[least], self.loads[most] - self.loads[least])
                if pair is not None:
                    self._exchange(owned, (most, least), pair)
                    break
            else:
                return

    def _best_pair(self, ours: Sequence[int], theirs: Sequence[int], surplus: int) -> tuple[int, int | None] | None:
        """Return what to give and what to take, None for nothing, so that both come closest; None if nothing helps."""
        kinds = {self._costs[index]: index for index in ours}
        others: dict[int, int | None] = {self._costs[index]: index for index in theirs}
        others[0] = None
        best, least = None, surplus
        for (mine, give), (cost, take) in itertools.product(kinds.items(), others.items()):
            left = abs(surplus - 2 * (mine - cost))
            if left < least:
                best, least = (give, take), left
        return best

    def _exchange(self, owned: list[list[int]], ranks: tuple[int, int], pair: tuple[int, int | None]) -> None:
        moves = [(pair[0], *ranks)] + ([] if pair[1] is None else [(pair[1], ranks[1], ranks[0])])
        for index, source, target in moves:
            owned[source].remove(index)
            owned[target].append(index)
            self.owners[index] = target
            for rank, sign in ((source, -1), (target, 1)):
                self.loads[rank] += sign * self._costs[index]
                self._numels[rank] += sign * self._works[index].block.numel


def _costs(works: Sequence[MatrixWork], teams: Sequence[int]) -> list[int]:
    known: dict[tuple[int, int, int, int], int] = {}
    costs = []
    for work, size in zip(works, teams, strict=True):
        key = (work.block.rows, work.block.columns, work.num_steps, size)
        if key not in known:
            known[key] = work.flops(size)
        costs.append(known[key])
    return costs


def _preferred(work: MatrixWork) -> list[int]:
    overlaps = {shard: work.block.overlap(held) for shard, held in work.holders}
    return sorted((shard for shard in overlaps if overlaps[shard]), key=lambda shard: -overlaps[shard])


def _traffic(works: Sequence[MatrixWork], shares: Sequence[Share], ranks: _Ranks) -> tuple[list[int], list[int]]:
    """Return the elements that each rank owns, and those that it receives in a step."""
    num_shards = ranks.num_shards
    owned, received = [0] * ranks.count, [0] * ranks.count
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
