"""StreamPlan: the weights of each bucket, computed equally on every rank, without communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.formatting import counted, format_bytes
from megatron_fsdp.transfer.bucket import BucketEntry
from megatron_fsdp.transfer.catalog import CatalogGroup, LooseWeight, ShardedWeight, WeightCatalog
from megatron_fsdp.transfer.gather import Addition, Piece, Shards

__all__ = ["PlacedPiece", "PlannedBucket", "StreamPlan", "StreamReport", "plan_stream"]

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece of a bucket.

    Attributes:
        offset: of its first byte. entries: of its weights, in order.
    """

    piece: Piece
    offset: int
    entries: tuple[BucketEntry, ...]

    @property
    def is_assembled(self) -> bool:
        """Return whether tensor-parallel parts are assembled after the gather, which then needs separate memory."""
        return self.piece.tensor_parallel is not None

    @property
    def scratch_bytes(self) -> int:
        """Bytes of that memory: this rank's parts, those of all ranks of an axis, and the whole weights."""
        tensor_parallel = self.piece.tensor_parallel
        if tensor_parallel is None:
            return 0
        whole = sum(entry.num_bytes for entry in self.entries)
        own = self.piece.numel * self.piece.dtype.itemsize
        return own + (2 * whole if tensor_parallel.sharded_axes else 0)


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """A bucket before it is gathered.

    Attributes:
        units: the pieces of each unit, which are gathered together. loose: weights that are copied, with their places.
        num_bytes: of the bucket.
    """

    units: tuple[tuple[PlacedPiece, ...], ...]
    loose: tuple[tuple[LooseWeight, BucketEntry], ...]
    num_bytes: int

    @property
    def pieces(self) -> Iterator[PlacedPiece]:
        """The pieces of all units in the bucket."""
        return (piece for unit in self.units for piece in unit)

    @property
    def entries(self) -> list[BucketEntry]:
        """The table, by offset."""
        return [entry for piece in self.pieces for entry in piece.entries] + [entry for _, entry in self.loose]


@dataclass(frozen=True, slots=True)
class StreamReport:
    """The costs of a weight stream on one rank.

    Attributes:
        num_tensors, tensor_bytes: of the receiver's tensors.
        num_buckets, largest_bucket_bytes: of the buckets.
        bucket_memory_bytes: of the two buckets that have memory at a time; a third one takes over the first one's.
        received_bytes: received by this rank from other ranks, including padding.
        num_gathers: collectives of whole units; windows of units larger than a bucket count each.
        peak_bytes: memory above rest: ``bucket_memory_bytes + scratch_bytes + adapter_bytes``.
        scratch_bytes: to assemble tensor-parallel parts. adapter_bytes: of LoRA weights that are merged.

    Example:
        report = weight_stream(model).explain()  # sends nothing
        print(report.num_buckets, report.received_bytes, report.peak_bytes)
    """

    num_tensors: int
    tensor_bytes: int
    num_buckets: int
    largest_bucket_bytes: int
    bucket_memory_bytes: int
    received_bytes: int
    num_gathers: int
    scratch_bytes: int
    adapter_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Memory above rest."""
        return self.bucket_memory_bytes + self.scratch_bytes + self.adapter_bytes

    def __str__(self) -> str:
        more = "".join(
            f", {format_bytes(size)} {what}"
            for size, what in (
                (self.scratch_bytes, "to put tensor-parallel parts together"),
                (self.adapter_bytes, "of LoRA weights to merge"),
            )
            if size
        )
        return (
            f"weight stream: {counted(self.num_tensors, 'tensor')}, {format_bytes(self.tensor_bytes)}, in "
            f"{counted(self.num_buckets, 'bucket')} of at most {format_bytes(self.largest_bucket_bytes)}\n"
            f"  this rank receives {format_bytes(self.received_bytes)} in {counted(self.num_gathers, 'gather')}\n"
            f"  memory above rest: at most {format_bytes(self.peak_bytes)} "
            f"(two buckets{more}), while the receiver keeps no tensor"
        )


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The buckets of a stream, in order."""

    buckets: tuple[PlannedBucket, ...]
    report: StreamReport

    def lines(self) -> list[str]:
        """Return the facts that have to be the same on all ranks, one per line."""
        return [
            f"{entry.name}: {entry.dtype} {entry.shape} in bucket {index}"
            for index, bucket in enumerate(self.buckets)
            for entry in bucket.entries
        ]


@dataclass(slots=True)
class _Packing:
    """Packs units into buckets of a limited size."""

    limit: int
    done: list[PlannedBucket] = field(default_factory=list)
    units: list[tuple[PlacedPiece, ...]] = field(default_factory=list)
    loose: list[tuple[LooseWeight, BucketEntry]] = field(default_factory=list)
    num_bytes: int = 0

    def make_room(self, num_bytes: int) -> None:
        """Begin another bucket unless so many bytes still fit into this one."""
        if self.num_bytes and self.num_bytes + num_bytes > self.limit:
            self.end()

    def end(self) -> None:
        if self.units or self.loose:
            self.done.append(PlannedBucket(tuple(self.units), tuple(self.loose), self.num_bytes))
        self.units, self.loose, self.num_bytes = [], [], 0

    def take(self, num_bytes: int) -> int:
        """Return the offset of the next bytes of the bucket."""
        offset = self.num_bytes
        self.num_bytes += _aligned(num_bytes)
        return offset


def plan_stream(
    catalog: WeightCatalog,
    *,
    dtype: torch.dtype | None,
    rename: Callable[[str], str],
    bucket_bytes: int,
    additions: Mapping[str, Addition],
    adapter_bytes: int = 0,
) -> StreamPlan:
    """Put units into buckets one after the other; one that is larger than a bucket is cut between its tensors.

    Args:
        dtype: of floating-point parameters in the buckets; None leaves each in its own. Buffers keep theirs.
        rename: returns a weight's name at the receiver.
        bucket_bytes: size of a bucket; a larger tensor gets a separate bucket.
        additions: the addition to each weight, by its name in the model. adapter_bytes: memory needed for these.
    Raises:
        ConfigError: ``bucket_bytes`` is no positive number.
    """
    if bucket_bytes < 1:
        raise ConfigError(
            f"weight_stream(bucket_bytes={bucket_bytes}). fix: give the size of a bucket in bytes, above 0"
        )
    packing = _Packing(bucket_bytes)
    for unit in _units(catalog.groups):
        pieces = [_piece(each, each.weights, dtype, additions) for each in unit if each.weights]
        size = sum(_aligned(_bucket_bytes(piece)) for piece in pieces)
        if size > bucket_bytes:
            # Windows of one tensor or more, whose parts come from the ranks that have them.
            for window in (window for each in unit for window in _windows(each, dtype, additions, bucket_bytes)):
                packing.make_room(_aligned(_bucket_bytes(window)))
                packing.units.append((_placed(window, packing, rename),))
            continue
        packing.make_room(size)
        packing.units.append(tuple(_placed(piece, packing, rename) for piece in pieces))
    for weight in catalog.loose:
        kept = weight.is_buffer or dtype is None or not weight.tensor.is_floating_point()
        wire = weight.tensor.dtype if kept or dtype is None else dtype
        size = math.prod(weight.tensor.shape) * wire.itemsize
        packing.make_room(_aligned(size))
        names = tuple(map(rename, weight.aliases))
        entry = BucketEntry(rename(weight.name), wire, tuple(weight.tensor.shape), packing.take(size), names)
        packing.loose.append((replace(weight, addition=_addition(weight, additions)), entry))
    packing.end()
    return StreamPlan(tuple(packing.done), _report(packing.done, adapter_bytes))


def _units(groups: Sequence[CatalogGroup]) -> Iterator[list[CatalogGroup]]:
    unit: list[CatalogGroup] = []
    for each in groups:
        if unit and unit[0].group.unit_id != each.group.unit_id:
            yield unit
            unit = []
        unit.append(each)
    if unit:
        yield unit


def _piece(
    each: CatalogGroup,
    weights: Sequence[ShardedWeight],
    dtype: torch.dtype | None,
    additions: Mapping[str, Addition],
) -> Piece:
    group, plan = each.group, each.group.plan
    values = torch.float32 if group.weights.remainder is not None else group.weights.main.dtype
    wire = values if dtype is None or not values.is_floating_point else dtype
    start, stop = 0, plan.numel
    if len(weights) < len(each.weights):
        last = weights[-1].index
        start, stop = plan.offsets[weights[0].index], plan.offsets[last] + plan.tensor_numel(last)
    added = {weight.index: _addition(weight, additions) for weight in weights}
    given = {index: addition for index, addition in added.items() if addition is not None}
    return Piece(group, tuple(weights), start, stop, wire, given)


def _addition(weight: ShardedWeight | LooseWeight, additions: Mapping[str, Addition]) -> Addition | None:
    """Return the addition to a weight, under whichever of its names.

    Raises:
        ConfigError: two of its names have one.
    """
    names = [name for name in (weight.name, *weight.aliases) if name in additions]
    if len(names) > 1:
        raise ConfigError(
            f"weights {names[0]!r} and {names[1]!r} are one tensor (tied), and each has an adapter, which a stream "
            "cannot merge. fix: weight_stream(model), which sends the adapters as they are"
        )
    return additions[names[0]] if names else None


def _windows(
    each: CatalogGroup, dtype: torch.dtype | None, additions: Mapping[str, Addition], bucket_bytes: int
) -> Iterator[Piece]:
    window: list[ShardedWeight] = []
    for weight in each.weights:
        if window and _bucket_bytes(_piece(each, [*window, weight], dtype, additions)) > bucket_bytes:
            yield _piece(each, window, dtype, additions)
            window = []
        window.append(weight)
    if window:
        yield _piece(each, window, dtype, additions)


def _bucket_bytes(piece: Piece) -> int:
    """Return the bytes that a piece takes in a bucket."""
    if piece.tensor_parallel is None:
        return piece.numel * piece.dtype.itemsize
    return sum(_aligned(math.prod(weight.shape) * piece.dtype.itemsize) for weight in piece.weights)


def _placed(piece: Piece, packing: _Packing, rename: Callable[[str], str]) -> PlacedPiece:
    start = packing.take(_bucket_bytes(piece))
    entries, offset = [], start
    for weight in piece.weights:
        if piece.tensor_parallel is None:
            offset = start + (piece.group.plan.offsets[weight.index] - piece.start) * piece.dtype.itemsize
        names = tuple(map(rename, weight.aliases))
        entries.append(BucketEntry(rename(weight.name), piece.dtype, weight.shape, offset, names))
        offset += _aligned(entries[-1].num_bytes)
    return PlacedPiece(piece, start, tuple(entries))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _report(buckets: Sequence[PlannedBucket], adapter_bytes: int) -> StreamReport:
    sizes = [bucket.num_bytes for bucket in buckets]
    entries = [entry for bucket in buckets for entry in bucket.entries]
    pieces = [placed.piece for bucket in buckets for placed in bucket.pieces]
    received = 0
    for piece in pieces:
        shards = Shards.of(piece.group.weights.main)
        bounds = shards.bounds(piece.start, piece.stop)
        received += (piece.numel - (bounds[shards.index + 1] - bounds[shards.index])) * piece.dtype.itemsize
    return StreamReport(
        num_tensors=len(entries),
        tensor_bytes=sum(entry.num_bytes for entry in entries),
        num_buckets=len(buckets),
        largest_bucket_bytes=max(sizes, default=0),
        bucket_memory_bytes=max(sizes[::2], default=0) + max(sizes[1::2], default=0),
        received_bytes=received,
        num_gathers=sum(len(bucket.units) for bucket in buckets),
        scratch_bytes=max((sum(each.scratch_bytes for each in bucket.pieces) for bucket in buckets), default=0),
        adapter_bytes=adapter_bytes,
    )
