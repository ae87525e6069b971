"""The engine's own step on a virtual device, by modules that stand for a model: what it allocates, sends and computes.

Of many layers that are alike a few run. What one more of them adds is known from two runs, and put in as often as
there are more of them.
"""

from __future__ import annotations

import contextlib
import gc
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dbuffer import PaddingWarning
from dbuffer.events import listen, listeners
from dbuffer.memory_meter import memory_meter
from dbuffer.planner.arena import ArenaPlan
from megatron_fsdp.api import microbatch
from megatron_fsdp.optim.adamw import AdamW
from megatron_fsdp.optim.sharded_optimizer import fully_shard_optimizer
from megatron_fsdp.planning.alike_layers import AlikeLayers, NotAlikeError, settings_of, unrolled
from megatron_fsdp.planning.group_report import GroupReport, group_report
from megatron_fsdp.planning.model_spec import Call, ModelFacts, UnitFacts
from megatron_fsdp.planning.stand_in import Model, stand_ins
from megatron_fsdp.planning.step_events import Phase, Segments, StepListener
from megatron_fsdp.planning.transformer import UnitWork
from megatron_fsdp.runtime.step.unit import Unit
from megatron_fsdp.virtual.recording import Item

__all__ = ["PlayedStep", "Run", "play_step", "with_names"]

_LAYERS = 4
"""So many of alike layers run: the first ones and the last have neighbours of other kinds."""

Works = Callable[[UnitFacts], UnitWork]


@dataclass(frozen=True, slots=True)
class Run:
    """What a step of some microbatches asked of the device, by their number; ``times``: it counts so many times."""

    items: Mapping[int, tuple[Item, ...]] = field(repr=False)
    times: int = 1


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """Runs of the engine, which add up to the model's step.

    Attributes:
        runs: the model with few layers of each kind; with one more of a kind, as often as it has more; and the first
            again, taken away as often.
        segments: what the engine did in steps of so many microbatches, of all layers.
        groups: of each unit, in the order of the facts.
        slot_bytes: of all slots. arenas: those among these that have a plan.
    """

    runs: tuple[Run, ...]
    segments: Mapping[int, Segments] = field(repr=False)
    groups: tuple[tuple[GroupReport, ...], ...] = field(repr=False)
    slot_bytes: int
    arenas: tuple[ArenaPlan, ...]


def play_step(facts: ModelFacts, work: Works | None = None, counts: Sequence[int] = (1,)) -> PlayedStep:
    """Run the engine on stand-ins, and return what it did in optimizer steps.

    Args:
        work: operations of a unit's token; None: nothing is said of time.
        counts: of microbatches; above three they repeat what the one between the first and the last does, but for
            sums of ``reduction="invariant"``, which hold more the more there are.
    """
    works = work or _no_work
    if not any(unit.policy.reduction for unit in facts.units):
        counts = sorted({min(count, 3) for count in counts} | ({2} if max(counts) > 3 else set()))
    key = (
        facts.call,
        facts.has_streams,
        tuple((id(each.groups), settings_of(each), works(each)) for each in facts.units),
        tuple(counts),
    )
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST_KNOWN:
            del _KNOWN[next(iter(_KNOWN))]
        # With the facts, so that what is named by identity stays itself.
        _KNOWN[key] = facts, _played(facts, works, counts)
    return _KNOWN[key][1]


_MOST_KNOWN = 64
_KNOWN: dict[object, tuple[ModelFacts, PlayedStep]] = {}


def _no_work(unit: UnitFacts) -> UnitWork:
    return UnitWork(0)


def with_names(words: str, facts: ModelFacts) -> str:
    """Return what is said of a run with the names of units, which it knows by their positions."""
    return re.sub(r"#(\d+)", lambda found: facts.units[int(found[1])].name, words)


def _played(facts: ModelFacts, work: Works, counts: Sequence[int]) -> PlayedStep:
    alike = AlikeLayers(facts)
    # An arena is planned for all that comes.
    most = _LAYERS if all(unit.slots.sizing is None for unit in facts.units) else len(facts.units)
    while True:
        surplus = alike.surplus(most)
        base = _record(facts, alike.trimmed(most), work, counts)
        longer = {kind: _record(facts, alike.trimmed(most, kind), work, counts) for kind in surplus}
        runs = [Run(base.items)]
        for kind, extra in surplus.items():
            runs += [Run(longer[kind].items, extra), Run(base.items, -extra)]
        try:
            segments = {
                count: tuple(
                    unrolled(
                        alike, base.segments[count], {kind: run.segments[count] for kind, run in longer.items()}, most
                    )
                )
                for count in counts
            }
        except NotAlikeError:
            most *= 2
            continue
        found = {position: groups for each in (base, *longer.values()) for position, groups in each.groups.items()}
        groups = tuple(
            found[position if position in found else alike.like(position, found)]
            for position in range(len(facts.units))
        )
        return PlayedStep(tuple(runs), segments, groups, base.slot_bytes, base.arenas)


# ---------------------------------------------------------------------- a run


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What a run of some layers did, in steps of so many microbatches; ``groups`` of each unit that ran."""

    items: Mapping[int, tuple[Item, ...]]
    segments: Mapping[int, Segments]
    groups: Mapping[int, tuple[GroupReport, ...]]
    slot_bytes: int
    arenas: tuple[ArenaPlan, ...]


def _record(facts: ModelFacts, call: Call, work: Works, counts: Sequence[int]) -> _Recorded:
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
        found = _recorded(facts, call, work, counts)
    gc.collect()
    meter.peak_bytes, meter.num_allocations = peak_bytes, num_allocations
    return found


def _recorded(facts: ModelFacts, call: Call, work: Works, counts: Sequence[int]) -> _Recorded:
    listener = StepListener()
    items: dict[int, tuple[Item, ...]] = {}
    segments: dict[int, Segments] = {}

    def work_of(unit: int) -> UnitWork:
        return work(facts.units[unit]) if unit >= 0 else UnitWork(0)

    with stand_ins(facts, call, work_of, listener.gradient) as model, listen(listener):
        listener.follow(model.units)
        model.device.unit_names = {unit.name: f"#{position}" for position, unit in model.units.items()}
        optimizer = _optimizer(facts, model)
        # The first step finds the order of units; arenas are planned for what comes in a second one.
        for _ in range(2 if any(unit.slots.sizing for unit in facts.units) else 1):
            _step(model, optimizer, listener, counts[0])
        for count in counts:
            # A step leaves what the next one finds, but for sums, of which there are more or fewer.
            if items and any(unit.policy.reduction for unit in facts.units):
                _step(model, optimizer, listener, count)
            listener.segments.clear()
            listener.enter(None)
            listener.held()
            model.device.recording.items.clear()
            _step(model, optimizer, listener, count, is_recorded=True)
            items[count], segments[count] = tuple(model.device.recording.items), listener.taken()
        groups = {position: _group_reports(facts.units[position], unit) for position, unit in model.units.items()}
        pools = [unit.schedule.pools for unit in model.units.values()]
        arenas = {id(pool): pool.plan for each in pools for pool in each.planned if pool.plan is not None}
        return _Recorded(items, segments, groups, listener.slot_bytes, tuple(arenas.values()))


def _group_reports(facts: UnitFacts, unit: Unit) -> tuple[GroupReport, ...]:
    pairs = zip(unit.groups, facts.groups, strict=True)
    return tuple(group_report(group, each.names) for group, each in pairs)


def _optimizer(facts: ModelFacts, model: Model) -> torch.optim.Optimizer | None:
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    if not trained:
        return None
    is_split = any(group.dtypes.is_split for unit in facts.units for group in unit.groups)
    return AdamW(trained) if is_split else fully_shard_optimizer(torch.optim.AdamW(trained))


def _step(
    model: Model,
    optimizer: torch.optim.Optimizer | None,
    listener: StepListener,
    count: int,
    *,
    is_recorded: bool = False,
) -> None:
    recording = model.device.recording
    recording.is_on = is_recorded
    for number in range(count):
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
