"""Ownership: which rank makes which matrix semi-orthogonal, as a plan of integers that all ranks work out alike.

Any rank may own a matrix, not only those that hold a piece of it: the longest work first, to the rank with the least
so far (LPT; Graham, "Bounds on multiprocessing timing anomalies", 1969); among equals to the one that holds most of
the matrix. No matrix is divided, so results do not depend on the number of ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fsdp.formatting import format_bytes
from megatron_fsdp.optim.muon.matrix_views import MatrixBlock
from megatron_fsdp.optim.muon.newton_schulz import newton_schulz_flops

__all__ = ["MatrixWork", "Ownership", "OwnershipReport", "plan_ownership"]


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
        received_numel: elements that each rank receives in a step: the matrices that it owns and the updates of its
            shards.
    """

    works: tuple[MatrixWork, ...]
    owners: tuple[int, ...]
    num_shards: int
    num_replicas: int
    load_flops: tuple[int, ...]
    received_numel: tuple[int, ...]


def plan_ownership(works: Sequence[MatrixWork], num_shards: int, num_replicas: int = 1) -> Ownership:
    """Return who owns which matrix; the same on every rank that asks with the same arguments.

    Args:
        works: all matrices that these ranks hold.
        num_shards, num_replicas: of the ranks; owners of one replica's pieces are in that replica.
    """
    costs, num_ranks = [work.flops for work in works], num_shards * num_replicas
    loads, numels, owners = [0] * num_ranks, [0] * num_ranks, [0] * len(works)
    # Entries of (load, elements, rank). Most entries are outdated: the loads have grown since.
    heap = [(0, 0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(works)), key=lambda index: (-costs[index], -works[index].block.numel, index)):
        # Loads only grow, so an entry that is still true is the least.
        while heap[0] != (now := (loads[heap[0][2]], numels[heap[0][2]], heap[0][2])):
            heapq.heapreplace(heap, now)
        least = heap[0][2]
        holders = (rank for shard in _preferred(works[index]) for rank in range(shard, num_ranks, num_shards))
        owner = owners[index] = next((rank for rank in holders if loads[rank] == loads[least]), least)
        loads[owner] += costs[index]
        numels[owner] += works[index].block.numel
    received = _received(works, owners, num_shards, num_replicas)
    return Ownership(tuple(works), tuple(owners), num_shards, num_replicas, tuple(loads), tuple(received))


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
                # An owner does not send its own shard to itself, and receives no update for it.
                received[owner] -= 2 * overlap
    return [numel + on_shard[rank % num_shards] for rank, numel in enumerate(received)]


# ---------------------------------------------------------------- the page of it


class OwnershipReport:
    """Cost of one Muon step for ranks that share matrices; ``str()`` gives a page.

    Attributes:
        num_ranks, num_replicas: numbers of ranks, and of replicas of the shards.
        num_matrices, num_elements: totals. least_owned, most_owned: the smallest and largest number of matrices that a
            rank owns.
        mean_flops, max_flops: Newton-Schulz operations per rank.
        bound_flops: a lower bound of ``max_flops``: the largest of the mean, the largest matrix, and ``k + 1`` times
            the ``k N + 1``-th largest matrix, because a rank must own ``k + 1`` of these ``k N + 1`` matrices.
        gap: how far the maximum is above the bound, relative to the bound.
        mean_received_bytes, max_received_bytes: bytes of matrices and updates that a rank receives in a step.

    Example:
        for report in explain_ownership(Muon(muon_param_groups(model), lr=0.02)):
            print(report)  # who owns which matrix, and the bytes on the wire
    """

    def __init__(self, ownership: Ownership, itemsize: int = 2) -> None:
        self.num_ranks, self.num_replicas = len(ownership.load_flops), ownership.num_replicas
        costs = sorted((work.flops for work in ownership.works), reverse=True)
        self.num_matrices, self.num_elements = len(costs), sum(work.block.numel for work in ownership.works)
        owned = [ownership.owners.count(rank) for rank in range(self.num_ranks)]
        self.least_owned, self.most_owned = min(owned), max(owned)
        self.mean_flops, self.max_flops = sum(costs) / self.num_ranks, max(ownership.load_flops)
        piled = ((k + 1) * costs[k * self.num_ranks] for k in range(-(-len(costs) // self.num_ranks)))
        self.bound_flops = max(self.mean_flops, max(piled, default=0))
        self.gap = self.max_flops / self.bound_flops - 1 if self.bound_flops else 0.0
        self.mean_received_bytes = sum(ownership.received_numel) / self.num_ranks * itemsize
        self.max_received_bytes = max(ownership.received_numel) * itemsize

    def __str__(self) -> str:
        ranks = f"{self.num_ranks:,} ranks" + (f" ({self.num_replicas:,} replicas)" if self.num_replicas > 1 else "")
        mean, most, bound = (f"{each / 1e9:,.4g} G" for each in (self.mean_flops, self.max_flops, self.bound_flops))
        received = format_bytes(round(self.mean_received_bytes)), format_bytes(self.max_received_bytes)
        return (
            f"muon: {self.num_matrices:,} matrices, {self.least_owned:,} to {self.most_owned:,} on each of {ranks}\n"
            f"Newton-Schulz operations of a rank in a step: {mean} on average, {most} at most; no ownership has less "
            f"than {bound}, {self.gap:.1%} below\n"
            f"matrices and updates that a rank receives in a step: {received[0]} on average, {received[1]} at most"
        )
