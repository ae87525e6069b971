"""Projection: memory and time of one way to train a model, from shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.ownership import OwnershipReport, ownership_report
from megatron_fsdp.planning.cost_model import Hardware, StepTime, predict_step, transfer_seconds
from megatron_fsdp.planning.forecast import Forecast, forecast_of
from megatron_fsdp.planning.from_shapes import Sharding
from megatron_fsdp.planning.model_source import Subject, stage_subject
from megatron_fsdp.planning.model_spec import ModelFacts, UnitFacts
from megatron_fsdp.planning.parallelism import (
    ModelTransfer,
    Parallelism,
    Stage,
    bubble_share,
    model_transfers,
    stages_of,
)
from megatron_fsdp.planning.planned_ownership import muon_bytes, planned_ownership
from megatron_fsdp.planning.played_step import PlayedStep, play_step
from megatron_fsdp.planning.report import adamw_bytes, gradient_bytes, report_of
from megatron_fsdp.planning.report_text import Report
from megatron_fsdp.planning.transformer import Transformer, UnitWork, Workload

# In place of the report's last assumption, that activations are not counted.
_ASSUMED = (
    "the highest transient memory and all activations are taken to coincide",
    "collectives run on rings; what compute waits for is what the engine's own step waits for on such hardware",
    "every rank has the same work and the links that were given; stragglers are not counted",
)

__all__ = ["MemoryPart", "Projection", "Setup", "play_all", "project", "project_stages"]


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Bytes of one purpose on the rank that is reported on; ``is_known`` is False where only a run would tell."""

    name: str
    num_bytes: int
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is trained.

    Attributes:
        strategy: name of it, for tables. moments_dtype: of AdamW's two, or Muon's momentum; None: the main weights'.
        optimizer: "adamw", or "muon" for matrices and AdamW for the rest.
        activation_bytes: of one microbatch, where the caller knows them; else they are derived or left out.
        reserve_bytes: for what no plan sees: the CUDA context, communication buffers, the allocator's rounding.
        parallelism: how the model is divided besides.
    """

    strategy: str
    sharding: Sharding
    workload: Workload
    hardware: Hardware
    moments_dtype: torch.dtype | None = None
    activation_bytes: int | None = None
    reserve_bytes: int = 0
    optimizer: str = "adamw"
    parallelism: Parallelism = field(default_factory=Parallelism)


@dataclass(frozen=True, slots=True)
class Projection:
    """What one setup takes on one rank.

    Attributes:
        step: the engine's own, which the time is that of.
        owners: with Muon, the work of each set of ranks that shares matrices.
        stage: which part of the model the rank has; None: all of it. transfers: what it sends inside of the model.
    """

    subject: Subject
    setup: Setup
    facts: ModelFacts
    forecast: Forecast
    memory: tuple[MemoryPart, ...]
    time: StepTime
    step: PlayedStep
    owners: tuple[OwnershipReport, ...] = ()
    stage: Stage | None = None
    transfers: tuple[ModelTransfer, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """The most bytes held at once: the highest transient buffers and all activations are taken to coincide."""
        return sum(part.num_bytes for part in self.memory)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one rank."""
        workload = self.setup.workload
        return workload.num_microbatches * workload.tokens / self.time.total

    def report(self) -> Report:
        """Return the report of units, buffers, padding and collectives."""
        setup = self.setup
        report = report_of(
            self.facts,
            setup.workload.num_microbatches,
            played=self.step,
            moments_dtype=setup.moments_dtype,
        )
        return replace(report, assumptions=(*report.assumptions[:-1], *_ASSUMED, *self.subject.notes))


def project(subject: Subject, setup: Setup, played: Played | None = None) -> Projection:
    """Return what training a model in one way takes.

    Args:
        played: what ``play_all`` returns for the same sharding and number of microbatches, where that is known.
    Raises:
        LayoutError: the planner refuses the padding.
    """
    workload = setup.workload
    played = played or play_all(subject, setup, [workload.num_microbatches])[workload.num_microbatches]
    facts, forecast = played.facts, played.forecast
    work = _work_of(subject, setup)
    time = predict_step(facts, work, played.step, forecast, workload, setup.hardware)
    owners: tuple[OwnershipReport, ...] = ()
    if setup.optimizer == "muon":
        owners = tuple(ownership_report(found) for found in planned_ownership(facts))
        time = replace(time, optimizer=time.optimizer + sum(each.max_flops for each in owners) / setup.hardware.flops)
    memory = tuple(_memory(subject, setup, played))
    return Projection(subject, setup, facts, forecast, memory, time, played.step, owners)


def project_stages(subject: Subject, setup: Setup) -> tuple[Projection, ...]:
    """Return what training takes on a rank of each pipeline stage, with the time that stages wait for each other.

    Raises:
        ConfigError: a model that is not of the catalog, or sizes that do not divide it.
        LayoutError: the planner refuses the padding.
    """
    parallelism, workload = setup.parallelism, setup.workload
    if subject.architecture is None:
        raise ConfigError(
            "--tp, --ep, --pp and --cp divide models of the catalog and of --hf-config, whose layers are known; with "
            "--factory build what one rank of a stage has"
        )
    projections = [_project_stage(subject, setup, stage) for stage in stages_of(subject.architecture, parallelism)]
    # All stages wait for the slowest.
    slowest = max(map(_busy, projections))
    bubble = bubble_share(parallelism, workload.num_microbatches) * slowest
    return tuple(replace(each, time=replace(each.time, bubble=bubble + slowest - _busy(each))) for each in projections)


def _busy(projection: Projection) -> float:
    time = projection.time
    return time.compute + time.exposed + time.copying + time.model_parallel


def _project_stage(subject: Subject, setup: Setup, stage: Stage) -> Projection:
    parallelism, workload = setup.parallelism, setup.workload
    projection = project(stage_subject(subject, stage, parallelism, workload.num_microbatches), setup)
    itemsize = _compute_itemsize(projection.facts)
    layers = Transformer.of(stage.architecture, stream_ranks=parallelism.stream_ranks).layers
    transfers = tuple(model_transfers(stage, parallelism, workload, layers, itemsize))
    links = setup.hardware.links
    seconds = sum(each.count * transfer_seconds(each.transfer, links[each.transfer.axis]) for each in transfers)
    return replace(projection, transfers=transfers, time=replace(projection.time, model_parallel=seconds), stage=stage)


@dataclass(frozen=True, slots=True)
class Played:
    """A step of some microbatches with one way of sharding: neither their size nor recomputation changes it."""

    facts: ModelFacts
    forecast: Forecast
    step: PlayedStep


def play_all(subject: Subject, setup: Setup, counts: Sequence[int]) -> dict[int, Played]:
    """Return a step of a sharding for each number of microbatches.

    Raises:
        LayoutError: the planner refuses the padding.
    """
    facts = subject.facts(setup.sharding)
    step = play_step(facts, _work_of(subject, setup), counts)
    return {count: Played(facts, forecast_of(facts, step, count), step) for count in counts}


def _work_of(subject: Subject, setup: Setup) -> Callable[[UnitFacts], UnitWork]:
    return lambda unit: subject.work(unit, setup.workload.sequence_length)


def _memory(subject: Subject, setup: Setup, played: Played) -> Iterator[MemoryPart]:
    facts, forecast = played.facts, played.forecast
    groups = [group for each in played.step.groups for group in each]

    def at_rest(*kinds: str) -> int:
        return sum(each.num_bytes(*kinds) for each in groups)

    compute_weights = MemoryPart("compute weights", at_rest("model_weight", "packed weights"))
    yield from (compute_weights,) * bool(compute_weights.num_bytes)
    yield MemoryPart("main weights", at_rest("main_weight", "remainder"))
    gradients = gradient_bytes(groups)
    yield MemoryPart("gradients", at_rest("main_grad"))
    pairs = [(unit, group) for unit in facts.units for group in unit.groups]
    if setup.optimizer == "muon":
        moments = sum(
            muon_bytes(unit, group, (setup.moments_dtype or group.dtypes.stepped).itemsize) for unit, group in pairs
        )
    else:
        moments = sum(adamw_bytes(group, setup.moments_dtype) for _, group in pairs)
    yield MemoryPart("Muon and AdamW state" if setup.optimizer == "muon" else "AdamW moments", moments)
    # The optimizer's step has all gradients, so no peak is smaller.
    sums = forecast.counter_bytes + forecast.scratch_bytes
    highest = max(peak.num_bytes for peak in forecast.peaks.values())
    yield MemoryPart("gathered and packed", highest - gradients - sums)
    yield from (MemoryPart("sums and scratch", sums),) * bool(sums)
    yield _activations(subject, setup, facts)
    if setup.reserve_bytes:
        yield MemoryPart("reserve", setup.reserve_bytes)


def _activations(subject: Subject, setup: Setup, facts: ModelFacts) -> MemoryPart:
    if setup.activation_bytes is not None:
        return MemoryPart("activations", setup.activation_bytes)
    if subject.activations is None:
        return MemoryPart("activations", 0, is_known=False)
    return MemoryPart("activations", subject.activations(setup.workload, _compute_itemsize(facts)))


def _compute_itemsize(facts: ModelFacts) -> int:
    return next(group.dtypes.compute.itemsize for unit in facts.units for group in unit.groups)
