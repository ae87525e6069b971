"""GroupReport: what one parameter group of the engine holds, and how it is laid out."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dbuffer import DBuffer, Granularity, Plan
from dbuffer import plan as plan_of
from dbuffer.storage import FlatStorage
from megatron_fsdp.build.packed_layout import wire_words
from megatron_fsdp.runtime.grads.packed_gradients import PackedGradients
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.weights.hooked_weights import HookedWeights
from megatron_fsdp.runtime.weights.post_forward_shard import PostForwardShard

__all__ = ["BufferReport", "CollectiveReport", "GroupReport", "group_report", "storages_of"]


@dataclass(frozen=True, slots=True)
class BufferReport:
    """One flat buffer on one rank.

    Attributes:
        kind: main_weight, remainder, model_weight, main_grad; gathered weights, packed gradients (allocated while in
            use).
        dtype: as PyTorch names it, such as float32. placement: on each mesh axis.
        num_bytes: of this rank's part. shares: the buffer whose memory it is a part of; empty when it has its own.
    """

    kind: str
    dtype: str
    placement: str
    num_bytes: int
    shares: str = ""


@dataclass(frozen=True, slots=True)
class CollectiveReport:
    """A collective that one group issues ``count`` times per optimizer step.

    ``bytes_each`` is the full (unsharded) side: what an all-gather fills, what a reduction reads.
    """

    phase: str
    kind: str
    axis: str
    num_ranks: int
    count: int
    bytes_each: int


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One parameter group.

    Attributes:
        num_parameters, numel: what it holds. buffer_numel: with padding, over all shards.
        compute_dtype, main_dtype, reduce_dtype, main_grad_dtype: of the weights used, the weights stepped, the
            reduction, and the gradient accumulator.
        padding_ratio, lower_bound_numel, gap, binding: the plan's certificate, see ``dbuffer.Plan``.
        resting: buffers that are always there. transient: those that come and go.
        padding_bytes: of those that rest, on this rank.
        collectives: what it issues per optimizer step; nothing on axes of one rank.
        wire: how its weights travel where that is in 8 bits, and what the layout costs; else empty.
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
    collectives: tuple[CollectiveReport, ...] = ()
    wire: str = ""

    def num_bytes(self, *kinds: str) -> int:
        """Return the bytes of buffers of these kinds; memory that two of them share counts once."""
        buffers = (*self.resting, *self.transient)
        return sum(buffer.num_bytes for buffer in buffers if buffer.kind in kinds and not buffer.shares)


def storages_of(group: ParameterGroup) -> Iterator[tuple[str, FlatStorage]]:
    """Yield the storages of a group by the kind of what lies there."""
    for kind, buffer in _buffers(group):
        yield kind, buffer.storage
    part = group.weights.post_forward
    if isinstance(part, PostForwardShard):
        yield "post-forward shard", part.storage


def _buffers(group: ParameterGroup) -> Iterator[tuple[str, DBuffer]]:
    weights = group.weights
    yield "main_weight", weights.main
    if weights.remainder is not None:
        yield "remainder", weights.remainder.buffer
    if weights.model is not weights.main:
        yield "model_weight", weights.model
    for sent in weights.sent if isinstance(weights, HookedWeights) else ():
        yield "packed weights", sent
    if not weights.rests_whole:
        yield "gathered weights", weights.gathered
    if isinstance(group.gradients, PackedGradients):
        yield from group.gradients.buffers()


def _rests(group: ParameterGroup, kind: str) -> bool:
    gradients = group.gradients
    if kind == "gathered weights":
        return group.weights.keeps_gathered
    if gradients is not None and kind in ("main_grad", "reduced gradients"):
        return gradients.binding.keeps if kind == "main_grad" else gradients.reduction.keeps
    return kind != "packed gradients"


def group_report(group: ParameterGroup, names: Sequence[str]) -> GroupReport:
    """Return what a group holds, whose parameters have these names; nothing is said of collectives."""
    plan, dtypes = group.plan, group.spec.dtypes
    is_slice = group.model_weight is not group.main_weight and group.model_weight.storage is group.main_weight.storage
    resting, transient = list[BufferReport](), list[BufferReport]()
    padding = 0
    for kind, buffer in _buffers(group):
        shares = "model_weight" if kind == "main_weight" and is_slice else ""
        found = BufferReport(kind, _dtype_name(buffer.dtype), _placement_text(buffer), buffer.nbytes, shares)
        if not _rests(group, kind):
            if group.requires_grad or "grad" not in kind:
                transient.append(found)
            continue
        resting.append(found)
        if not shares:
            layout = group.main_weight.layout if kind == "packed weights" else buffer.layout
            padding += sum(map(len, layout.padding())) * buffer.dtype.itemsize
    part = group.weights.post_forward
    if part is not None:
        whole = next(each for each in (*transient, *resting) if each.kind == "gathered weights")
        transient.insert(1, BufferReport("post-forward shard", whole.dtype, whole.placement, part.nbytes))
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
        wire=_layout_words(group),
    )


def _layout_words(group: ParameterGroup) -> str:
    """Return how weights travel in 8 bits, and what blocks that no shard may cut cost in padding; empty for neither."""
    dtypes, plan = group.spec.dtypes, group.plan
    words = [] if dtypes.gather is None else [wire_words(plan, dtypes.gather)]
    if dtypes.block_numel > 1:
        more = plan.numel - _freely_cut(plan.shapes, plan.granularities, plan.num_shards)
        padding = f"{more:,} elements ({more / max(plan.data_numel, 1):.2%}) more padding"
        words.append(f"cut at multiples of {dtypes.block_numel} elements: {padding} than without")
    return "; ".join(words)


@functools.lru_cache(maxsize=256)
def _freely_cut(shapes: tuple[tuple[int, ...], ...], granularities: tuple[Granularity, ...], num_shards: int) -> int:
    return plan_of(shapes, num_shards, granularity=granularities).numel


def _named_binding(plan: Plan, names: Sequence[str]) -> str:
    """Put a parameter's name to the tensor that the plan's certificate gives by number and shape."""

    def named(found: re.Match[str]) -> str:
        # A unit of several regions numbers its tensors across all of them; the shape is right in any case.
        alike = [name for name, shape in zip(names, plan.shapes, strict=True) if str(shape) == found[1]]
        return f"{alike[0]} {found[1]}" if alike else found[0]

    return re.sub(r"tensor \d+ of shape (\([^)]*\))", named, plan.binding)


def _placement_text(buffer: DBuffer) -> str:
    pairs = zip(buffer.axes, buffer.placements, strict=True)
    return ", ".join(f"{axis.name}: {type(placement).__name__.lstrip('_')}" for axis, placement in pairs)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
