"""Exchange: flat buffers of row pieces become whole matrices on their owners, are replaced, and come back.

Matrices travel in buckets by all-to-alls of uneven parts, two in flight; what a rank both holds and owns never leaves
it. Every rank issues the same collectives in the same order, whatever it owns (docs/design/muon.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist

from dbuffer.collectives import all_gather, all_to_all, wait_for
from dbuffer.mesh import MeshAxis
from megatron_fsdp.optim.matrix_views import MatrixBlock, Rectangle
from megatron_fsdp.optim.ownership import MatrixWork, Ownership

__all__ = ["Exchange", "OwnerRanks", "Solver", "Source"]


class Solver(Protocol):
    """What an owner does with its matrices; equal ones are given matrices of one shape together."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it takes them."""
        ...

    def __call__(self, matrices: torch.Tensor, works: Sequence[MatrixWork]) -> torch.Tensor:
        """Return what becomes of (matrices, rows, columns), which it may overwrite; ``works`` says which they are."""
        ...


@dataclass(frozen=True, slots=True)
class OwnerRanks:
    """The ranks that share the matrices of some groups.

    Attributes:
        shards: the axis over which elements are spread, in the order of the shards; None where all are whole.
        replicas: the axis over which they are repeated; None for none, or where replicas repeat the work.
    """

    shards: MeshAxis | None
    replicas: MeshAxis | None

    @property
    def shard(self) -> int:
        """This rank's place among the shards."""
        return 0 if self.shards is None else self.shards.rank

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return 1 if self.shards is None else self.shards.size

    @property
    def replica(self) -> int:
        """This rank's place among the replicas."""
        return 0 if self.replicas is None else self.replicas.rank

    @property
    def num_replicas(self) -> int:
        """How many replicas share the work."""
        return 1 if self.replicas is None else self.replicas.size


@dataclass(frozen=True, slots=True)
class Source:
    """Where this rank holds its piece of one matrix's parameter.

    Attributes:
        flat: number of the flat buffer. base: where in it the piece begins. held: the parameter's elements in it.
        solver: what its owner does with the matrix.
    """

    flat: int
    base: int
    held: range
    solver: Solver


@dataclass(frozen=True, slots=True)
class _Slot:
    """One owned matrix, by its position among all, and its place in a batch of equal ones."""

    work: int
    block: MatrixBlock
    batch: int
    position: int


@dataclass(slots=True)
class _Batch:
    """Matrices of one shape and one solver: (count, rows, columns)."""

    count: int
    shape: tuple[int, int]
    solver: Solver

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The shape of its memory."""
        return (self.count, *self.shape)


@dataclass(slots=True)
class _Bucket:
    """What travels together.

    Attributes:
        sent: for each shard, the rectangles of flat buffers that its rank owns. received: for each shard, the
            rectangles of slots that come from it. kept: those that this rank holds and owns.
        slots: the matrices that this rank owns. batches: of equal ones.
    """

    sent: list[list[tuple[int, Rectangle]]]
    received: list[list[tuple[int, Rectangle]]]
    kept: list[tuple[int, Rectangle, int]] = field(default_factory=list)
    slots: list[_Slot] = field(default_factory=list)
    batches: list[_Batch] = field(default_factory=list)


@dataclass(slots=True)
class _Flight:
    """A bucket under way: its slots' memory, and the message that arrives."""

    batches: list[torch.Tensor]
    message: torch.Tensor
    works: list[dist.Work]
    leaving: torch.Tensor


class _Filling:
    """Which bucket each owner's next matrix goes into, worked out alike by all ranks."""

    def __init__(self, num_ranks: int, bucket_numel: int) -> None:
        self._bucket_numel = bucket_numel
        # Of each owner: the number of its last bucket, and the elements in it.
        self._last = [(0, 0)] * num_ranks

    def next_bucket(self, owner: int, numel: int) -> int:
        """Return the bucket of an owner's next matrix, and count it."""
        number, filled = self._last[owner]
        if filled and filled + numel > self._bucket_numel:
            number, filled = number + 1, 0
        self._last[owner] = (number, filled + numel)
        return number


class Exchange:
    """The redistribution of one step, laid out once.

    Args:
        ownership: of all matrices. sources: of each of them, in the same order; what this rank does not hold is empty.
        ranks: who shares them.
        bucket_numel: elements that an owner takes in one bucket, at least one matrix.
    Attributes:
        num_owned: matrices that this rank works on in each step.
    """

    def __init__(self, ownership: Ownership, sources: Sequence[Source], ranks: OwnerRanks, bucket_numel: int) -> None:
        self.ownership = ownership
        self.ranks = ranks
        self._sources = tuple(sources)
        self._buckets: list[_Bucket] = []
        self._local = self._empty_bucket()
        # By replica: what of this rank's pieces its owners update.
        self._of_replicas: list[list[tuple[int, Rectangle]]] = [[] for _ in range(ranks.num_replicas)]
        filling = _Filling(ownership.num_ranks, bucket_numel)
        for index in range(len(ownership.works)):
            self._lay_out(index, filling)
        self.num_owned = sum(len(bucket.slots) for bucket in (self._local, *self._buckets))

    def run(self, flats: Sequence[torch.Tensor], meanwhile: Callable[[], None]) -> None:
        """Replace every matrix in the flat buffers by what its solver makes of it; all ranks call it.

        Args:
            flats: 1-D, this rank's parts, all of one dtype, which is that of the messages.
            meanwhile: called when the first buckets are under way.
        """
        flying = [self._send(number, flats) for number in range(min(2, len(self._buckets)))]
        meanwhile()
        self._solve_local(flats)
        returning: tuple[_Bucket, _Flight] | None = None
        for number, bucket in enumerate(self._buckets):
            flight = flying.pop(0)
            self._take_in(bucket, flight, flats)
            self._solve(bucket, flight.batches)
            arriving = self._send_back(bucket, flight, flats)
            if number + 2 < len(self._buckets):
                flying.append(self._send(number + 2, flats))
            if returning is not None:
                self._take_back(*returning, flats)
            returning = (bucket, arriving)
        if returning is not None:
            self._take_back(*returning, flats)
        self._share_with_replicas(flats)

    # ------------------------------------------------------------------ layout

    def _empty_bucket(self) -> _Bucket:
        shards = range(self.ranks.num_shards)
        return _Bucket([[] for _ in shards], [[] for _ in shards])

    def _lay_out(self, index: int, filling: _Filling) -> None:
        """Put one matrix into a bucket, the same on all ranks."""
        work, owner, ranks = self.ownership.works[index], self.ownership.owners[index], self.ranks
        source, block = self._sources[index], work.block
        replica, shard = divmod(owner, ranks.num_shards)
        is_local = all(holder == shard for holder, _ in work.holders)
        bucket = self._local if is_local else self._bucket(filling.next_bucket(owner, block.numel))
        mine = [_moved(piece, source.base) for piece in block.rectangles(source.held)]
        self._of_replicas[replica] += [(source.flat, piece) for piece in mine]
        if replica != ranks.replica:
            return
        if shard != ranks.shard:
            bucket.sent[shard] += [(source.flat, piece) for piece in mine]
            return
        slot = self._add_slot(bucket, index, source.solver)
        bucket.kept += [(source.flat, piece, slot) for piece in mine]
        for holder, held in work.holders:
            if holder != shard:
                bucket.received[holder] += [(slot, piece) for piece in block.rectangles(held)]

    def _bucket(self, number: int) -> _Bucket:
        while len(self._buckets) <= number:
            self._buckets.append(self._empty_bucket())
        return self._buckets[number]

    def _add_slot(self, bucket: _Bucket, index: int, solver: Solver) -> int:
        block = self.ownership.works[index].block
        shape = (block.rows, block.columns)
        alike = (n for n, batch in enumerate(bucket.batches) if (batch.shape, batch.solver) == (shape, solver))
        number = next(alike, len(bucket.batches))
        if number == len(bucket.batches):
            bucket.batches.append(_Batch(0, shape, solver))
        batch = bucket.batches[number]
        bucket.slots.append(_Slot(index, block, number, batch.count))
        batch.count += 1
        return len(bucket.slots) - 1

    # ------------------------------------------------------------------ messages

    def _send(self, number: int, flats: Sequence[torch.Tensor]) -> _Flight:
        """Pack this rank's pieces of others' matrices and send them."""
        bucket = self._buckets[number]
        leaving = _packed([_in_flat(flats, place) for part in bucket.sent for place in part], flats[0])
        arriving = flats[0].new_empty(_numel(bucket.received))
        works: list[dist.Work] = []
        self._all_to_all(arriving, leaving, (bucket.received, bucket.sent), works)
        batches = [flats[0].new_empty(batch.sizes) for batch in bucket.batches]
        return _Flight(batches, arriving, works, leaving)

    def _all_to_all(
        self,
        arriving: torch.Tensor,
        leaving: torch.Tensor,
        parts: tuple[list[list[tuple[int, Rectangle]]], list[list[tuple[int, Rectangle]]]],
        works: list[dist.Work],
    ) -> None:
        assert self.ranks.shards is not None
        received, sent = ([_numel([part]) for part in side] for side in parts)
        all_to_all(arriving, leaving, self.ranks.shards, (received, sent), works)

    def _take_in(self, bucket: _Bucket, flight: _Flight, flats: Sequence[torch.Tensor]) -> None:
        """Wait for a bucket and put its matrices together."""
        for work in flight.works:
            wait_for(work, flight.message)
        slots = [flight.batches[slot.batch][slot.position].view(-1) for slot in bucket.slots]
        places = [_in_slot(slots, bucket, place) for part in bucket.received for place in part]
        _unpack(flight.message, places)
        _copy_all(
            [_in_slot(slots, bucket, (slot, piece)) for _, piece, slot in bucket.kept],
            [_in_flat(flats, (flat, piece)) for flat, piece, _ in bucket.kept],
        )

    def _send_back(self, bucket: _Bucket, flight: _Flight, flats: Sequence[torch.Tensor]) -> _Flight:
        """Send every holder its piece of the results."""
        slots = self._keep(bucket, flight.batches, flats)
        leaving = _packed([_in_slot(slots, bucket, place) for part in bucket.received for place in part], flats[0])
        arriving = flats[0].new_empty(_numel(bucket.sent))
        works: list[dist.Work] = []
        self._all_to_all(arriving, leaving, (bucket.sent, bucket.received), works)
        return _Flight([], arriving, works, leaving)

    def _keep(
        self, bucket: _Bucket, batches: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        slots = [batches[slot.batch][slot.position].view(-1) for slot in bucket.slots]
        _copy_all(
            [_in_flat(flats, (flat, piece)) for flat, piece, _ in bucket.kept],
            [_in_slot(slots, bucket, (slot, piece)) for _, piece, slot in bucket.kept],
        )
        return slots

    def _take_back(self, bucket: _Bucket, flight: _Flight, flats: Sequence[torch.Tensor]) -> None:
        for work in flight.works:
            wait_for(work, flight.message)
        _unpack(flight.message, [_in_flat(flats, place) for part in bucket.sent for place in part])

    def _share_with_replicas(self, flats: Sequence[torch.Tensor]) -> None:
        """Give the other replicas the updates that this one's owners made, and take theirs."""
        axis = self.ranks.replicas
        if axis is None or axis.size == 1:
            return
        # Equal parts, which every backend gathers: owners' loads are even, so there is little to fill up.
        part = max(_numel([places]) for places in self._of_replicas)
        gathered = flats[0].new_empty(part * axis.size)
        mine = gathered[axis.rank * part : (axis.rank + 1) * part]
        own = self._of_replicas[axis.rank]
        _packed([_in_flat(flats, place) for place in own], flats[0], out=mine)
        all_gather(gathered, mine, axis)
        for replica, places in enumerate(self._of_replicas):
            if replica != axis.rank:
                _unpack(gathered[replica * part :], [_in_flat(flats, place) for place in places])

    # ------------------------------------------------------------------ matrices

    def _solve_local(self, flats: Sequence[torch.Tensor]) -> None:
        bucket = self._local
        if bucket.slots:
            batches = [flats[0].new_empty(batch.sizes) for batch in bucket.batches]
            self._take_in(bucket, _Flight(batches, flats[0].new_empty(0), [], flats[0]), flats)
            self._solve(bucket, batches)
            self._keep(bucket, batches, flats)

    def _solve(self, bucket: _Bucket, batches: Sequence[torch.Tensor]) -> None:
        """Replace every matrix by what its solver makes of it."""
        works = self.ownership.works
        for number, (memory, batch) in enumerate(zip(batches, bucket.batches, strict=True)):
            mine = [works[slot.work] for slot in bucket.slots if slot.batch == number]
            memory.copy_(batch.solver(memory.to(batch.solver.dtype), mine))


def _moved(piece: Rectangle, base: int) -> Rectangle:
    return replace(piece, start=piece.start + base)


def _numel(parts: Sequence[Sequence[tuple[int, Rectangle]]]) -> int:
    return sum(piece.numel for part in parts for _, piece in part)


def _in_flat(flats: Sequence[torch.Tensor], place: tuple[int, Rectangle]) -> torch.Tensor:
    number, piece = place
    flat = flats[number]
    if piece.rows == 1:
        return flat.narrow(0, piece.start, piece.columns)
    origin = flat.storage_offset() + piece.start
    return flat.as_strided((piece.rows, piece.columns), (piece.stride, 1), origin)


def _in_slot(slots: Sequence[torch.Tensor], bucket: _Bucket, place: tuple[int, Rectangle]) -> torch.Tensor:
    number, piece = place
    slot, columns = slots[number], bucket.slots[number].block.columns
    first = piece.row * columns + piece.column
    if piece.rows == 1:
        return slot.narrow(0, first, piece.columns)
    return slot.as_strided((piece.rows, piece.columns), (columns, 1), slot.storage_offset() + first)


def _pieces_of(message: torch.Tensor, places: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces, start = [], 0
    for place in places:
        pieces.append(message.narrow(0, start, place.numel()).view(place.shape))
        start += place.numel()
    return pieces


def _packed(places: Sequence[torch.Tensor], like: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    message = like.new_empty(sum(place.numel() for place in places)) if out is None else out
    _copy_all(_pieces_of(message, places), places)
    return message


def _unpack(message: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    _copy_all(places, _pieces_of(message, places))


def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
