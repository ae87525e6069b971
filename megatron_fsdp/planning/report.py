"""Report: what a sharded model takes, known before it is trained: buffers, padding, transient memory and traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import overload

import torch
from torch import nn
from torch.optim import Optimizer

from dbuffer_kernels import num_blocks
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.int8_moments import is_coded
from megatron_fsdp.optim.muon import explain_ownership
from megatron_fsdp.optim.ownership import OwnershipReport
from megatron_fsdp.planning.forecast import Forecast, forecast_of
from megatron_fsdp.planning.group_report import CollectiveReport, GroupReport
from megatron_fsdp.planning.live_model import read_facts
from megatron_fsdp.planning.model_spec import GroupFacts, ModelFacts, Transfer, UnitFacts
from megatron_fsdp.planning.played_step import PlayedStep, play_step
from megatron_fsdp.planning.report_text import ASSUMPTIONS, ArenaReport, CollectiveTotal, PeakReport, Report, UnitReport
from megatron_fsdp.planning.step_events import Phase

__all__ = ["adamw_bytes", "explain", "gradient_bytes", "report_of"]


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
    played: PlayedStep | None = None,
    moments_dtype: torch.dtype | None = None,
) -> Report:
    """Return the report for facts that may come from a live model or from shapes alone; see ``explain``.

    Args:
        played: the engine's step of the same facts and microbatches, where it is known already.
        moments_dtype: of the optimizer's two moments. None: the main weights', as ``torch.optim.AdamW`` has them; FP32
            where these are split.
    """
    if num_microbatches < 1:
        raise ConfigError(f"explain: num_microbatches={num_microbatches}; an optimizer step has at least one")
    played = played or play_step(facts, None, [num_microbatches])
    forecast = forecast_of(facts, played, num_microbatches)
    is_sharded = any(_is_cut(group) for unit in facts.units for group in unit.groups)
    collectives = _collectives(forecast)
    groups = [
        tuple(replace(group, collectives=collectives.get((position, number), ())) for number, group in enumerate(each))
        for position, each in enumerate(played.groups)
    ]
    units = tuple(
        _unit_report(unit, groups[position], is_kept=position in forecast.kept, is_sharded=is_sharded)
        for position, unit in enumerate(facts.units)
    )
    every = [group for each in groups for group in each]
    largest = max(facts.units, key=lambda unit: unit.whole_bytes)
    return Report(
        num_microbatches=num_microbatches,
        num_roots=sum(unit.is_root for unit in facts.units),
        units=units,
        persistent_bytes=sum(unit.persistent_bytes for unit in units),
        padding_bytes=sum(group.padding_bytes for group in every),
        gradient_bytes=gradient_bytes(every),
        optimizer_bytes=sum(adamw_bytes(group, moments_dtype) for unit in facts.units for group in unit.groups),
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
        assumptions=(*ASSUMPTIONS, *(_HOOKS,) * any(group.has_hooks for unit in facts.units for group in unit.groups)),
        arenas=tuple(ArenaReport(arena.num_bytes, arena.lower_bound, arena.gap) for arena in forecast.arenas),
    )


def gradient_bytes(groups: Iterable[GroupReport]) -> int:
    """Return what gradients take from backward to ``zero_grad``, where their memory does not stay."""
    return sum(each.num_bytes for group in groups for each in group.transient if each.kind == "main_grad")


def _peak_report(forecast: Forecast, phase: Phase) -> PeakReport:
    peak = forecast.peaks[phase]
    return PeakReport(peak.num_bytes, peak.unit, peak.gradient_bytes)


_HOOKS = "parameters with all-gather hooks of their own are counted as plain ones, which travel in their compute dtype"
_KEPT = "kept after forward: the last that forward uses, its backward is next"


def _is_cut(group: GroupFacts) -> bool:
    return group.placements.is_sharded(group.placements.optimizer)


def _unit_report(unit: UnitFacts, groups: tuple[GroupReport, ...], *, is_kept: bool, is_sharded: bool) -> UnitReport:
    return UnitReport(
        name=unit.name,
        modules=unit.modules,
        is_root=unit.is_root,
        note="" if unit.groups else "no parameters of its own: it only orders the units below it",
        reshards_after_forward=unit.reshards_after_forward,
        reason=_KEPT if is_kept else unit.reason,
        ties=unit.ties,
        num_frozen_groups=sum(not group.is_trained for group in unit.groups),
        replicated=tuple(name for group in unit.groups if is_sharded and not _is_cut(group) for name in group.names),
        groups=groups,
    )


def _collectives(forecast: Forecast) -> dict[tuple[int, int], tuple[CollectiveReport, ...]]:
    """Return what each group issues, by the positions of unit and group."""
    counts: dict[tuple[int, int], Counter[tuple[Phase, Transfer]]] = {}
    for issue in forecast.issues:
        counts.setdefault((issue.unit, issue.group), Counter())[issue.phase, issue.transfer] += issue.count
    return {
        key: tuple(
            CollectiveReport(phase.value, kind, axis, num_ranks, count, num_bytes)
            for (phase, (kind, axis, num_ranks, num_bytes)), count in found.items()
        )
        for key, found in counts.items()
    }


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
    if not group.is_trained:
        return 0
    if group.dtypes.moments == "int8":
        return _int8_bytes(group)
    itemsize = (moments_dtype or group.dtypes.stepped).itemsize
    trained = group.owned_numel(group.placements.optimizer, group.frozen)
    return 2 * trained * itemsize + 4 * (len(group.names) - len(group.frozen))


def _int8_bytes(group: GroupFacts) -> int:
    """Return codes and scales of the whole buffer, FP32 moments of small parameters, and a step count for each."""
    local = group.local_numel(group.placements.optimizer)
    small = {index for index, shape in enumerate(group.plan.shapes) if not is_coded(shape)}
    large = set(range(len(group.plan.shapes))) - small
    num_small = group.owned_numel(group.placements.optimizer, large)
    return 2 * (local + 4 * num_blocks(local) + 4 * num_small) + 4 * len(group.names)
