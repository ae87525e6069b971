"""Projection: predicted memory and time of training a model with a given setup, from shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.planning.catalog import Architecture
from megatron_fsdp.planning.cost_model import Hardware, StepTime, predict_step, transfer_seconds
from megatron_fsdp.planning.model_source import Subject, stage_subject
from megatron_fsdp.planning.parallelism import (
    ModelTransfer,
    Parallelism,
    Stage,
    bubble_share,
    model_transfers,
    stages_of,
)
from megatron_fsdp.planning.played_step import PlayedStep, play_step
from megatron_fsdp.planning.report import Report, report_of
from megatron_fsdp.planning.stand_in import Sharding
from megatron_fsdp.planning.transformer import Workload

__all__ = ["Projection", "Setup", "memory_of", "play_setup", "project", "project_stages"]


@dataclass(frozen=True, slots=True)
class Setup:
    """A way to train a model.

    Attributes:
        strategy: its name, for tables. moments_dtype: dtype of AdamW's moments; None: the main weights' dtype.
        activation_bytes: activations of one microbatch, if the caller knows them; None: derived from the architecture,
            or omitted if that is unknown.
        reserve_bytes: memory that a plan does not count: the CUDA context, communication buffers, fragmentation.
        parallelism: how the model is divided beyond data parallelism.
    """

    strategy: str
    sharding: Sharding
    workload: Workload
    hardware: Hardware
    moments_dtype: torch.dtype | None = None
    activation_bytes: int | None = None
    reserve_bytes: int = 0
    parallelism: Parallelism = field(default_factory=Parallelism)


@dataclass(frozen=True, slots=True)
class Projection:
    """The memory and time of one setup on one rank.

    Attributes:
        memory: bytes of one rank by category. played: the engine's own step, from which the time is predicted.
        stage: this rank's part of the model; None: the whole model. transfers: collectives of model parallelism.
    """

    subject: Subject
    setup: Setup
    played: PlayedStep
    memory: Mapping[str, int]
    time: StepTime
    stage: Stage | None = None
    transfers: tuple[ModelTransfer, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """The most bytes held at once, assuming that the peaks of transient buffers and activations coincide."""
        return sum(self.memory.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one rank."""
        workload = self.setup.workload
        return workload.num_microbatches * workload.tokens / self.time.total

    def report(self) -> Report:
        """Return the report on units, buffers, padding and collectives."""
        return report_of(self.played, self.setup.workload.num_microbatches)


def play_setup(subject: Subject, setup: Setup, counts: Sequence[int]) -> PlayedStep:
    """Run the engine's steps for a setup's sharding, with the given counts of microbatches, on a virtual device.

    The result does not depend on the micro-batch size or on recomputation.

    Raises:
        LayoutError: the planner refuses the padding.
    """
    stand_ins = subject.stand_ins(setup.sharding, setup.workload.sequence_length)
    return play_step(stand_ins, counts, moments_dtype=setup.moments_dtype)


def project(subject: Subject, setup: Setup, played: PlayedStep | None = None) -> Projection:
    """Return the memory and time of training a model with a setup; ``played``: its step, if already known.

    Raises:
        LayoutError: the planner refuses the padding.
    """
    played = played or play_setup(subject, setup, [setup.workload.num_microbatches])
    time = predict_step(played, setup.workload, setup.hardware)
    return Projection(subject, setup, played, memory_of(subject, setup, [played]), time)


def project_stages(subject: Subject, setup: Setup, number: int | None = None) -> tuple[Projection, ...]:
    """Return the projection of a rank of each pipeline stage, including the time that stages wait for each other.

    Equal stages are run once and have the unit names of the first of them, except stage ``number``.

    Raises:
        ConfigError: the model is not from the catalog, or the parallel sizes do not divide it.
        LayoutError: the planner refuses the padding.
    """
    parallelism, workload = setup.parallelism, setup.workload
    if subject.transformer is None:
        raise ConfigError(
            "--tp, --ep, --pp and --cp divide models of the catalog and of --hf-config, whose layers are known. fix: "
            "with --factory, build the part of the model that one rank of a stage has"
        )
    played: dict[Architecture | int, PlayedStep] = {}
    stages = []
    for stage in stages_of(subject.transformer.architecture, parallelism):
        key = stage.number if stage.number == number else stage.architecture
        stages.append(_project_stage(subject, setup, stage, played.get(key)))
        played[key] = stages[-1].played
    # Each stage waits for the slowest one.
    slowest = max(each.time.busy for each in stages)
    bubble = (1 + bubble_share(parallelism, workload.num_microbatches)) * slowest
    return tuple(replace(each, time=replace(each.time, bubble=bubble - each.time.busy)) for each in stages)


def _project_stage(subject: Subject, setup: Setup, stage: Stage, played: PlayedStep | None) -> Projection:
    parallelism, workload = setup.parallelism, setup.workload
    projection = project(stage_subject(subject, stage, parallelism, workload.num_microbatches), setup, played)
    transfers = model_transfers(stage, parallelism, workload, projection.played.compute_itemsize)
    links = setup.hardware.links
    seconds = sum(each.count * transfer_seconds(each.transfer, links[each.transfer.axis]) for each in transfers)
    return replace(projection, transfers=transfers, time=replace(projection.time, model_parallel=seconds), stage=stage)


def memory_of(subject: Subject, setup: Setup, steps: Sequence[PlayedStep], times: int = 0) -> dict[str, int]:
    """Return a rank's peak memory in bytes by category; unknown activations are omitted.

    Args:
        steps: the results of ``play_setup`` for the model; or for the model with a few layers and with one layer more.
        times: in the second case, how many layers the model has beyond the few.
    """
    count = setup.workload.num_microbatches
    few, more = (_memory(subject, setup, each) for each in (steps[0], steps[-1]))
    found = {name: size + times * (more[name] - size) for name, size in few.items()}
    found["gathered and packed"] += steps[0].forecasts[count].highest(steps[-1].forecasts[count], times)
    return {name: size for name, size in found.items() if size}


def _memory(subject: Subject, setup: Setup, played: PlayedStep) -> dict[str, int]:
    """Return the bytes by category; "gathered and packed" is a correction to be added to the transient peak."""
    groups = [group for unit in played.units for group in unit.groups]
    sums = played.forecasts[setup.workload.num_microbatches].counter_bytes
    activations = setup.activation_bytes or 0
    if setup.activation_bytes is None and subject.transformer is not None:
        activations = subject.transformer.activation_bytes(setup.workload, played.compute_itemsize)
    return {
        "compute weights": sum(group.num_bytes("model_weight", "packed weights") for group in groups),
        "main weights": sum(group.num_bytes("main_weight", "remainder") for group in groups),
        "gradients": sum(group.num_bytes("main_grad") for group in groups),
        "AdamW moments": played.optimizer_bytes,
        # Subtracted from the peak, because "gradients" counts them. Every peak includes them, as all exist in the
        # optimizer step.
        "gathered and packed": -sum(unit.transient_bytes("main_grad") for unit in played.units) - sums,
        "sums": sums,
        "activations": activations,
        "reserve": setup.reserve_bytes,
    }
