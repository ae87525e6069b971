"""UnitReport: the buffers of a unit and its parameter groups, with sizes, dtypes and placements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dbuffer import DBuffer, Plan
from dbuffer.storage import FlatStorage
from dbuffer_kernels import num_blocks
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.optim.adamw.int8_moments import is_coded
from megatron_fsdp.planning.stand_in import StoodIn, reshard_asked

__all__ = [
    "BufferReport",
    "CollectiveReport",
    "GroupReport",
    "UnitReport",
    "adamw_bytes",
    "storages_of",
    "unit_report",
]


@dataclass(frozen=True, slots=True)
class BufferReport:
    """This rank's part of a flat buffer.

    Attributes:
        kind: main_weight, remainder, model_weight or main_grad; or, allocated only while in use, gathered weights or
            packed gradients.
        dtype: PyTorch's name, such as float32. placement: the placement on each mesh axis.
        num_bytes: bytes of this rank's part. shares: the kind of the buffer whose memory it is part of; empty if it has
            its own.
    """

    kind: str
    dtype: str
    placement: str
    num_bytes: int
    shares: str = ""


@dataclass(frozen=True, slots=True)
class CollectiveReport:
    """Equal collectives of one phase of an optimizer step. An axis with one rank has no collectives.

    ``num_bytes`` is the sum of their full (unsharded) sides: the output of an all-gather, the input of a reduction.
    """

    phase: str
    kind: str
    axis: str
    num_ranks: int
    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One parameter group.

    num_parameters, numel: parameters and elements of the group. buffer_numel: elements of all shards with padding.
    compute_dtype, main_dtype, reduce_dtype, main_grad_dtype: dtypes of the weights in compute, of the weights that
        the optimizer steps, of the reduction, and of the gradient accumulator.
    padding_ratio, lower_bound_numel, gap, binding: see ``dbuffer.Plan``.
    resting: buffers that are always allocated. transient: buffers that are allocated while in use.
    padding_bytes: padding in the resting buffers on this rank.
    wire: how weights are gathered in 8 bits; empty if they are not.
    """

    num_parameters: int
    numel: int
    buffer_numel: int
    requires_grad: bool
    compute_dtype: str
    main_dtype: str
    reduce_dtype: str
    main_grad_dtype: str
    padding_ratio: float
    lower_bound_numel: int
    gap: float
    binding: str
    resting: tuple[BufferReport, ...]
    transient: tuple[BufferReport, ...]
    padding_bytes: int
    wire: str = ""

    @property
    def is_cut(self) -> bool:
        """True if the weights that the optimizer steps are sharded."""
        return "Flat" in self.resting[0].placement

    def num_bytes(self, *kinds: str) -> int:
        """Return the bytes of the buffers of these kinds; shared memory counts once."""
        buffers = (*self.resting, *self.transient)
        return sum(buffer.num_bytes for buffer in buffers if buffer.kind in kinds and not buffer.shares)


@dataclass(frozen=True, slots=True)
class UnitReport:
    """One unit.

    Attributes:
        modules: class names of its modules. is_root: the unit is inside no other unit.
        reason: whether weights are released or kept after forward, and why.
        whole_bytes: bytes of all its weights in compute dtype.
        has_hooks: parameters whose class has its own all-gather hooks; they are counted as plain weights.
    """

    name: str
    modules: tuple[str, ...]
    reason: str
    groups: tuple[GroupReport, ...]
    is_root: bool = False
    whole_bytes: int = 0
    has_hooks: tuple[str, ...] = ()

    @property
    def persistent_bytes(self) -> int:
        """Bytes of its buffers at rest; shared memory counts once."""
        return sum(buffer.num_bytes for group in self.groups for buffer in group.resting if not buffer.shares)

    def transient_bytes(self, kind: str) -> int:
        """Return the bytes of its transient buffers of one kind."""
        return sum(buffer.num_bytes for group in self.groups for buffer in group.transient if buffer.kind == kind)


def unit_report(stood: StoodIn) -> UnitReport:
    """Return the report on one unit."""
    unit = stood.unit
    is_root = unit is unit.root.outermost()
    asked = reshard_asked(unit)
    return UnitReport(
        name=stood.name,
        modules=stood.modules,
        reason=_reason(unit, asked, is_root=is_root),
        groups=tuple(_group_report(group, stood.names(group)) for group in unit.groups),
        is_root=is_root,
        whole_bytes=sum(group.plan.numel * group.spec.dtypes.compute.itemsize for group in unit.groups),
        has_hooks=stood.has_hooks,
    )


def _reason(unit: Unit, asked: bool | int | None, *, is_root: bool) -> str:
    """Return why a unit keeps or releases its weights after forward, in words."""
    if not unit.groups:
        return "nothing to release: it has no parameters of its own"
    if all(group.weights.rests_whole for group in unit.groups):
        return "nothing to release: its weights rest whole on every rank"
    if asked is not None and not isinstance(asked, bool):
        return f"released after forward but for one part in {asked}: reshard_after_forward={asked}"
    if asked is not None:
        return f"{'released' if asked else 'kept'} after forward: reshard_after_forward={asked}"
    return (
        "kept after forward: it is the root"
        if is_root
        else "released after forward unless its backward is next: the default below the root"
    )


# ---------------------------------------------------------------------- groups


def storages_of(group: ParameterGroup) -> Iterator[tuple[str, FlatStorage]]:
    """Yield the storages of a group, each with the kind of its buffer."""
    for kind, buffer, _ in _buffers(group):
        yield kind, buffer.storage
    part = group.weights.post_forward
    if part is not None:
        yield "post-forward shard", part.storage


def _buffers(group: ParameterGroup) -> Iterator[tuple[str, DBuffer, bool]]:
    """Yield each buffer of a group: its kind, the buffer, and whether it is at rest."""
    weights, gradients = group.weights, group.gradient_buffer
    yield "main_weight", weights.main, True
    if weights.remainder is not None:
        yield "remainder", weights.remainder.buffer, True
    if weights.model is not weights.main:
        yield "model_weight", weights.model, True
    if weights.gather_hooks is not None:
        yield "packed weights", weights.gather_hooks.sent, True
    if not weights.rests_whole:
        yield "gathered weights", weights.gathered, weights.keeps_gathered
    if gradients is not None:
        rests = {"main_grad": gradients.binding.memory.keeps, "reduced gradients": gradients.reduction.keeps}
        for kind, buffer in gradients.buffers():
            yield kind, buffer, rests.get(kind, kind != "packed gradients")


def _group_report(group: ParameterGroup, names: Sequence[str]) -> GroupReport:
    plan, dtypes, part = group.plan, group.spec.dtypes, group.weights.post_forward
    is_slice = group.model_weight is not group.main_weight and group.model_weight.storage is group.main_weight.storage
    resting, transient = list[BufferReport](), list[BufferReport]()
    padding = 0
    for kind, buffer, rests in _buffers(group):
        shares = "model_weight" if kind == "main_weight" and is_slice else ""
        found = BufferReport(kind, _dtype_name(buffer.dtype), _placement_text(buffer), buffer.nbytes, shares)
        if rests or group.requires_grad or "grad" not in kind:
            (resting if rests else transient).append(found)
        if part is not None and kind == "gathered weights":
            transient.append(replace(found, kind="post-forward shard", num_bytes=part.storage.nbytes))
        if rests and not shares:
            layout = group.main_weight.layout if kind == "packed weights" else buffer.layout
            padding += sum(map(len, layout.padding())) * buffer.dtype.itemsize
    return GroupReport(
        num_parameters=len(group.parameters),
        numel=plan.data_numel,
        buffer_numel=plan.numel,
        requires_grad=group.requires_grad,
        compute_dtype=_dtype_name(dtypes.compute),
        main_dtype=_dtype_name(dtypes.main),
        reduce_dtype=_dtype_name(dtypes.reduce),
        main_grad_dtype=_dtype_name(dtypes.main_grad),
        padding_ratio=plan.padding_ratio,
        lower_bound_numel=plan.lower_bound_numel,
        gap=plan.gap,
        binding=_named_binding(plan, names),
        resting=tuple(resting),
        transient=tuple(transient),
        padding_bytes=padding,
        wire="" if dtypes.gather is None else f"gathered as {dtypes.gather}: a byte an element, and a scale for 256",
    )


def _named_binding(plan: Plan, names: Sequence[str]) -> str:
    """Return the plan's ``binding`` with parameter names instead of tensor numbers."""
    named = (names[tensor] for tensor in plan.binding_tensors)
    return re.sub(r"tensor \d+ of shape", lambda _: next(named), plan.binding)


def _placement_text(buffer: DBuffer) -> str:
    pairs = zip(buffer.axes, buffer.placements, strict=True)
    return ", ".join(f"{axis.name}: {type(placement).__name__.lstrip('_')}" for axis, placement in pairs)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------- the optimizer's state


def adamw_bytes(group: ParameterGroup, moments_dtype: torch.dtype | None = None) -> int:
    """Return the bytes of AdamW's state on this rank: two moments, and a step count per trained parameter.

    Args:
        moments_dtype: None: the main weights' dtype, as in ``torch.optim.AdamW``; FP32 if the main weights are split.
    """
    main, dtypes = group.main_weight, group.spec.dtypes
    owned = [main.get_local_tensor(index).numel() for index in range(len(group.parameters))]
    parameters = group.parameters.values()
    trained = [numel for numel, parameter in zip(owned, parameters, strict=True) if parameter.requires_grad]
    if dtypes.moments == "int8" and trained:
        # Codes and scales for the whole buffer, and FP32 moments for small parameters.
        local = main.local_buffer.numel()
        small = sum(numel for numel, shape in zip(owned, group.plan.shapes, strict=True) if not is_coded(shape))
        return 2 * (local + 4 * num_blocks(local) + 4 * small) + 4 * len(owned)
    return 2 * sum(trained) * (moments_dtype or dtypes.stepped).itemsize + 4 * len(trained)
