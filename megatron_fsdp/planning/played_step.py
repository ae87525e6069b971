"""The engine's own step on a virtual device, by stand-ins for a model: what it allocates, sends and computes."""

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
from dbuffer.planner.arena import ArenaPlan
from megatron_fsdp.api import microbatch
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.optim.adamw import AdamW
from megatron_fsdp.optim.sharded_optimizer import fully_shard_optimizer
from megatron_fsdp.planning.stand_in import Model
from megatron_fsdp.planning.step_listener import Forecast, Phase, StepListener
from megatron_fsdp.planning.transformer import UnitWork
from megatron_fsdp.planning.unit_report import UnitReport, adamw_bytes, unit_report
from megatron_fsdp.variants.memory_slots import pools_of
from megatron_fsdp.virtual.recording import Item

__all__ = ["PlayedStep", "StandIns", "play_step"]

StandIns = Callable[[], AbstractContextManager[Model]]
"""Makes stand-ins for a model, which are there while the context is."""


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """What a model takes, and what the engine did in steps of it.

    Attributes:
        units: in order; nothing is said of their collectives. works: operations of a token in each.
        items: what a step of as many microbatches asked of the device, two and three of them where there are more,
            which do what the one before the last does. forecasts: what a step holds and sends.
        optimizer_bytes: of its state. moved_bytes: what its step reads and writes.
        compute_itemsize: of the first weights. arenas: of slots that have a plan.
    """

    units: tuple[UnitReport, ...]
    works: tuple[UnitWork, ...]
    items: Mapping[int, tuple[Item, ...]] = field(repr=False)
    forecasts: Mapping[int, Forecast] = field(repr=False)
    optimizer_bytes: int
    moved_bytes: int
    compute_itemsize: int
    arenas: tuple[ArenaPlan, ...]


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Let a job that asks in the middle of a step go on as if nothing was, and take no time to look for garbage."""
    meter, heard, was_on, knows_frozen = memory_meter(), listeners[:], gc.isenabled(), gc.get_freeze_count() > 0
    peak_bytes, num_allocations = meter.peak_bytes, meter.num_allocations
    with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        # Whoever asks for the plan is told of padding by it.
        warnings.simplefilter("ignore", PaddingWarning)
        listeners.clear()
        gc.disable()
        # What was there before need not be looked through. Where some of it is frozen already, as Python 3.12 does
        # itself at its start, the rest could not be told from it afterwards, and would never be collected again.
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
    """Run the engine on stand-ins, and return what it did in optimizer steps.

    Args:
        counts: of microbatches.
        moments_dtype: of the optimizer's two moments. None: the main weights', as ``torch.optim.AdamW`` has them; FP32
            where these are split.
    """
    items: dict[int, tuple[Item, ...]] = {}
    forecasts: dict[int, Forecast] = {}
    with stand_ins() as model, listen(listener := StepListener(model.units)):
        units = [each.unit for each in model.units]
        groups = [group for unit in units for group in unit.groups]
        adds_up = any(unit.policy.reduction == "invariant" for unit in units)
        # Sums of reduction="invariant" hold more the more microbatches there are, so that all of them run.
        chosen = sorted(set(counts) if adds_up else {min(count, 3) for count in counts})
        if not adds_up and 3 in chosen:
            # Two are three without the one in the middle.
            chosen = [count for count in chosen if count != 2]
        optimizer = _optimizer(model, groups)
        # The first step finds the order of units; arenas are planned for what comes in a second one.
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
        pools = [pools_of(unit) for unit in units]
        arenas = {id(pool): pool.plan for each in pools for pool in each.planned if pool.plan is not None}
        optimizer_bytes = sum(adamw_bytes(group, moments_dtype) for group in groups)
        return PlayedStep(
            units=tuple(unit_report(each) for each in model.units),
            works=tuple(each.work for each in model.units),
            items=items,
            forecasts=forecasts,
            optimizer_bytes=optimizer_bytes,
            moved_bytes=_moved_bytes(groups, optimizer_bytes),
            compute_itemsize=groups[0].spec.dtypes.compute.itemsize if groups else 0,
            arenas=tuple(arenas.values()),
        )


def _optimizer(model: Model, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer | None:
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    if not trained:
        return None
    is_split = any(group.spec.dtypes.is_split for group in groups)
    # What its own arithmetic is does not matter here; SGD's is the least.
    return AdamW(trained) if is_split else fully_shard_optimizer(torch.optim.SGD(trained))


def _step(
    model: Model,
    optimizer: torch.optim.Optimizer | None,
    listener: StepListener,
    count: int,
    *,
    is_recorded: bool = False,
) -> list[int]:
    """Run a step, and return how many items were noted when each microbatch began."""
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
    """Return what the optimizer's step reads and writes: gradients once, weights and its state twice."""
    trained = [group for group in groups if group.requires_grad]
    dtypes = ((group.main_weight.local_buffer.numel(), group.spec.dtypes) for group in trained)
    moved = sum(numel * (each.main_grad.itemsize + 2 * each.stepped.itemsize) for numel, each in dtypes)
    return 2 * optimizer_bytes + moved
