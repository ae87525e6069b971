"""PlayedStep: the engine's own step on a virtual device: its allocations, collectives and computations."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from dbuffer import PaddingWarning
from dbuffer.events import listen, listeners
from dbuffer.memory_meter import memory_meter
from megatron_fsdp.api import microbatch
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.optim.adamw.adamw import AdamW
from megatron_fsdp.optim.stock.sharded_optimizer import fully_shard_optimizer
from megatron_fsdp.planning.stand_in import Model
from megatron_fsdp.planning.step_listener import Forecast, Phase, StepListener
from megatron_fsdp.planning.transformer import UnitWork
from megatron_fsdp.planning.unit_report import UnitReport, adamw_bytes, unit_report
from megatron_fsdp.virtual.recording import Item

__all__ = ["PlayedStep", "StandIns", "play_step"]

StandIns = Callable[[], AbstractContextManager[Model]]
"""A function that makes stand-ins for a model; they exist while its context is open."""


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """The result of running the engine's steps on stand-ins for a model.

    Attributes:
        units: reports on the units, in order, without collectives. works: operations per token in each unit.
        items: by number of microbatches, what the step asked of the device. For more than three microbatches only the
            steps of two and three are kept, because each further one repeats the one before the last.
        forecasts: by number of microbatches, the memory and collectives of a step.
        optimizer_bytes: bytes of the optimizer's state. moved_bytes: bytes that its step reads and writes.
        compute_itemsize: itemsize of the first unit's compute dtype.
    """

    units: tuple[UnitReport, ...]
    works: tuple[UnitWork, ...]
    items: Mapping[int, tuple[Item, ...]] = field(repr=False)
    forecasts: Mapping[int, Forecast] = field(repr=False)
    optimizer_bytes: int
    moved_bytes: int
    compute_itemsize: int


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Keep the simulation from disturbing the caller's job, which may be within a step; pause garbage collection."""
    meter, heard, was_on, knows_frozen = memory_meter(), listeners[:], gc.isenabled(), gc.get_freeze_count() > 0
    peak_bytes, num_allocations = meter.peak_bytes, meter.num_allocations
    with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        # The caller's report mentions padding itself.
        warnings.simplefilter("ignore", PaddingWarning)
        listeners.clear()
        gc.disable()
        # Freezing exempts existing objects from collection. Not done if some are frozen already, as Python 3.12 does at
        # startup: unfreezing would then unfreeze those too, or the new ones would never be collected.
        if not knows_frozen:
            gc.freeze()
        try:
            yield
        finally:
            listeners.extend(heard)
            gc.collect()
            if not knows_frozen:
                gc.unfreeze()
            if was_on:
                gc.enable()
            meter.peak_bytes, meter.num_allocations = peak_bytes, num_allocations


@_aside()
def play_step(
    stand_ins: StandIns, counts: Sequence[int] = (1,), moments_dtype: torch.dtype | None = None
) -> PlayedStep:
    """Run the engine's optimizer steps on stand-ins, and return their allocations, collectives and computations.

    Args:
        counts: numbers of microbatches, one step for each.
        moments_dtype: dtype of the optimizer's two moments. None: the main weights' dtype, as in ``torch.optim.AdamW``;
            FP32 if the main weights are split.
    """
    items: dict[int, tuple[Item, ...]] = {}
    forecasts: dict[int, Forecast] = {}
    with stand_ins() as model, listen(listener := StepListener(model.units)):
        units = [each.unit for each in model.units]
        groups = [group for unit in units for group in unit.groups]
        adds_up = any(unit.policy.reduction == "invariant" for unit in units)
        # With reduction="invariant", memory grows with the number of microbatches, so every microbatch runs.
        chosen = sorted(set(counts) if adds_up else {min(count, 3) for count in counts})
        if not adds_up and 3 in chosen:
            # The step of two microbatches is the step of three without the middle one.
            chosen = [count for count in chosen if count != 2]
        optimizer = _optimizer(model, groups)
        # The first step records the order of units.
        has_slots = any(unit.slots.sizing for unit in units)
        for _ in range(1 + has_slots):
            _step(model, optimizer, listener, chosen[0] if has_slots or adds_up else 1)
        for count in chosen:
            if items and adds_up:
                _step(model, optimizer, listener, count)
            listener.begin()
            model.device.recording.items.clear()
            starts = _step(model, optimizer, listener, count, is_recorded=True)
            items[count] = tuple(model.device.recording.items)
            forecasts[count] = listener.forecast(count)
            if count == 3 and not adds_up:
                items[2] = items[3][: starts[1]] + items[3][starts[2] :]
                forecasts |= {each: listener.forecast(each) for each in counts if each > 1}
        optimizer_bytes = sum(adamw_bytes(group, moments_dtype) for group in groups)
        return PlayedStep(
            units=tuple(unit_report(each) for each in model.units),
            works=tuple(each.work for each in model.units),
            items=items,
            forecasts=forecasts,
            optimizer_bytes=optimizer_bytes,
            moved_bytes=_moved_bytes(groups, optimizer_bytes),
            compute_itemsize=groups[0].spec.dtypes.compute.itemsize if groups else 0,
        )


def _optimizer(model: Model, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer | None:
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    if not trained:
        return None
    is_split = any(group.spec.dtypes.is_split for group in groups)
    # The optimizer's own arithmetic does not matter here; SGD's is the smallest.
    return AdamW(trained) if is_split else fully_shard_optimizer(torch.optim.SGD(trained))


def _step(
    model: Model,
    optimizer: torch.optim.Optimizer | None,
    listener: StepListener,
    count: int,
    *,
    is_recorded: bool = False,
) -> list[int]:
    """Run a step, and return the number of recorded items at the start of each microbatch."""
    recording = model.device.recording
    recording.is_on = is_recorded
    starts = []
    for number in range(count):
        starts.append(len(recording.items))
        with microbatch(model.module, is_last=number == count - 1):
            listener.enter(Phase.FORWARD)
            loss = model.module(torch.empty(1)).sum()
            listener.enter(Phase.BACKWARD)
            if loss.requires_grad:
                loss.backward()
    listener.enter(Phase.STEP)
    recording.is_on = False
    if optimizer is not None:
        optimizer.step()
        listener.enter(None)
        optimizer.zero_grad()
    return starts


def _moved_bytes(groups: Sequence[ParameterGroup], optimizer_bytes: int) -> int:
    """Return the bytes that the optimizer step moves: gradients once, weights and optimizer state twice."""
    trained = [group for group in groups if group.requires_grad]
    dtypes = ((group.main_weight.local_buffer.numel(), group.spec.dtypes) for group in trained)
    moved = sum(numel * (each.main_grad.itemsize + 2 * each.stepped.itemsize) for numel, each in dtypes)
    return 2 * optimizer_bytes + moved
