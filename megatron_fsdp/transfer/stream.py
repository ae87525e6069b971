"""``weight_stream``: all weights of a sharded model, whole, one after the other, on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn

from dbuffer.collectives.waits import wait_for
from megatron_fsdp.checkpoint.safetensors_model import NameMap
from megatron_fsdp.engine.param_group import ParameterGroup, group_of_parameter
from megatron_fsdp.engine.streams import CallerStreams
from megatron_fsdp.errors import AgreementError, ConfigError, StateError, TransferError
from megatron_fsdp.transfer.bucket import WeightBucket, tensor_checksums
from megatron_fsdp.transfer.catalog import WeightCatalog, check_wire_dtype
from megatron_fsdp.transfer.delta import DeltaStream
from megatron_fsdp.transfer.gather import Piece, RegionGather, assemble, gather_regions
from megatron_fsdp.transfer.handshake import Handshake
from megatron_fsdp.transfer.lora import LoraMerge
from megatron_fsdp.transfer.stream_plan import PlacedPiece, PlannedBucket, StreamPlan, StreamReport, plan_stream
from megatron_fsdp.transfer.versions import refuse_steps, tracker_of

__all__ = ["WeightStream", "weight_stream"]

# A tensor that owns memory, and its storage's own object.
_USES_AT_REST = 2


@overload
def weight_stream(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = ...,
    names: Mapping[str, str] | NameMap | None = ...,
    bucket_bytes: int = ...,
    device: torch.device | str | None = ...,
    changed_since: None = ...,
    merge_lora: bool = ...,
    checksums: bool = ...,
) -> WeightStream: ...


@overload
def weight_stream(model: nn.Module, *, dtype: torch.dtype | None = ..., changed_since: int) -> DeltaStream: ...


def weight_stream(  # noqa: PLR0913  # options, each of which stands alone
    model: nn.Module,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    names: Mapping[str, str] | NameMap | None = None,
    bucket_bytes: int = 1 << 30,
    device: torch.device | str | None = None,
    changed_since: int | None = None,
    merge_lora: bool = False,
    checksums: bool = False,
) -> WeightStream | DeltaStream:
    """Return an iterator of (name, whole tensor) over all weights of a (sharded) model, in one order on all ranks.

    Every rank of the model iterates it, between steps; each gets all tensors. Each unit is gathered from the main
    weights by one collective, while the caller uses the previous bucket; units and their gathered weights stay
    unchanged. The stream has sharded, frozen, ignored and replicated parameters, and persistent buffers of modules. A
    tied weight is sent once, under its first name (``stream.aliases`` has the others). Tensor- and expert-parallel
    parts are put together. If ranks hold different plain tensors under one name, each rank gets its own.

    Memory above rest is at most two buckets (``print(stream.explain())`` before the first tensor). A tensor that is
    kept stays valid and keeps the memory of its bucket.

    Args:
        dtype: of floating-point parameters; None sends each in the dtype of its optimizer step. Buffers keep theirs.
        names: patterns of names here and names at the receiver, as in ``export_safetensors``.
        bucket_bytes: units are gathered into buckets of this size; a larger unit is cut between its tensors.
        device: of the yielded tensors; None leaves them on the compute device.
        changed_since: send the changes since this version instead, as ``DeltaBucket``s for ``apply_delta``. Each rank
            has to remember that version: ``remember_weights``, or an earlier stream of changes that ended.
        merge_lora: send the weights that peft's ``merge_and_unload`` would make instead of base weights and adapters.
        checksums: compute 64 bits over each tensor, for ``WeightBucket.verify``; reads each bucket once.
    Raises:
        ConfigError, StateError: weights that cannot be sent, which are named.
        AgreementError, MeshError: on iteration, when another rank leaves the stream, does something else, or ended.

    Example:
        for name, tensor in weight_stream(model):
            if dist.get_rank() == 0:
                print(name, tensor.shape)
    """
    check_wire_dtype(dtype)
    if changed_since is not None:
        if names or merge_lora or dtype is None or device is not None:
            raise ConfigError(
                "weight_stream(changed_since=...) sends changes under the model's own names, in one dtype, on the "
                "compute device. fix: leave names=, merge_lora= and device= out, and give a dtype"
            )
        return DeltaStream(model, changed_since, dtype)
    catalog = WeightCatalog.of(model)
    merge = LoraMerge.of(model) if merge_lora else None
    renamed: dict[str, str] = {}
    if merge is not None:
        adapters = merge.adapters(model)
        adapter_bytes = sum(each.numel() * each.element_size() for each in adapters)
        adapter_groups = _groups_of(adapters)
        catalog, renamed = merge.rest(catalog), merge.renamed
    else:
        adapters, adapter_bytes, adapter_groups = [], 0, []
    every = [each for group in catalog.groups for each in (w.name for w in group.weights)]
    every += [alias for group in catalog.groups for w in group.weights for alias in w.aliases]
    every += [each for w in catalog.loose for each in (w.name, *w.aliases)]
    name_map = names if isinstance(names, NameMap) else NameMap(names or {})
    translated = name_map.translate(renamed.get(name, name) for name in every)
    plan = plan_stream(
        catalog,
        dtype=dtype,
        rename=lambda name: translated[renamed.get(name, name)],
        bucket_bytes=bucket_bytes,
        additions={} if merge is None else merge.additions,
        adapter_bytes=adapter_bytes,
    )
    wanted = None if device is None else torch.device(device)
    session = _Session(model, catalog, plan, _Options(wanted, checksums), merge, adapters, adapter_groups)
    return WeightStream(session)


class WeightStream(Iterator[tuple[str, torch.Tensor]]):
    """The iterator that ``weight_stream`` returns; also a context manager that closes it.

    Attributes:
        aliases: of each tied weight that is sent once, its other names.
        version: of the weights that are sent (``weight_version``).

    Example:
        with weight_stream(model, bucket_bytes=1 << 20) as stream:
            print(stream.explain())
            print(stream.version, [name for name, tensor in stream])
    """

    def __init__(self, session: _Session) -> None:
        self._session = session
        self._running: Iterator[Any] | None = None
        self.aliases = {
            entry.name: entry.aliases for bucket in session.plan.buckets for entry in bucket.entries if entry.aliases
        }
        self.version = session.version

    def explain(self) -> StreamReport:
        """Return the costs of the stream: tensors, buckets, bytes received, memory. Nothing is sent."""
        return self._session.plan.report

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return the name, dtype and shape of each tensor, in the order of the stream. Nothing is sent."""
        buckets = self._session.plan.buckets
        return [(entry.name, entry.dtype, entry.shape) for bucket in buckets for entry in bucket.entries]

    def buckets(self) -> Iterator[WeightBucket]:
        """Return an iterator of flattened buckets instead: bytes and a table, without a copy per tensor.

        Raises:
            StateError: the stream was begun already.
        """
        if self._running is not None:
            raise StateError("this weight_stream was begun already. fix: make another one with weight_stream(model)")
        self._running = self._session.buckets()
        return self._running

    def __next__(self) -> tuple[str, torch.Tensor]:
        """Return the next name and whole tensor."""
        if self._running is None:
            self._running = self._session.tensors()
        found: tuple[str, torch.Tensor] = next(self._running)
        return found

    def close(self) -> None:
        """Leave the stream before its end; optimizers may step again, and other ranks that go on raise an error."""
        close: Callable[[], None] | None = getattr(self._running, "close", None)
        if close is None:
            self._running = iter(())
        else:
            close()

    def __enter__(self) -> WeightStream:
        """Return the stream."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the stream."""
        self.close()


@dataclass(frozen=True, slots=True)
class _Options:
    device: torch.device | None
    checksums: bool


@dataclass(slots=True, eq=False)
class _Flight:
    """A bucket that is being gathered.

    Attributes:
        memory: of the bucket, 1-D uint8. scratch: of pieces whose tensor-parallel parts are put together.
        works: of the gathers.
    """

    planned: PlannedBucket
    memory: torch.Tensor
    scratch: list[tuple[PlacedPiece, torch.Tensor]]
    works: list[dist.Work]

    def land(self) -> None:
        """Wait for the gathers and assemble tensor-parallel parts; the bucket is complete afterwards."""
        for work in self.works:
            wait_for(work, self.memory)
        self.works = []
        for placed, region in self.scratch:
            piece = placed.piece
            plan = piece.group.plan
            local = [
                region[plan.offsets[weight.index] - piece.start :][: plan.tensor_numel(weight.index)].view(
                    plan.shapes[weight.index]
                )
                for weight in piece.weights
            ]
            assert piece.tensor_parallel is not None
            assemble(local, piece.tensor_parallel, [entry.view(self.memory) for entry in placed.entries])
        self.scratch = []
        for weight, entry in self.planned.loose:
            entry.view(self.memory).copy_(weight.value())


class _Session:
    """A pass over the buckets: at most two of them have memory at a time."""

    def __init__(
        self,
        model: nn.Module,
        catalog: WeightCatalog,
        plan: StreamPlan,
        options: _Options,
        merge: LoraMerge | None,
        adapters: list[nn.Parameter],
        adapter_groups: list[ParameterGroup],
    ) -> None:
        self.plan = plan
        self._tracker = tracker_of(model)
        # The modules' hooks only have weak references to groups, but the pieces need the model to stay alive.
        self._model = model
        self._options, self._catalog, self._merge = options, catalog, merge
        self._adapters, self._adapter_groups = adapters, adapter_groups
        self.version = self._tracker.current()
        self._num_started = 0
        self._flight: _Flight | None = None
        # Memory of buckets that the caller has finished with, and of the caller's current bucket.
        self._spare: list[torch.Tensor] = []
        self._lent: list[torch.Tensor] = []
        self._handshake = Handshake(catalog.ranks, "weight_stream(model)", len(plan.buckets))
        self._device = catalog.device
        self._caller = CallerStreams(self._device)

    # ------------------------------------------------------------------ the iterators

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors; the next bucket is gathered from the second tensor of a bucket on.

        Not from the first: until then the caller's loop variable holds a tensor of the bucket before.
        """
        for bucket in self._run():
            is_first = True
            for name, tensor in bucket.tensors():
                self._caller.hand_over(tensor)
                yield name, tensor
                del tensor
                if is_first:
                    self._start_next()
                    is_first = False
            del bucket

    def buckets(self) -> Iterator[WeightBucket]:
        """Yield buckets; the next one is gathered while a bucket is used."""
        for bucket in self._run():
            self._start_next()
            self._caller.hand_over(bucket.data)
            yield bucket

    def _run(self) -> Iterator[WeightBucket]:
        count = len(self.plan.buckets)
        try:
            for index in range(count):
                if self._flight is None:
                    self._start_next()
                bucket = self._landed(index)
                yield bucket
                bucket.expire()
                self._spare, self._lent = self._spare + self._lent, []
        finally:
            self._end()

    def _landed(self, index: int) -> WeightBucket:
        flight, self._flight = self._flight, None
        assert flight is not None
        try:
            flight.land()
        except RuntimeError as error:
            self._handshake.cut_off()
            AgreementError.raise_for("weight_stream", f"the gather of bucket {index}", error)
        self._caller.bucket_landed()
        memory, entries = flight.memory, flight.planned.entries
        num_bytes = flight.planned.num_bytes
        self._lent.append(memory)
        if self._options.device is not None and self._options.device != memory.device:
            memory = memory.to(self._options.device)
        data = memory[:num_bytes]
        if self._options.checksums:
            found = tensor_checksums([(entry.name, entry.view(data)) for entry in entries])
            entries = [replace(entry, checksum=each) for entry, each in zip(entries, found, strict=True)]
        return WeightBucket(data, entries, version=self.version, index=index, num_buckets=len(self.plan.buckets))

    def _end(self) -> None:
        """End the stream: wait for a gather in flight, and tell ranks that continue that this one does not."""
        refuse_steps(self, None)
        flight, self._flight = self._flight, None
        if flight is not None:
            with contextlib.suppress(RuntimeError):
                flight.land()
                self._caller.bucket_landed()
        self._handshake.leave()
        self._caller.end()
        if self._merge is not None:
            self._merge.whole.clear()
        self._spare, self._lent = [], []

    # ------------------------------------------------------------------ a bucket

    def _start_next(self) -> None:
        """Issue the gathers of the next bucket, when all ranks are about to."""
        index = self._num_started
        if index == len(self.plan.buckets):
            return
        planned = self.plan.buckets[index]
        lines: list[str] = []
        try:
            self._check_version()
            self._caller.before_gather()
            memory = self._allocate(planned.num_bytes)
            scratch = {
                id(placed): torch.empty(placed.piece.numel, dtype=placed.piece.dtype, device=self._device)
                for placed in planned.pieces
                if placed.is_assembled
            }
            if index == 0:
                refuse_steps(self, self._tracker)
                lines = [f"version {self.version} of the weights", *self.plan.lines()]
        except BaseException as error:
            self._handshake.fail(error)
            if isinstance(error, RuntimeError) and "memory" in str(error):
                raise TransferError(
                    f"bucket {index} of weight_stream(model) needs {planned.num_bytes} bytes on {self._device}, and "
                    f"two buckets have memory at a time: {error}. fix: weight_stream(model, bucket_bytes=...) with a "
                    "smaller number; the model is as it was"
                ) from error
            raise
        self._handshake.meet(lines)
        self._num_started += 1
        if index == 0:
            self._gather_adapters()
        flight = self._flight = _Flight(planned, memory, [], [])
        for unit in planned.units:
            gathers = []
            for placed in unit:
                piece = placed.piece
                if placed.is_assembled:
                    region = scratch[id(placed)]
                    flight.scratch.append((placed, region))
                else:
                    size = piece.numel * piece.dtype.itemsize
                    region = memory[placed.offset : placed.offset + size].view(piece.dtype)
                gathers.append(RegionGather.filled(piece, region))
            gather_regions(gathers, flight.works)

    def _check_version(self) -> None:
        if (found := self._tracker.current()) != self.version:
            raise StateError(
                f"weight_stream: main weights were changed while they were being sent (version {self.version} began, "
                f"and {found} is here now). The receiver has weights of both. fix: change weights after the loop over "
                "the stream, and send all of them again"
            )

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory for a bucket: an earlier bucket's if the caller keeps no tensor of it, else new memory."""
        # If the caller keeps a tensor of a bucket, the bucket's memory belongs to the caller from now on.
        free = [memory for memory in self._spare if _num_uses(memory) == _USES_AT_REST and memory.numel() >= num_bytes]
        self._spare = []
        return free[0] if free else torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _gather_adapters(self) -> None:
        """Gather the LoRA weights that are merged; they stay until the end of the stream."""
        if self._merge is None:
            return
        whole = self._merge.whole
        for group in self._adapter_groups:
            numel, dtype = group.plan.numel, group.weights.main.dtype
            dtype = torch.float32 if group.weights.remainder is not None else dtype
            region = torch.empty(numel, dtype=dtype, device=self._device)
            piece = Piece(group, (), 0, numel, dtype, {})
            works: list[dist.Work] = []
            gather_regions([RegionGather.filled(piece, region)], works)
            for work in works:
                wait_for(work, region)
            for index, parameter in enumerate(group.parameters.values()):
                start = group.plan.offsets[index]
                whole[id(parameter)] = region[start : start + group.plan.tensor_numel(index)].view(parameter.shape)
        for parameter in self._adapters:
            if id(parameter) not in whole:
                whole[id(parameter)] = parameter.detach()


def _num_uses(memory: torch.Tensor) -> int:
    """Return how many tensors, and other holders, a storage has."""
    storage = memory.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def _groups_of(parameters: list[nn.Parameter]) -> list[ParameterGroup]:
    found = (group_of_parameter(each) for each in parameters)
    return list({id(group): group for group in found if group is not None}.values())
