"""Ownership: which rank makes which matrix semi-orthogonal, as a plan of integers that all ranks work out alike.

Any rank may own a matrix, not only those that hold a piece of it: the longest work first, to the rank with the least
so far (LPT; Graham, "Bounds on multiprocessing timing anomalies", 1969); among equals to the one that holds most of
the matrix. No matrix is divided, so results do not depend on the number of ranks.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fsdp.optim.matrix_views import MatrixBlock
from megatron_fsdp.optim.newton_schulz import newton_schulz_flops

__all__ = ["MatrixWork", "Ownership", "holders_of", "plan_ownership"]

# When exchanging matrices between ranks is over, and how much of it may be tried.
_GOOD_ENOUGH = 1.015
_MAX_SWAPS = 4
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

    @property
    def flops(self) -> int:
        """Operations of Newton-Schulz."""
        return newton_schulz_flops(self.block.rows, self.block.columns, self.num_steps)


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who owns what.

    Ranks are numbered ``replica * num_shards + shard``: replicas are groups of ranks that hold all shards together.

    Attributes:
        works: the matrices. owners: the rank of each.
        num_shards, num_replicas: of the ranks. load_flops: of each rank.
        received_numel: elements that each rank receives in a step: matrices that it owns, updates of what it holds.
    """

    works: tuple[MatrixWork, ...]
    owners: tuple[int, ...]
    num_shards: int
    num_replicas: int
    load_flops: tuple[int, ...]
    received_numel: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks that share the work."""
        return self.num_shards * self.num_replicas

    @property
    def total_flops(self) -> int:
        """Operations of all ranks."""
        return sum(self.load_flops)

    @property
    def mean_flops(self) -> float:
        """Operations of a rank on average."""
        return self.total_flops / self.num_ranks

    @property
    def largest_flops(self) -> int:
        """Operations of the largest matrix."""
        return max((work.flops for work in self.works), default=0)

    @property
    def max_flops(self) -> int:
        """Operations of the rank that has most."""
        return max(self.load_flops, default=0)

    @property
    def bound_flops(self) -> float:
        """No ownership of these matrices has a smaller maximum.

        It is the largest of the mean, the largest matrix, and ``k + 1`` times the ``k N + 1``-th largest: of so many
        matrices some rank gets ``k + 1``.
        """
        costs = sorted((work.flops for work in self.works), reverse=True)
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


def plan_ownership(works: Sequence[MatrixWork], num_shards: int, num_replicas: int = 1) -> Ownership:
    """Return who owns which matrix; the same on every rank that asks with the same arguments.

    Args:
        works: all matrices that these ranks hold.
        num_shards, num_replicas: of the ranks; owners of one replica's pieces are in that replica.
    """
    placement = _Placement(works, num_shards, num_shards * num_replicas)
    owners = tuple(placement.owners)
    received = _received(works, owners, num_shards, num_replicas)
    return Ownership(tuple(works), owners, num_shards, num_replicas, tuple(placement.loads), tuple(received))


class _Placement:
    """Matrices as they are given out: to the rank that has the least, the longest first.

    Attributes:
        loads: operations of each rank. owners: the rank of each matrix.
    """

    def __init__(self, works: Sequence[MatrixWork], num_shards: int, num_ranks: int) -> None:
        self._num_shards = num_shards
        self._costs = [work.flops for work in works]
        self.loads, self.owners = [0] * num_ranks, [0] * len(works)
        numels = [0] * num_ranks
        # Entries of (load, elements, rank), most of which are older than the loads.
        heap = [(0, 0, rank) for rank in range(num_ranks)]
        for index in sorted(
            range(len(works)), key=lambda index: (-self._costs[index], -works[index].block.numel, index)
        ):
            # Loads only grow, so an entry that is still true is the least.
            while heap[0] != (now := (self.loads[heap[0][2]], numels[heap[0][2]], heap[0][2])):
                heapq.heapreplace(heap, now)
            owner = self._holder_among_equals(works[index], heap[0][2])
            self.owners[index] = owner
            self.loads[owner] += self._costs[index]
            numels[owner] += works[index].block.numel
        self._swap()

    def _holder_among_equals(self, work: MatrixWork, found: int) -> int:
        for shard in _preferred(work):
            for rank in range(shard, len(self.loads), self._num_shards):
                if self.loads[rank] == self.loads[found]:
                    return rank
        return found

    def _swap(self) -> None:
        """Exchange single matrices between the rank that has most and those with least while that lowers the most."""
        owned: list[list[int]] = [[] for _ in self.loads]
        for index, rank in enumerate(self.owners):
            owned[rank].append(index)
        limit = _GOOD_ENOUGH * max(sum(self.loads) / len(self.loads), max(self._costs, default=0))
        for _ in range(_MAX_SWAPS * len(self.loads)):
            most = max(range(len(self.loads)), key=self.loads.__getitem__)
            if self.loads[most] <= limit:
                return
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
            self.loads[source] -= self._costs[index]
            self.loads[target] += self._costs[index]


def _preferred(work: MatrixWork) -> list[int]:
    overlaps = {shard: work.block.overlap(held) for shard, held in work.holders}
    return sorted((shard for shard in overlaps if overlaps[shard]), key=lambda shard: -overlaps[shard])


def _received(works: Sequence[MatrixWork], owners: Sequence[int], num_shards: int, num_replicas: int) -> list[int]:
    """Return the elements that each rank receives in a step."""
    received, on_shard = [0] * (num_shards * num_replicas), [0] * num_shards
    for work, owner in zip(works, owners, strict=True):
        received[owner] += work.block.numel
        for shard, held in work.holders:
            overlap = work.block.overlap(held)
            on_shard[shard] += overlap
            if shard == owner % num_shards:
                # It neither sends to itself what it holds, nor gets the update of that from anybody.
                received[owner] -= 2 * overlap
    return [numel + on_shard[rank % num_shards] for rank, numel in enumerate(received)]
