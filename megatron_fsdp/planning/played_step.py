"""The engine's own step of a model of which shapes alone are known: on a virtual device, by modules that stand for it.

A stand-in has the units, parameters and order of ``ModelFacts``, and notes operations where the model would compute
them. Everything else, every gather, wait and reduction, is what the engine does with it. Of many layers that are alike
a few run: what one more of them adds is known from two runs.
"""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import PaddingWarning
from megatron_fsdp.api import fully_shard, microbatch
from megatron_fsdp.build.no_shard import fsdp_no_shard
from megatron_fsdp.planning.model_spec import AxisFacts, GroupFacts, ModelFacts, UnitFacts, VisitKind
from megatron_fsdp.planning.stand_in import StandIn
from megatron_fsdp.planning.transformer import UnitWork
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.virtual.device import virtual_device
from megatron_fsdp.virtual.recording import Item

__all__ = ["PlayedStep", "Run", "record_step", "with_names"]

_LAYERS = 4
"""So many of alike layers run: the first ones and the last have neighbours of other kinds."""
_MOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4
"""Of a unit in FP32; of larger ones a share is laid out: systems refuse to promise more memory than they have."""

Works = Callable[[UnitFacts], UnitWork]


@dataclass(frozen=True, slots=True)
class Run:
    """What a step of some microbatches asked of the device, by their number; ``times``: it counts so many times."""

    items: Mapping[int, tuple[Item, ...]] = field(repr=False)
    times: int = 1


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """Runs of the engine, whose quantities add up to those of the model.

    Attributes:
        runs: the model with few layers of each kind; with one more of a kind, as often as it has more; and the first
            again, taken away as often. scale: bytes are one in so many of the model's.
    """

    runs: tuple[Run, ...]
    scale: int


@dataclass(eq=False, slots=True)
class _Call:
    """A unit's call: the groups of the parameters that it uses, and the calls inside of it, in order."""

    unit: int
    steps: list[int | _Call]

    def alike(self, facts: ModelFacts) -> tuple[object, ...]:
        """Return what is the same for calls that are alike."""
        groups = tuple(map(id, facts.units[self.unit].groups))
        return groups, tuple(step if isinstance(step, int) else step.alike(facts) for step in self.steps)

    def inner(self) -> Iterator[_Call]:
        """Yield it, and all calls inside."""
        yield self
        for step in self.steps:
            if isinstance(step, _Call):
                yield from step.inner()


def record_step(
    facts: ModelFacts, policy: MixedPrecisionPolicy, work: Works, counts: Sequence[int] = (1,)
) -> PlayedStep:
    """Run the engine on a stand-in, and return what it asked of the device in optimizer steps.

    Args:
        counts: of microbatches; above three they repeat what the one between the first and the last does.
    """
    wanted = sorted({min(count, 3) for count in counts} | ({2} if max(counts) > 3 else set()))
    units = facts.units
    key = (facts.visits, tuple((id(each.groups), work(each)) for each in units), policy, tuple(wanted))
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST_KNOWN:
            del _KNOWN[next(iter(_KNOWN))]
        # With the facts, so that what is named by identity stays itself.
        _KNOWN[key] = facts, _recorded(facts, policy, work, wanted)
    return _KNOWN[key][1]


_MOST_KNOWN = 64
_KNOWN: dict[object, tuple[ModelFacts, PlayedStep]] = {}


def _recorded(facts: ModelFacts, policy: MixedPrecisionPolicy, work: Works, wanted: Sequence[int]) -> PlayedStep:
    largest = max(sum(group.plan.numel for group in unit.groups) for unit in facts.units)
    scale = -(-4 * largest // _MOST_BYTES)
    surplus = _surplus(_tree(facts), facts)
    base = _record(facts, policy, work, (wanted, scale), {})
    runs = [Run(base)]
    for kind, extra in surplus.items():
        runs += [Run(_record(facts, policy, work, (wanted, scale), {kind: 1}), extra), Run(base, -extra)]
    return PlayedStep(tuple(runs), scale)


def with_names(words: str, facts: ModelFacts) -> str:
    """Return what is said of a run with the names of units, which it knows by their positions."""
    return re.sub(r"#(\d+)", lambda found: facts.units[int(found[1])].name, words)


def _tree(facts: ModelFacts) -> _Call:
    stack: list[_Call] = []
    root = None
    for visit in facts.visits:
        if visit.kind is VisitKind.OPEN:
            call = _Call(visit.unit, [])
            if stack:
                stack[-1].steps.append(call)
            root = root or call
            stack.append(call)
        elif visit.kind is VisitKind.CLOSE:
            stack.remove(next(call for call in stack if call.unit == visit.unit))
        else:
            next(call for call in stack if call.unit == visit.unit).steps.append(visit.group)
    assert root is not None
    return root


def _surplus(tree: _Call, facts: ModelFacts) -> dict[object, int]:
    """Return, for each kind of call that follows its own like more than ``_LAYERS`` times, how many are too many."""
    found: Counter[object] = Counter()
    for call in tree.inner():
        for kind, run in itertools.groupby(
            (step for step in call.steps if isinstance(step, _Call)), lambda step: step.alike(facts)
        ):
            found[kind] += max(0, len(list(run)) - _LAYERS)
    return {kind: extra for kind, extra in found.items() if extra}


def _trim(tree: _Call, facts: ModelFacts, more: Mapping[object, int]) -> None:
    for call in list(tree.inner()):
        kept: list[int | _Call] = []
        for kind, run in itertools.groupby(
            call.steps, lambda step: step if isinstance(step, int) else step.alike(facts)
        ):
            steps, most = list(run), _LAYERS + more.get(kind, 0)
            # The first ones and the last.
            kept += steps if isinstance(kind, int) or len(steps) <= most else [*steps[: most - 2], *steps[-2:]]
        call.steps = kept


def _record(
    facts: ModelFacts, policy: MixedPrecisionPolicy, work: Works, how: tuple[Sequence[int], int],
    more: Mapping[object, int],
) -> dict[int, tuple[Item, ...]]:  # fmt: skip
    wanted, scale = how
    tree = _tree(facts)
    _trim(tree, facts, more)
    axes = max((group.axes for unit in facts.units for group in unit.groups), key=_num_ranks, default=())
    found: dict[int, tuple[Item, ...]] = {}
    with warnings.catch_warnings(), virtual_device(_num_ranks(axes)) as device:
        # Whoever asks for the plan is told of padding by it.
        warnings.simplefilter("ignore", PaddingWarning)
        units = {call.unit: StandIn(device.recording, work(facts.units[call.unit])) for call in tree.inner()}
        for call in tree.inner():
            _fill(units, call, facts.units[call.unit], scale)
        _shard(facts, units, policy)
        names = {id(unit): f"#{position}" for position, unit in units.items()}
        device.unit_names = {
            path or type(module).__name__: names[id(module)] for path, module in units[tree.unit].named_modules()
        }
        model, given = units[tree.unit], torch.empty(1, requires_grad=True)
        for count in wanted:

            def step(count: int = count) -> None:
                for number in range(count):
                    with microbatch(model, is_last=number == count - 1):
                        model(given).sum().backward()
                _change(model)

            # A step leaves what the next one finds, however many microbatches it has.
            found[count] = tuple(device.record(step, warmup=0 if found else 2).items)
    return found


def _fill(units: Mapping[int, StandIn], call: _Call, facts: UnitFacts, scale: int) -> None:
    unit, used = units[call.unit], Counter[int]()
    for step in call.steps:
        if isinstance(step, _Call):
            unit.call(units[step.unit])
            continue
        group = facts.groups[step]
        position = used[step] % len(group.names)
        used[step] += 1
        weight = _weight(group, position, scale)
        unit.use(weight)


def _weight(group: GroupFacts, position: int, scale: int) -> nn.Parameter:
    rows, *others = group.plan.shapes[position]
    is_trained = group.requires_grad and position not in group.frozen
    shape = (-(-rows // scale), *others)
    weight = nn.Parameter(torch.empty(shape, dtype=group.dtypes.stepped), requires_grad=is_trained)
    if group.placements == group.placements.no_shard_on_all_axes():
        fsdp_no_shard(weight)
    return weight


def _shard(facts: ModelFacts, units: Mapping[int, StandIn], policy: MixedPrecisionPolicy) -> None:
    meshes: dict[tuple[AxisFacts, ...], DeviceMesh] = {}
    any_groups = next(unit.groups for unit in facts.units if unit.groups)
    for position in sorted(units, reverse=True):
        groups = facts.units[position].groups or any_groups
        axes = groups[0].axes
        if axes not in meshes:
            ranks = torch.arange(_num_ranks(axes)).view([axis.size for axis in axes])
            meshes[axes] = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(axis.name for axis in axes))
        sizes = [axis.size for axis in axes]
        # Parameters that stay whole are marked each for itself.
        placements = max((group.placements for group in groups), key=lambda each: each.num_shards(sizes))
        # A root keeps its weights, and what lingers does so by default.
        kept = None if position == 0 or facts.units[position].lingers else facts.units[position].reshards_after_forward
        unit, mesh = units[position], meshes[axes]
        sharded: Any = fully_shard(unit, mesh=mesh, placements=placements, mp_policy=policy, reshard_after_forward=kept)
        if policy.reduction == "invariant":
            # It divides by a number that the caller says.
            sharded.set_gradient_divide_factor(1.0)


def _num_ranks(axes: Sequence[AxisFacts]) -> int:
    return torch.Size(axis.size for axis in axes).numel()


def _change(model: nn.Module) -> None:
    """Change the weights as an optimizer does, so that copies of them are brought up to date."""
    for parameter in model.parameters():
        parameter.grad = None
        with torch.no_grad():
            parameter.add_(0)
