"""Exchange: send the pieces of matrices to the owners of the matrices, and the updated pieces back.

Matrices travel in buckets by all-to-alls of uneven parts, with two buckets in flight. A rank does not send pieces of
the matrices that it owns itself. All ranks issue the same collectives in the same order, whatever they own
(docs/design/muon.md).
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import DBuffer
from dbuffer.collectives.all_gather import all_gather
from dbuffer.collectives.all_to_all import all_to_all
from dbuffer.collectives.waits import wait_for
from dbuffer.mesh import MeshAxis, is_alive, new_group
from dbuffer.placements import flat_axes, shard_index
from megatron_fsdp.optim.muon.matrix_views import MatrixPiece
from megatron_fsdp.optim.muon.newton_schulz import Iteration
from megatron_fsdp.optim.muon.ownership import MatrixWork, Ownership

__all__ = ["Exchange", "OwnerRanks", "Source", "owner_ranks"]

_JOINED: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], MeshAxis]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class OwnerRanks:
    """The ranks that share the matrices of some groups.

    Attributes:
        shards: the mesh axis that shards elements, in the order of shards; None if nothing is sharded.
        replicas: the mesh axis of replicas; None without one.
        shard, num_shards, replica, num_replicas: this rank's places on these axes, and their sizes.
    """

    shards: MeshAxis | None
    replicas: MeshAxis | None
    shard: int = field(init=False, default=0)
    num_shards: int = field(init=False, default=1)
    replica: int = field(init=False, default=0)
    num_replicas: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        for name, axis in (("shard", self.shards), ("replica", self.replicas)):
            if axis is not None:
                object.__setattr__(self, name, axis.rank)
                object.__setattr__(self, f"num_{name}s", axis.size)


def owner_ranks(main: DBuffer) -> OwnerRanks:
    """Return the ranks that share the matrices of a buffer of main weights; all ranks of its mesh call it."""
    flat = flat_axes(main.placements)
    return OwnerRanks(_joined(main, flat), _joined(main, [axis for axis in range(len(main.axes)) if axis not in flat]))


def _joined(main: DBuffer, axes: Sequence[int]) -> MeshAxis | None:
    """Return one axis in place of several, its ranks in the order of the shards that they hold."""
    wide = tuple(axis for axis in axes if main.axes[axis].size > 1)
    if not wide:
        return None
    if len(wide) == 1:
        return main.axes[wide[0]]
    known = _JOINED.setdefault(main.axes[wide[0]].gather_group, {})
    if wide not in known or not is_alive(known[wide].gather_group):
        known[wide] = _make_joined(main.mesh, main.axes, wide)
    return known[wide]


def _make_joined(mesh: DeviceMesh, all_axes: Sequence[MeshAxis], axes: tuple[int, ...]) -> MeshAxis:
    here = [axis.rank for axis in all_axes]
    sizes = [axis.size for axis in all_axes]
    ranks = [0] * math.prod(sizes[axis] for axis in axes)
    for place in itertools.product(*(range(sizes[axis]) for axis in axes)):
        coordinate = list(here)
        for axis, position in zip(axes, place, strict=True):
            coordinate[axis] = position
        ranks[shard_index(axes, coordinate, sizes)] = int(mesh.mesh[tuple(coordinate)])
    name = " x ".join(all_axes[axis].name for axis in axes)
    group = new_group(ranks, f"owners over {name}")
    return MeshAxis(name, len(ranks), shard_index(axes, here, sizes), group, has_separate_reduce_group=False)


@dataclass(frozen=True, slots=True)
class Source:
    """The place of this rank's piece of a matrix in its flat buffer.

    Attributes:
        flat: number of the flat buffer. base: where in it the piece begins. held: the parameter's elements in it.
        iteration: how its owner makes the matrix semi-orthogonal; equal ones take matrices of one shape together.
    """

    flat: int
    base: int
    held: range
    iteration: Iteration


@dataclass(frozen=True, slots=True)
class _Place:
    """Elements that lie in a row in one of several flat memories."""

    memory: int
    start: int
    numel: int

    def of(self, memories: Sequence[torch.Tensor]) -> torch.Tensor:
        return memories[self.memory][self.start : self.start + self.numel]


Parts = list[list[_Place]]


@dataclass(slots=True)
class _Batch:
    """Matrices of one shape and one iteration that a rank owns."""

    shape: tuple[int, int]
    iteration: Iteration
    size: int = 0


@dataclass(slots=True)
class _Bucket:
    """The pieces that travel in one all-to-all.

    Attributes:
        sent: for each shard, the places in flat buffers of the pieces that its rank owns.
        received: for each shard, the places in batches of the pieces that it sends.
        kept: both places of the pieces that this rank holds and owns.
        batches: the matrices that this rank owns.
    """

    sent: Parts
    received: Parts
    kept: list[tuple[_Place, _Place]] = field(default_factory=list)
    batches: list[_Batch] = field(default_factory=list)

    @classmethod
    def of(cls, num_shards: int) -> _Bucket:
        return cls([[] for _ in range(num_shards)], [[] for _ in range(num_shards)])


@dataclass(slots=True)
class _Message:
    """A message in flight. Both buffers must live until it arrives."""

    arriving: torch.Tensor
    leaving: torch.Tensor
    works: list[dist.Work]

    def take(self, parts: Parts, memories: Sequence[torch.Tensor]) -> None:
        """Wait for the message and copy its elements to their places."""
        for work in self.works:
            wait_for(work, self.arriving)
        _copy(self.arriving, itertools.chain(*parts), memories, is_packing=False)


class Exchange:
    """The redistribution of one step, laid out once.

    Args:
        ownership: the owner of each matrix. sources: one for each matrix, in the same order; empty for a matrix that
            this rank holds no piece of.
        ranks: the ranks that share the matrices.
        bucket_numel: elements that an owner takes in one bucket, at least one matrix.
    """

    def __init__(self, ownership: Ownership, sources: Sequence[Source], ranks: OwnerRanks, bucket_numel: int) -> None:
        self.ownership = ownership
        self.ranks = ranks
        self._buckets: list[_Bucket] = []
        self._local = _Bucket.of(ranks.num_shards)
        # For each replica, the parts of this rank's pieces that the replica's owners update.
        self._of_replicas: Parts = [[] for _ in range(ranks.num_replicas)]
        # For each owner, the number of its last bucket, and the elements in that bucket.
        filled = [(0, 0)] * len(ownership.load_flops)
        for work, owner, source in zip(ownership.works, ownership.owners, sources, strict=True):
            bucket = self._local
            if any(holder != owner % ranks.num_shards for holder, _ in work.holders):
                number, numel = filled[owner]
                if numel and numel + work.block.numel > bucket_numel:
                    number, numel = number + 1, 0
                filled[owner] = (number, numel + work.block.numel)
                if len(self._buckets) == number:
                    self._buckets.append(_Bucket.of(ranks.num_shards))
                bucket = self._buckets[number]
            self._lay_out(bucket, work, owner, source)

    def run(self, flats: Sequence[torch.Tensor], meanwhile: Callable[[], None]) -> None:
        """Make every matrix in the flat buffers semi-orthogonal; all ranks call it.

        Args:
            flats: 1-D, this rank's parts, all of one dtype, which is that of the messages.
            meanwhile: called when the first buckets are under way.
        """
        flying = [self._send(bucket.sent, flats, bucket.received, flats[0]) for bucket in self._buckets[:2]]
        meanwhile()
        self._solve(self._local, None, flats)
        returning: list[tuple[_Bucket, _Message]] = []
        for number, bucket in enumerate(self._buckets):
            batches = self._solve(bucket, flying.pop(0), flats)
            returning.append((bucket, self._send(bucket.received, batches, bucket.sent, flats[0])))
            for later in self._buckets[number + 2 : number + 3]:
                flying.append(self._send(later.sent, flats, later.received, flats[0]))
            if number:
                taken, message = returning.pop(0)
                message.take(taken.sent, flats)
        for taken, message in returning:
            message.take(taken.sent, flats)
        self._share_with_replicas(flats)

    # ------------------------------------------------------------------ layout

    def _lay_out(self, bucket: _Bucket, work: MatrixWork, owner: int, source: Source) -> None:
        """Put one matrix into its bucket, which is the same on all ranks."""
        ranks, block = self.ranks, work.block
        replica, shard = divmod(owner, ranks.num_shards)
        pieces = list(block.pieces(source.held))
        mine = [_Place(source.flat, source.base + piece.start, piece.numel) for piece in pieces]
        self._of_replicas[replica] += mine
        if replica != ranks.replica:
            return
        if shard != ranks.shard:
            bucket.sent[shard] += mine
            return
        kind = (block.rows, block.columns), source.iteration
        kinds = [(batch.shape, batch.iteration) for batch in bucket.batches]
        if kind not in kinds:
            bucket.batches.append(_Batch(*kind))
        number = kinds.index(kind) if kind in kinds else len(kinds)
        first = bucket.batches[number].size * block.numel
        bucket.batches[number].size += 1

        def places(found: Iterable[MatrixPiece]) -> list[_Place]:
            return [_Place(number, first + piece.place, piece.numel) for piece in found]

        bucket.kept += zip(mine, places(pieces), strict=True)
        for holder, held in work.holders:
            if holder != shard:
                bucket.received[holder] += places(block.pieces(held))

    # ------------------------------------------------------------------ messages

    def _send(self, sent: Parts, memories: Sequence[torch.Tensor], received: Parts, like: torch.Tensor) -> _Message:
        """Pack the elements at the places ``sent`` and start the exchange that fills the places ``received``."""
        assert self.ranks.shards is not None
        sizes = [list(map(_numel, received)), list(map(_numel, sent))]
        message = _Message(like.new_empty(sum(sizes[0])), like.new_empty(sum(sizes[1])), [])
        _copy(message.leaving, itertools.chain(*sent), memories, is_packing=True)
        all_to_all(message.arriving, message.leaving, self.ranks.shards, (sizes[0], sizes[1]), message.works)
        return message

    def _share_with_replicas(self, flats: Sequence[torch.Tensor]) -> None:
        """Give the other replicas the updates that this one's owners made, and take theirs."""
        axis = self.ranks.replicas
        if axis is None or axis.size == 1:
            return
        # Equal parts, which every backend gathers: owners' loads are even, so there is little to fill up.
        gathered = flats[0].new_empty(axis.size, max(map(_numel, self._of_replicas)))
        _copy(gathered[axis.rank], self._of_replicas[axis.rank], flats, is_packing=True)
        all_gather(gathered.view(-1), gathered[axis.rank], axis)
        for replica, places in enumerate(self._of_replicas):
            if replica != axis.rank:
                _copy(gathered[replica], places, flats, is_packing=False)

    # ------------------------------------------------------------------ matrices

    def _solve(self, bucket: _Bucket, message: _Message | None, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Put the matrices of a bucket together and make them semi-orthogonal; flats get their parts, too."""
        batches = [flats[0].new_empty(batch.size * math.prod(batch.shape)) for batch in bucket.batches]
        if message is not None:
            message.take(bucket.received, batches)
        kept = [(flat.of(flats), own.of(batches)) for flat, own in bucket.kept]
        _copy_all([own for _, own in kept], [flat for flat, _ in kept])
        for memory, batch in zip(batches, bucket.batches, strict=True):
            whole = memory.view(-1, *batch.shape)
            whole.copy_(batch.iteration(whole))
        _copy_all([flat for flat, _ in kept], [own for _, own in kept])
        return batches


def _numel(places: Iterable[_Place]) -> int:
    return sum(place.numel for place in places)


def _copy(
    message: torch.Tensor, places: Iterable[_Place], memories: Sequence[torch.Tensor], *, is_packing: bool
) -> None:
    """Copy the elements at these places into a message, in order, or back."""
    found = [place.of(memories) for place in places]
    sizes = [each.numel() for each in found]
    parts = message[: sum(sizes)].split(sizes)
    _copy_all(*((parts, found) if is_packing else (found, parts)))


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
