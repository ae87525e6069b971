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
from megatron_fsdp.optim.adamw import AdamW
from megatron_fsdp.optim.ownership import OwnershipReport
from megatron_fsdp.optim.sharded_optimizer import fully_shard_optimizer
from megatron_fsdp.planning.planned_ownership import muon_bytes, planned_ownership
from megatron_fsdp.planning.stand_in import Hear, Model, StandIn
from megatron_fsdp.planning.step_listener import Forecast, Phase, StepListener
from megatron_fsdp.planning.transformer import UnitWork
from megatron_fsdp.planning.unit_report import UnitReport, adamw_bytes, is_cut, is_trained, unit_report
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.step.unit import Unit
from megatron_fsdp.virtual.recording import Item

__all__ = ["PlayedStep", "StandIns", "play_step"]

StandIns = Callable[[Hear], AbstractContextManager[Model]]
"""Makes stand-ins that tell of each gradient of a weight."""


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """What a model takes, and what the engine did in steps of it.

    Attributes:
        units: in order; nothing is said of their collectives. works: operations of a token in each.
        items: what a step of as many microbatches asked of the device, two and three of them where there are more,
            which do what the one before the last does. forecasts: what a step holds and sends.
        optimizer_bytes: of its state. moved_bytes: what AdamW's step reads and writes.
        compute_itemsize: of the first weights. owners: with Muon, the work of each set of ranks that shares matrices.
        arenas: of slots that have a plan.
    """

    units: tuple[UnitReport, ...]
    works: tuple[UnitWork, ...]
    items: Mapping[int, tuple[Item, ...]] = field(repr=False)
    forecasts: Mapping[int, Forecast] = field(repr=False)
    optimizer_bytes: int
    moved_bytes: int
    compute_itemsize: int
    owners: tuple[OwnershipReport, ...]
    arenas: tuple[ArenaPlan, ...]


def play_step(
    stand_ins: StandIns,
    counts: Sequence[int] = (1,),
    *,
    moments_dtype: torch.dtype | None = None,
    is_muon: bool = False,
) -> PlayedStep:
    """Run the engine on stand-ins, and return what it did in optimizer steps.

    Args:
        counts: of microbatches.
        moments_dtype: of the optimizer's two moments. None: the main weights', as ``torch.optim.AdamW`` has them; FP32
            where these are split.
        is_muon: Muon steps matrices, AdamW the rest.
    """
    meter, heard = memory_meter(), listeners[:]
    peak_bytes, num_allocations = meter.peak_bytes, meter.num_allocations
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(warnings.catch_warnings())
        # Whoever asks for the plan is told of padding by it.
        warnings.simplefilter("ignore", PaddingWarning)
        # A job that asks in the middle of a step goes on as if nothing was: nobody hears of what is no step of its own.
        listeners.clear()
        stack.callback(listeners.extend, heard)
        stack.enter_context(_without_collections())
        found = _played(stand_ins, counts, moments_dtype, is_muon=is_muon)
    gc.collect()
    meter.peak_bytes, meter.num_allocations = peak_bytes, num_allocations
    return found


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Take no time to look for garbage in what lives until the end."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _played(
    stand_ins: StandIns, counts: Sequence[int], moments_dtype: torch.dtype | None, *, is_muon: bool
) -> PlayedStep:
    listener = StepListener()
    items: dict[int, tuple[Item, ...]] = {}
    forecasts: dict[int, Forecast] = {}
    with stand_ins(listener.gradient) as model, listen(listener):
        units = [each.unit for each in model.units]
        groups = [group for unit in units for group in unit.groups]
        listener.follow(model.units)
        model.device.unit_names = {each.unit.name: each.name for each in model.units}
        adds_up = any(unit.policy.reduction for unit in units)
        # Sums of reduction="invariant" hold more the more microbatches there are, so that all of them run.
        chosen = sorted(set(counts) if adds_up else {min(count, 3) for count in counts})
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
            if max(counts) > 3 and count == 3 and not adds_up:
                items.setdefault(2, items[3][: starts[1]] + items[3][starts[2] :])
            for each in {count} if adds_up else {each for each in counts if min(each, 3) == count}:
                forecasts[each] = listener.forecast(each)
        pools = [unit.schedule.pools for unit in units]
        arenas = {id(pool): pool.plan for each in pools for pool in each.planned if pool.plan is not None}
        is_sharded = any(map(is_cut, groups))
        return PlayedStep(
            units=tuple(unit_report(each, is_sharded=is_sharded) for each in model.units),
            works=tuple(_work_of(unit) for unit in units),
            items=items,
            forecasts=forecasts,
            optimizer_bytes=_state_bytes(model, moments_dtype, is_muon=is_muon),
            moved_bytes=sum(map(_moved_bytes, groups)),
            compute_itemsize=groups[0].spec.dtypes.compute.itemsize if groups else 0,
            owners=tuple(map(OwnershipReport, planned_ownership(model.units))) if is_muon else (),
            arenas=tuple(arenas.values()),
        )


def _work_of(unit: Unit) -> UnitWork:
    stand_in = unit.modules[0]()
    assert isinstance(stand_in, StandIn)
    return stand_in.work


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


def _state_bytes(model: Model, moments_dtype: torch.dtype | None, *, is_muon: bool) -> int:
    pairs = [(each, group) for each in model.units for group in each.unit.groups]
    if not is_muon:
        return sum(adamw_bytes(group, moments_dtype) for _, group in pairs)
    return sum(muon_bytes(each, group, (moments_dtype or group.spec.dtypes.stepped).itemsize) for each, group in pairs)


def _moved_bytes(group: ParameterGroup) -> int:
    """Return what AdamW's step reads and writes: gradient, weights and both moments, and the compute weights."""
    if not is_trained(group):
        return 0
    dtypes = group.spec.dtypes
    stepped = dtypes.stepped.itemsize
    # Split weights are read and written in two halves, one of which is the compute weight.
    has_copy = dtypes.gather is None and dtypes.main is not dtypes.compute and not group.spec.gathers_main_weights
    weights = 2 * stepped + (dtypes.compute.itemsize if has_copy else 0)
    # Both moments are read and written; codes are bytes, with a scale for each 256.
    moments = 4 if dtypes.moments == "int8" else 4 * stepped
    return group.main_weight.local_buffer.numel() * (dtypes.main_grad.itemsize + weights + moments)
