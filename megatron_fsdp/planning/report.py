"""Report: what a sharded model takes, known before it is trained: buffers, padding, transient memory and traffic."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import overload

import torch
from torch import nn
from torch.optim import Optimizer

from dbuffer import BufferPlacement, Granularity
from dbuffer import plan as plan_of
from dbuffer_kernels import num_blocks
from megatron_fsdp.build.packed_layout import wire_words
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.int8_moments import is_coded
from megatron_fsdp.optim.muon import explain_ownership
from megatron_fsdp.optim.ownership import OwnershipReport
from megatron_fsdp.planning.live_model import read_facts
from megatron_fsdp.planning.model_spec import AxisFacts, BufferFacts, GroupFacts, ModelFacts, UnitFacts
from megatron_fsdp.planning.report_text import (
    ArenaReport,
    BufferReport,
    CollectiveReport,
    CollectiveTotal,
    GroupReport,
    PeakReport,
    Report,
    UnitReport,
)
from megatron_fsdp.planning.step_simulator import Forecast, Issue, Phase, forecast_step

__all__ = [
    "ArenaReport",
    "BufferReport",
    "CollectiveReport",
    "CollectiveTotal",
    "GroupReport",
    "PeakReport",
    "Report",
    "UnitReport",
    "explain",
    "report_of",
]


@overload
def explain(model: nn.Module, num_microbatches: int = 1) -> Report: ...


@overload
def explain(model: Optimizer, num_microbatches: int = 1) -> tuple[OwnershipReport, ...]: ...


def explain(model: nn.Module | Optimizer, num_microbatches: int = 1) -> Report | tuple[OwnershipReport, ...]:
    """Report on the sharded modules in ``model``: nothing is run, communicated or changed.

    Args:
        model: or a ``Muon`` optimizer, of which every rank asks who owns which matrix (``explain_ownership``).
        num_microbatches: forward and backward passes per optimizer step, each inside ``microbatch(model, is_last)``.
    Raises:
        StateError: ``model`` holds no sharded module.
        ConfigError: ``num_microbatches`` is less than 1.

    Example:
        for block in model.blocks:
            fully_shard(block)
        print(explain(fully_shard(model), num_microbatches=4))
    """
    if isinstance(model, Optimizer):
        return explain_ownership(model)
    return report_of(read_facts(model), num_microbatches)


def report_of(
    facts: ModelFacts,
    num_microbatches: int = 1,
    *,
    forecast: Forecast | None = None,
    moments_dtype: torch.dtype | None = None,
) -> Report:
    """Return the report for facts that may come from a live model or from shapes alone; see ``explain``.

    Args:
        forecast: of the same facts and microbatches, where it is known already.
        moments_dtype: of the optimizer's two moments. None: the main weights', as ``torch.optim.AdamW`` has them; FP32
            where these are split.
    """
    if num_microbatches < 1:
        raise ConfigError(f"explain: num_microbatches={num_microbatches}; an optimizer step has at least one")
    forecast = forecast or forecast_step(facts, num_microbatches)
    is_sharded = any(_is_cut(group) for unit in facts.units for group in unit.groups)
    issues: dict[tuple[int, int], list[Issue]] = {}
    for issue in forecast.issues:
        issues.setdefault((issue.unit, issue.group), []).append(issue)
    units = tuple(
        _unit_report(unit, position, forecast, issues, is_sharded=is_sharded)
        for position, unit in enumerate(facts.units)
    )
    groups = [group for unit in facts.units for group in unit.groups]
    resting = [(group, buffer) for group in groups for buffer in group.resting() if not buffer.shares]
    largest = max(facts.units, key=lambda unit: unit.whole_bytes)
    return Report(
        num_microbatches=num_microbatches,
        num_roots=len({unit.schedule for unit in facts.units}),
        units=units,
        persistent_bytes=sum(group.bytes_of(part) for group, part in resting),
        padding_bytes=sum(group.padding_numel(part.placements) * part.dtype.itemsize for group, part in resting),
        gradient_bytes=sum(group.gradient_bytes for group in groups),
        optimizer_bytes=sum(adamw_bytes(group, moments_dtype) for group in groups),
        largest_unit=largest.name,
        largest_unit_bytes=largest.whole_bytes,
        forward_peak=_peak_report(forecast, Phase.FORWARD),
        backward_peak=_peak_report(forecast, Phase.BACKWARD),
        step_peak=_peak_report(forecast, Phase.STEP),
        collectives=_collective_totals(units),
        unsharded=facts.unsharded,
        unsharded_bytes=facts.unsharded_bytes,
        slot_bytes=forecast.slot_bytes,
        counter_bytes=forecast.counter_bytes,
        scratch_bytes=forecast.scratch_bytes,
        arenas=tuple(ArenaReport(arena.num_bytes, arena.lower_bound, arena.gap) for arena in forecast.arenas),
    )


def _peak_report(forecast: Forecast, phase: Phase) -> PeakReport:
    peak = forecast.peaks[phase]
    return PeakReport(peak.num_bytes, peak.unit, peak.gradient_bytes)


# By positions of unit and group.
_Issues = Mapping[tuple[int, int], Sequence[Issue]]
_KEPT = "kept after forward: the last that forward uses, its backward is next"


def _is_cut(group: GroupFacts) -> bool:
    return group.placements.is_sharded(group.placements.optimizer)


def _unit_report(
    unit: UnitFacts, position: int, forecast: Forecast, issues: _Issues, *, is_sharded: bool
) -> UnitReport:
    is_kept = position in forecast.kept
    return UnitReport(
        name=unit.name,
        modules=unit.modules,
        is_root=unit.is_root,
        note="" if unit.groups else "no parameters of its own: it only orders the units below it",
        reshards_after_forward=unit.reshards_after_forward,
        reason=_KEPT if is_kept else unit.reason,
        ties=unit.ties,
        num_frozen_groups=sum(not group.requires_grad for group in unit.groups),
        replicated=tuple(name for group in unit.groups if is_sharded and not _is_cut(group) for name in group.names),
        groups=tuple(
            _group_report(group, issues.get((position, number), ())) for number, group in enumerate(unit.groups)
        ),
    )


def _group_report(group: GroupFacts, issues: Iterable[Issue]) -> GroupReport:
    plan, dtypes = group.plan, group.dtypes
    return GroupReport(
        num_parameters=len(group.names),
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
        binding=_named_binding(group),
        wire=_layout_words(group),
        resting=tuple(_buffer_report(group, buffer) for buffer in group.resting()),
        transient=tuple(_buffer_report(group, buffer) for buffer in group.transient()),
        collectives=tuple(_collective_report(issue) for issue in issues),
    )


def _buffer_report(group: GroupFacts, buffer: BufferFacts) -> BufferReport:
    num_bytes = group.bytes_of(buffer)
    where = _placement_text(group.axes, buffer.placements)
    return BufferReport(buffer.kind, _dtype_name(buffer.dtype), where, num_bytes, buffer.shares)


def _collective_report(issue: Issue) -> CollectiveReport:
    transfer = issue.transfer
    return CollectiveReport(
        issue.phase.value, transfer.kind, transfer.axis, transfer.num_ranks, issue.count, transfer.num_bytes
    )


def _collective_totals(units: Iterable[UnitReport]) -> tuple[CollectiveTotal, ...]:
    counts: Counter[tuple[str, str, str, int]] = Counter()
    sizes: Counter[tuple[str, str, str, int]] = Counter()
    for collective in (each for unit in units for group in unit.groups for each in group.collectives):
        key = (collective.phase, collective.kind, collective.axis, collective.num_ranks)
        counts[key] += collective.count
        sizes[key] += collective.count * collective.bytes_each
    phases = [phase.value for phase in Phase]
    ordered = sorted(counts, key=lambda key: (phases.index(key[0]), key))
    return tuple(CollectiveTotal(*key, counts[key], sizes[key]) for key in ordered)


def adamw_bytes(group: GroupFacts, moments_dtype: torch.dtype | None = None) -> int:
    """Return what two moments and a step count per parameter take on this rank; see ``report_of``."""
    if not group.requires_grad:
        return 0
    if group.dtypes.moments == "int8":
        return _int8_bytes(group)
    itemsize = (moments_dtype or group.dtypes.stepped).itemsize
    return 2 * group.trained_numel() * itemsize + 4 * (len(group.names) - len(group.frozen))


def _int8_bytes(group: GroupFacts) -> int:
    """Return codes and scales of the whole buffer, FP32 moments of small parameters, and a step count for each."""
    local = group.local_numel(group.placements.optimizer)
    small = {index for index, shape in enumerate(group.plan.shapes) if not is_coded(shape)}
    large = set(range(len(group.plan.shapes))) - small
    num_small = group.owned_numel(group.placements.optimizer, large)
    return 2 * (local + 4 * num_blocks(local) + 4 * num_small) + 4 * len(group.names)


def _layout_words(group: GroupFacts) -> str:
    """Return how weights travel in 8 bits, and what blocks that no shard may cut cost in padding; empty for neither."""
    dtypes, plan = group.dtypes, group.plan
    words = [] if dtypes.gather is None else [wire_words(plan, dtypes.gather)]
    if dtypes.block_numel > 1:
        more = plan.numel - _freely_cut(plan.shapes, plan.granularities, plan.num_shards)
        padding = f"{more:,} elements ({more / max(plan.data_numel, 1):.2%}) more padding"
        words.append(f"cut at multiples of {dtypes.block_numel} elements: {padding} than without")
    return "; ".join(words)


@functools.lru_cache(maxsize=256)
def _freely_cut(shapes: tuple[tuple[int, ...], ...], granularities: tuple[Granularity, ...], num_shards: int) -> int:
    return plan_of(shapes, num_shards, granularity=granularities).numel


def _named_binding(group: GroupFacts) -> str:
    """Put a parameter's name to the tensor that the plan's certificate gives by number and shape."""

    def named(found: re.Match[str]) -> str:
        # A unit of several regions numbers its tensors across all of them; the shape is right in any case.
        names = [name for name, shape in zip(group.names, group.plan.shapes, strict=True) if str(shape) == found[1]]
        return f"{names[0]} {found[1]}" if names else found[0]

    return re.sub(r"tensor \d+ of shape (\([^)]*\))", named, group.plan.binding)


def _placement_text(axes: Sequence[AxisFacts], placements: Sequence[BufferPlacement]) -> str:
    return ", ".join(
        f"{axis.name}: {type(placement).__name__.lstrip('_')}" for axis, placement in zip(axes, placements, strict=True)
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
