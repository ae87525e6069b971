"""Deltas: changes of the weights since a version that each rank remembers, sent instead of the weights.

A step at a small learning rate changes few of the bf16 values that a generator has.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import dbuffer_kernels
from dbuffer.collectives.all_reduce import reduce_numbers
from dbuffer.collectives.waits import wait_for
from dbuffer.mesh import MeshAxis
from megatron_fsdp.checkpoint.model_state import unwrapped
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.streams import CallerStreams
from megatron_fsdp.errors import ConfigError, StateError, TransferError
from megatron_fsdp.formatting import format_bytes
from megatron_fsdp.transfer.bucket import checksum_key, places_of, tensor_checksums
from megatron_fsdp.transfer.catalog import CatalogGroup, LooseWeight, WeightCatalog, check_wire_dtype
from megatron_fsdp.transfer.gather import Piece, RegionGather, Shards, gather_regions, own_values
from megatron_fsdp.transfer.handshake import Handshake
from megatron_fsdp.transfer.versions import refuse_steps, tracker_of

__all__ = ["DeltaBucket", "DeltaEntry", "DeltaReport", "DeltaStream", "apply_delta", "remember_weights"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class DeltaEntry:
    """The changes of one tensor.

    Attributes:
        name, aliases, dtype, shape: of the tensor.
        begin, end: the tensor's range in the bucket's ``values`` (and ``indices``).
        origin: the index of the tensor's first element.
        checksum: 64 bits over the values of the whole tensor after the change; None for a tensor sent whole.
    """

    name: str
    aliases: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    origin: int
    checksum: int | None


@dataclass(frozen=True, slots=True, eq=False)
class DeltaBucket:
    """Changes of the weights of one parameter group, or one whole weight of no group.

    Attributes:
        kind: "sparse": ``values`` belong at ``indices``; "xor": ``values`` are the exclusive or of the bits before and
            after; "whole": ``values`` are those of the tensor.
        since, version: of the weights before and after the change.

    Example:
        version = remember_weights(model)
        optimizer.step()
        deltas = list(weight_stream(model, changed_since=version))
        assert all(delta.since == version and delta.version == version + 1 for delta in deltas)
    """

    kind: str
    entries: tuple[DeltaEntry, ...]
    values: torch.Tensor
    indices: torch.Tensor | None
    since: int
    version: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return self.values.nbytes + (0 if self.indices is None else self.indices.nbytes)


@dataclass(frozen=True, slots=True)
class DeltaReport:
    """The sizes of a stream of deltas.

    Attributes:
        num_elements, num_changed: elements of sharded parameters, and how many have another value now.
        delta_bytes: of all payloads. whole_bytes: of the weights themselves.

    Example:
        stream = weight_stream(model, changed_since=remember_weights(model))
        for delta in stream:
            print(stream.report)  # the part that changed, bytes to send
    """

    num_elements: int
    num_changed: int
    delta_bytes: int
    whole_bytes: int

    @property
    def density(self) -> float:
        """Part of the elements that changed, 0 to 1."""
        return self.num_changed / max(self.num_elements, 1)

    def __str__(self) -> str:
        return (
            f"weight deltas: {self.num_changed:,} of {self.num_elements:,} elements changed ({self.density:.2%}), "
            f"{format_bytes(self.delta_bytes)} instead of {format_bytes(self.whole_bytes)}"
        )


@dataclass(slots=True)
class _Remembered:
    """This rank's shards at a version, of each parameter group in turn, and loose weights by name."""

    version: int
    dtype: torch.dtype
    groups: list[weakref.ref[ParameterGroup]]
    shards: list[torch.Tensor]
    loose: dict[str, torch.Tensor]

    def difference(self, catalog: WeightCatalog) -> str:
        """Return words for what the model has other than when this was remembered; empty if only values differ."""
        groups = [each.group for each in catalog.groups]
        for number in range(max(len(groups), len(self.groups))):
            known = self.groups[number]() if number < len(self.groups) else None
            if number == len(groups):
                return f"unit {known.name!r} is not in the model" if known is not None else "a unit was sharded anew"
            if groups[number] is not known:
                return f"the parameters of unit {groups[number].name!r} were sharded since"
        names = {weight.name for weight in catalog.loose}
        if names != self.loose.keys():
            return f"the model has other plain weights: {', '.join(map(repr, sorted(names ^ self.loose.keys())))}"
        return ""


_REMEMBERED: weakref.WeakKeyDictionary[nn.Module, _Remembered] = weakref.WeakKeyDictionary()


def remember_weights(model: nn.Module, *, dtype: torch.dtype = torch.bfloat16) -> int:
    """Keep a copy of this rank's shard of the weights, in ``dtype``, and return the version; nothing is sent.

    ``weight_stream(model, changed_since=version)`` sends the difference, and remembers the weights that it has sent.
    Takes 2 bytes for each bf16 element of this rank's shard, on the device of the main weights. Every rank calls it.

    Raises:
        ConfigError, StateError: as ``weight_stream``; and for tensor-parallel parameters.

    Example:
        version = remember_weights(model)  # and send all weights once
        model(batch).sum().backward()
        optimizer.step()
        for delta in weight_stream(model, changed_since=version):
            print(delta.kind, len(delta.entries), "tensors")
    """
    check_wire_dtype(dtype)
    catalog = WeightCatalog.of(model)
    for each in catalog.groups:
        if each.group.owned[0].tensor_parallel is not None:
            raise ConfigError(
                f"unit {each.group.name!r}: parameter {each.weights[0].name!r} is cut by tensor or expert parallelism, "
                "whose deltas are not put together. fix: weight_stream(model) without changed_since"
            )
    shards = [_own_shard(each.group, dtype) for each in catalog.groups]
    loose = {weight.name: _wire(weight, dtype).clone() for weight in catalog.loose}
    version = tracker_of(model).current()
    _REMEMBERED[unwrapped(model)] = _Remembered(version, dtype, _references(catalog), shards, loose)
    return version


def _references(catalog: WeightCatalog) -> list[weakref.ref[ParameterGroup]]:
    return [weakref.ref(each.group) for each in catalog.groups]


def forget_weights(model: nn.Module) -> None:
    """Forget the remembered versions of a model's weights: this rank has another part of them now."""
    _REMEMBERED.pop(unwrapped(model), None)


def _own_shard(group: ParameterGroup, dtype: torch.dtype) -> torch.Tensor:
    main = group.weights.main
    wire = dtype if main.dtype.is_floating_point else main.dtype
    out = torch.empty(main.layout.numel, dtype=wire, device=main.device)
    own_values(Piece(group, (), 0, group.plan.numel, wire, {}), out)
    return out


def _wire(weight: LooseWeight, dtype: torch.dtype) -> torch.Tensor:
    value = weight.value()
    return value.to(dtype) if value.is_floating_point() and not weight.is_buffer else value


class DeltaStream(Iterator[DeltaBucket]):
    """The iterator that ``weight_stream(model, changed_since=version)`` returns.

    Attributes:
        since, version: of the weights before and after the change.

    Example:
        version = remember_weights(model)
        optimizer.step()
        stream = weight_stream(model, changed_since=version)
        assert (stream.since, stream.version) == (version, version + 1)
        stream.close()
    """

    def __init__(self, model: nn.Module, since: int, dtype: torch.dtype) -> None:
        remembered = _REMEMBERED.get(unwrapped(model))
        if remembered is None or remembered.version != since or remembered.dtype is not dtype:
            found = "nothing" if remembered is None else f"version {remembered.version} in {remembered.dtype}"
            raise TransferError(
                f"weight_stream(changed_since={since}, dtype={dtype}): this rank remembers {found}, so the difference "
                "is not known. fix: version = remember_weights(model), send all weights once, then "
                "changed_since=version; after a receiver was lost, do so again"
            )
        self._model, self._remembered, self.since = model, remembered, since
        self._catalog, self._tracker = WeightCatalog.of(model), tracker_of(model)
        if difference := remembered.difference(self._catalog):
            raise TransferError(
                f"weight_stream(changed_since={since}): {difference}, so the difference from version {since} is not "
                "known. fix: version = remember_weights(model), send all weights once, then changed_since=version"
            )
        self.version = self._tracker.current()
        self._report: DeltaReport | None = None
        # What the receiver has after the stream: a buffer may change during it.
        self._sent: _Remembered | None = None
        self._caller = CallerStreams(self._catalog.device)
        self._running: Iterator[DeltaBucket] = self._run()
        self._is_done = False

    @property
    def report(self) -> DeltaReport:
        """The sizes of the stream, with the density; available after the first bucket was requested.

        Raises:
            TransferError: it was not.
        """
        if self._report is None:
            raise TransferError("the report of a delta stream is made with its first bucket. fix: iterate it first")
        return self._report

    def __next__(self) -> DeltaBucket:
        """Return the next bucket; at the end the weights that were sent are remembered."""
        try:
            return next(self._running)
        except StopIteration:
            if not self._is_done and self._sent is not None:
                _REMEMBERED[unwrapped(self._model)] = self._sent
                self._is_done = True
            raise

    def close(self) -> None:
        """Leave the stream; the version that was remembered stays."""
        self._is_done = True
        self._running.close()  # type: ignore[attr-defined]  # a generator

    def _check_version(self) -> None:
        if (found := self._tracker.current()) != self.version:
            raise StateError(
                f"weight_stream(changed_since={self.since}): main weights were changed after the call, so the stream "
                f"would send version {found} as version {self.version}. fix: call weight_stream after the change, and "
                "iterate it before the next one"
            )

    def _run(self) -> Iterator[DeltaBucket]:
        catalog, remembered = self._catalog, self._remembered
        versions = (remembered.version, self.version)
        handshake = Handshake(catalog.ranks, "weight_stream(model, changed_since=...)", 1 + len(catalog.groups))
        try:
            try:
                self._check_version()
                refuse_steps(handshake, self._tracker)
                self._caller.before_gather()
                own = [_own_shard(each.group, remembered.dtype) for each in catalog.groups]
                changed = [_bits(new) != _bits(old) for new, old in zip(own, remembered.shards, strict=True)]
            except BaseException as error:
                handshake.fail(error)
                raise
            handshake.meet([f"version {self.version} since {remembered.version} in {remembered.dtype}"])
            counts = _counts(catalog, changed)
            sums = _checksums(catalog, own)
            loose = _changed_loose(catalog, remembered)
            sent = {weight.name: value for weight, value in loose}
            loose_now = {**remembered.loose, **sent}
            self._sent = _Remembered(self.version, remembered.dtype, remembered.groups, own, loose_now)
            self._report = _report(catalog, counts, own, loose)
            self._caller.bucket_landed()
            for each, new, old, mask, count in zip(
                catalog.groups, own, remembered.shards, changed, counts, strict=True
            ):
                handshake.meet()
                # The caller may ask for each bucket on another device stream than the one that compared the weights.
                self._caller.before_gather()
                bucket = _bucket(each, new, old, mask, count, sums, versions)
                self._caller.bucket_landed()
                self._caller.hand_over(bucket.values)
                yield bucket
                del bucket
            for weight, value in loose:
                entry = DeltaEntry(
                    weight.name, weight.aliases, value.dtype, tuple(value.shape), 0, value.numel(), 0, None
                )  # fmt: skip
                self._caller.before_gather()
                self._caller.bucket_landed()
                self._caller.hand_over(value)
                yield DeltaBucket("whole", (entry,), value.reshape(-1), None, *versions)
        finally:
            refuse_steps(handshake, None)
            handshake.leave()
            self._caller.end()


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(_BITS[values.itemsize])


def _counts(catalog: WeightCatalog, changed: list[torch.Tensor]) -> list[list[int]]:
    """Return how many elements of each shard of each group changed; one collective for all groups."""
    gathers = []
    for each, mask in zip(catalog.groups, changed, strict=True):
        shards = Shards.of(each.group.weights.main)
        region = torch.zeros(shards.number, dtype=torch.int64, device=each.group.spec.device)
        region[shards.index] = mask.sum()
        gathers.append(RegionGather(shards, region, range(shards.number + 1)))
    _gather(gathers)
    return [each.region.tolist() for each in gathers]


def _gather(gathers: list[RegionGather]) -> None:
    works: list[dist.Work] = []
    gather_regions(gathers, works)
    for work in works:
        wait_for(work, gathers[0].region)


def _checksums(catalog: WeightCatalog, own: list[torch.Tensor]) -> dict[str, int]:
    """Return the checksum of each whole tensor of the groups: the sum of its parts' checksums."""
    names: list[str] = []
    parts: list[tuple[list[MeshAxis], torch.Tensor]] = []
    for each, values in zip(catalog.groups, own, strict=True):
        main = each.group.weights.main
        for weight in each.weights:
            piece = main.layout.piece(weight.index, values)
            first = main.layout.held(weight.index).start
            found = dbuffer_kernels.checksum(piece, key=checksum_key(weight.name), first_element=first)
            names.append(weight.name)
            parts.append((each.group.spread_over(main.placements), found.to(each.group.spec.device)))
    return {name: int(total) % (1 << 64) for name, total in zip(names, reduce_numbers(parts, "sum"), strict=True)}


def _changed_loose(catalog: WeightCatalog, remembered: _Remembered) -> list[tuple[LooseWeight, torch.Tensor]]:
    found = [(weight, _wire(weight, remembered.dtype)) for weight in catalog.loose]
    # Copies: the next forward or step changes a buffer or a weight that is here in its own memory.
    return [(weight, value.clone()) for weight, value in found if not _is_same(value, remembered.loose[weight.name])]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have one dtype, one shape and the same bits: -0.0 is not 0.0, a NaN is itself."""
    if one.dtype is not other.dtype or one.shape != other.shape or one.device != other.device:
        return False
    flat = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(*flat)


def _is_sparse(numel: int, count: int, itemsize: int) -> bool:
    return count * (itemsize + _index_dtype(numel).itemsize) < numel * itemsize


def _index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel < 1 << 31 else torch.int64


def _bucket(
    each: CatalogGroup,
    new: torch.Tensor,
    old: torch.Tensor,
    mask: torch.Tensor,
    counts: list[int],
    sums: Mapping[str, int],
    versions: tuple[int, int],
) -> DeltaBucket:
    group, plan = each.group, each.group.plan
    shards, device, total = Shards.of(group.weights.main), group.spec.device, sum(counts)
    if not _is_sparse(plan.numel, total, new.itemsize):
        region = torch.empty(plan.numel, dtype=_BITS[new.itemsize], device=device)
        gather = RegionGather(shards, region, shards.bounds(0, plan.numel))
        region[gather.bounds[shards.index] : gather.bounds[shards.index + 1]] = (_bits(new) ^ _bits(old)).to(device)
        _gather([gather])
        places = [(plan.offsets[w.index], plan.offsets[w.index] + plan.tensor_numel(w.index)) for w in each.weights]
        entries = _entries(each, new.dtype, places, sums)
        return DeltaBucket("xor", entries, region, None, *versions)
    bounds = [sum(counts[:shard]) for shard in range(len(counts) + 1)]
    mine = slice(bounds[shards.index], bounds[shards.index + 1])
    indices = torch.empty(total, dtype=_index_dtype(plan.numel), device=device)
    values = torch.empty(total, dtype=new.dtype, device=device)
    places_here = mask.nonzero().view(-1)
    indices[mine] = (places_here + group.weights.main.layout.start).to(indices)
    values[mine] = new[places_here].to(device)
    if total:
        _gather([RegionGather(shards, indices, bounds), RegionGather(shards, values, bounds)])
    starts = torch.tensor([plan.offsets[w.index] for w in each.weights], device=device)
    stops = starts + torch.tensor([plan.tensor_numel(w.index) for w in each.weights], device=device)
    # Indices of all ranks ascend: shards follow each other, and so do the changes in each.
    begins, ends = (torch.searchsorted(indices, edge.to(indices)).tolist() for edge in (starts, stops))
    entries = _entries(each, new.dtype, list(zip(begins, ends, strict=True)), sums)
    return DeltaBucket("sparse", entries, values, indices, *versions)


def _entries(
    each: CatalogGroup, dtype: torch.dtype, places: list[tuple[int, int]], sums: Mapping[str, int]
) -> tuple[DeltaEntry, ...]:
    plan = each.group.plan
    return tuple(
        DeltaEntry(w.name, w.aliases, dtype, w.shape, begin, end, plan.offsets[w.index], sums[w.name])
        for w, (begin, end) in zip(each.weights, places, strict=True)
    )


def _report(
    catalog: WeightCatalog,
    counts: list[list[int]],
    own: list[torch.Tensor],
    loose: list[tuple[LooseWeight, torch.Tensor]],
) -> DeltaReport:
    numel = delta = 0
    for each, count, values in zip(catalog.groups, counts, own, strict=True):
        plan, size = each.group.plan, values.itemsize
        numel += sum(plan.tensor_numel(weight.index) for weight in each.weights)
        is_sparse = _is_sparse(plan.numel, sum(count), size)
        delta += sum(count) * (size + _index_dtype(plan.numel).itemsize) if is_sparse else plan.numel * size
    whole = sum(
        plan.tensor_numel(weight.index) * values.itemsize
        for each, values in zip(catalog.groups, own, strict=True)
        for plan in (each.group.plan,)
        for weight in each.weights
    )
    others = sum(weight.tensor.numel() * weight.tensor.element_size() for weight in catalog.loose)
    return DeltaReport(numel, sum(map(sum, counts)), delta + sum(value.nbytes for _, value in loose), whole + others)


# ---------------------------------------------------------------- at the receiver


def apply_delta(state: Mapping[str, torch.Tensor], bucket: DeltaBucket, *, version: int, verify: bool = True) -> None:
    """Change the tensors of a receiver, which has the weights of version ``bucket.since``.

    Args:
        state: such as ``model.state_dict()``: contiguous tensors of the dtype that was sent.
        version: of the weights that the receiver has.
        verify: compare the result with the checksums of the table; reads each tensor once.
    Raises:
        TransferError: the receiver has another version, or a tensor has no place, another shape or dtype; nothing was
            written. Or the result differs from the trainer's weights.

    Example:
        state, version = dict(weight_stream(model)), remember_weights(model)  # the receiver's state
        optimizer.step()
        for delta in weight_stream(model, changed_since=version):
            apply_delta(state, delta, version=version)
    """
    if version != bucket.since:
        raise TransferError(
            f"a delta from version {bucket.since} to {bucket.version} arrived, and the receiver has version {version}. "
            "fix: send all weights once (weight_stream without changed_since), then deltas since that version"
        )
    places = [(entry, place) for entry in bucket.entries for place in _places(state, entry)]
    for entry, place in places:
        _change(place.detach().view(-1), bucket, entry)
    checked = [(entry, place) for entry, place in places if entry.checksum is not None]
    if verify:
        found = tensor_checksums([(entry.name, place.detach()) for entry, place in checked])
        for (entry, _), number in zip(checked, found, strict=True):
            if number != entry.checksum:
                raise TransferError(
                    f"tensor {entry.name!r} has checksum {number:016x} after the delta to version {bucket.version}, "
                    f"and {entry.checksum:016x} at the trainer. fix: send all weights once: the delta arrived changed, "
                    "or the receiver's weights were not those of the version before"
                )


def _places(state: Mapping[str, torch.Tensor], entry: DeltaEntry) -> list[torch.Tensor]:
    found = places_of(state, entry.name, entry.aliases, entry.shape)
    for place in found:
        if place.dtype is not entry.dtype or not place.is_contiguous():
            raise TransferError(
                f"tensor {entry.name!r} is {place.dtype} with strides {place.stride()} at the receiver, and the "
                f"delta is of contiguous {entry.dtype}. fix: weight_stream(dtype={place.dtype}), or send it whole"
            )
    return found


def _change(flat: torch.Tensor, bucket: DeltaBucket, entry: DeltaEntry) -> None:
    values = bucket.values[entry.begin : entry.end].to(flat.device)
    if bucket.kind == "whole":
        flat.copy_(values)
    elif bucket.indices is None:
        _bits(flat).bitwise_xor_(values)
    else:
        places = bucket.indices[entry.begin : entry.end].to(flat.device).long() - entry.origin
        flat[places] = values
