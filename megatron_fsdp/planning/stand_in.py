"""Stand-ins: modules with the units and parameters of ``ModelFacts``, which note what using them would compute.

Everything else, every buffer, gather, wait and reduction, is what the engine does with them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer.mesh import make_reduce_groups, mesh_axes
from dbuffer_kernels.launch import launch_with
from megatron_fsdp.api import put_in_place
from megatron_fsdp.build.builder import GroupPlan, GroupSpec
from megatron_fsdp.build.ownership import collect_parameters
from megatron_fsdp.planning.model_spec import AxisFacts, Call, GroupFacts, ModelFacts, UnitFacts, Use
from megatron_fsdp.planning.transformer import UnitWork
from megatron_fsdp.runtime.lifecycle.make_param_group import make_param_group
from megatron_fsdp.runtime.lifecycle.make_unit import make_unit
from megatron_fsdp.runtime.lifecycle.module import FSDPModule
from megatron_fsdp.runtime.step.unit import Unit
from megatron_fsdp.runtime.weights.memory_slots import keep_gathered, use_slots
from megatron_fsdp.virtual.device import VirtualDevice, virtual_device
from megatron_fsdp.virtual.recording import Recording, Work

__all__ = ["Model", "stand_ins"]

# How often each kind of operation of forward comes again: a product has two in backward, one of them for the weight.
_TIMES = {"forward": {"matrix": 1, "attention": 1}, "backward": {"matrix": 1, "attention": 2}, "weight": {"matrix": 1}}


class _Use(torch.autograd.Function):
    """A use of a weight: its products, and gradients without values."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, note: Callable[..., None], reads: bool
    ) -> torch.Tensor:
        if reads:
            ctx.save_for_backward(weight)
        ctx.note, ctx.shape, ctx.dtype = note, weight.shape, weight.dtype
        note("forward")
        return torch.empty(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        # Where weights are read they are gathered by now.
        _ = ctx.saved_tensors
        ctx.note("backward")
        x = torch.empty(1) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return x, None, None, None
        gradient = torch.empty(ctx.shape, dtype=ctx.dtype)
        ctx.note("weight", gradient)
        return x, gradient, None, None


class StandIn(nn.Module):
    """A module of a unit, whose parameters and inner modules are used in the order in which they were added.

    Args:
        work: operations of one token, which are shared out among the weights by their size.
        hear: is told of each weight's gradient. reads: whether backward reads weights.
    """

    def __init__(
        self, recording: Recording, work: UnitWork, hear: Callable[[Use, torch.Tensor], None], *, reads: bool
    ) -> None:
        super().__init__()
        self._order: list[str] = []
        self._uses: dict[str, Use] = {}
        self._recording, self._work, self._hear = recording, work, hear
        self._numel, self._reads = 0, reads

    def call(self, module: StandIn) -> None:
        """Call a module next."""
        self._order.append(f"{len(self._order)}")
        self.register_module(self._order[-1], module)

    def use(self, use: Use, parameter: nn.Parameter) -> None:
        """Use a parameter next."""
        self._order.append(f"{len(self._order)}")
        self._uses[self._order[-1]] = use
        self.register_parameter(self._order[-1], parameter)
        self._numel += parameter.numel()

    def hold(self, parameter: nn.Parameter) -> None:
        """Have a parameter that is not used."""
        self.register_parameter(f"unused{len(self._parameters)}", parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass a token through everything; values mean nothing."""
        for name in self._order:
            each = getattr(self, name)
            if isinstance(each, nn.Module):
                x = each(x)
            else:
                x = _Use.apply(x, each, self._noting(self._uses[name], each), self._reads)  # type: ignore[no-untyped-call]
        return x

    def _noting(self, use: Use, weight: torch.Tensor) -> Callable[..., None]:
        """Return what notes the operations of a use: its share of the unit's own."""
        work, recording, share = self._work, self._recording, weight.numel() / self._numel

        def note(what: str, gradient: torch.Tensor | None = None) -> None:
            for kind, times in _TIMES[what].items():
                recording.work(Work(what, kind, int(share * times * getattr(work, kind))))
            if what == "backward" and work.is_layer:
                for kind in ("matrix", "attention"):
                    recording.work(Work("again", f"{kind} again", int(share * getattr(work, kind))), calls=0)
            if gradient is not None:
                self._hear(use, gradient)

        return note


@dataclass(frozen=True, slots=True)
class Model:
    """The outermost stand-in, and the units by their positions in the facts."""

    device: VirtualDevice
    module: nn.Module
    units: Mapping[int, Unit]


@contextlib.contextmanager
def stand_ins(
    facts: ModelFacts, call: Call, work: Callable[[int], UnitWork], hear: Callable[[Use, torch.Tensor], None]
) -> Iterator[Model]:
    """Make stand-ins for the modules in ``call``, and units of them, on a virtual device, as long as the block runs.

    Args:
        work: operations of a unit's token. hear: is told of each gradient of a weight.
    """
    axes = list(dict.fromkeys(group.axes for unit in facts.units for group in unit.groups))
    # This process has a place on each mesh; ranks are numbered so that it is the same one everywhere.
    places = [_place(each) for each in axes]
    rank = max(places)
    num_ranks = max(rank - place + _num_ranks(each) for each, place in zip(axes, places, strict=True))
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(virtual_device(num_ranks, rank, has_streams=facts.has_streams))
        if not facts.has_streams:
            # On a CPU kernels are operators, many and small ones of large tensors.
            stack.enter_context(launch_with(device.launch))
        meshes = {
            each: DeviceMesh(
                "cpu",
                (torch.arange(_num_ranks(each)) + rank - place).view([axis.size for axis in each]),
                mesh_dim_names=tuple(axis.name for axis in each),
            )
            for each, place in zip(axes, places, strict=True)
        }
        modules: dict[int, list[StandIn]] = {}
        parameters: dict[Use, nn.Parameter] = {}

        def build(call: Call) -> StandIn:
            reads = call.unit < 0 or facts.units[call.unit].unshards_in_backward
            made = StandIn(device.recording, work(call.unit), hear, reads=reads)
            modules.setdefault(call.unit, []).append(made)
            for step in call.steps:
                if isinstance(step, Call):
                    made.call(build(step))
                else:
                    parameters[step] = _parameter(facts.units[step.unit].groups[step.group], step.position)
                    made.use(step, parameters[step])
            return made

        module = build(call)
        # Inner units come after those around them.
        units = {
            position: _shard(facts, position, modules[position], parameters, meshes)
            for position in sorted(modules, reverse=True)
            if position >= 0
        }
        _settle(facts, units, parameters)
        yield Model(device, module, units)


def _num_ranks(axes: Sequence[AxisFacts]) -> int:
    return math.prod(axis.size for axis in axes)


def _place(axes: Sequence[AxisFacts]) -> int:
    place = 0
    for axis in axes:
        place = place * axis.size + axis.rank
    return place


def _parameter(group: GroupFacts, index: int) -> nn.Parameter:
    weight = torch.empty(group.plan.shapes[index], dtype=group.dtypes.stepped)
    return nn.Parameter(weight, requires_grad=group.requires_grad)


def _uses(position: int, unit: UnitFacts) -> Iterator[Use]:
    for number, group in enumerate(unit.groups):
        yield from (Use(position, number, index) for index in range(len(group.names)))


def _shard(
    facts: ModelFacts,
    position: int,
    modules: list[StandIn],
    parameters: dict[Use, nn.Parameter],
    meshes: Mapping[tuple[AxisFacts, ...], DeviceMesh],
) -> Unit:
    """Make a unit of modules, as ``fully_shard`` does when it has planned the groups."""
    unit = facts.units[position]
    for use in _uses(position, unit):
        if use not in parameters:
            # Of a module of the unit that is not below the one that was asked about.
            parameters[use] = _parameter(unit.groups[use.group], use.position)
            modules[0].hold(parameters[use])
    owned = {
        id(each.parameter): each for each in collect_parameters(modules, lambda at: isinstance(at, FSDPModule), ())
    }
    plans = []
    for number, group in enumerate(unit.groups):
        members = [owned[id(parameters[Use(position, number, index)])] for index in range(len(group.names))]
        spec = GroupSpec(
            meshes[group.axes],
            group.placements,
            torch.device("cpu"),
            group.dtypes,
            1.0,
            is_offloaded=group.is_offloaded,
            fuses_weight_gradients=unit.policy.fuse_weight_gradients,
        )
        plans.append(GroupPlan(members, group.plan, spec))

    name = type(modules[0]).__name__
    groups = [make_param_group(each.owned, each.plan, each.spec, name) for each in plans]
    made = make_unit(name, modules, groups, unit.policy)
    for axes in dict.fromkeys(group.axes for group in unit.groups):
        make_reduce_groups(mesh_axes(meshes[axes]))
    put_in_place(made, modules, list(owned.values()), unit.reshard_after_forward)
    return made


def _settle(facts: ModelFacts, units: Mapping[int, Unit], parameters: Mapping[Use, nn.Parameter]) -> None:
    """Set what is set on units and parameters after ``fully_shard``."""
    for position, unit in units.items():
        told = facts.units[position]
        unit.reshard_after_backward = told.reshards_after_backward
        unit.unshards_in_backward = told.unshards_in_backward
        unit.forward_prefetch = [units[other].reference for other in told.forward_prefetch]
        unit.backward_prefetch = [units[other].reference for other in told.backward_prefetch]
        if told.max_packed_buffers:
            unit.backward.max_packed_buffers = told.max_packed_buffers
        for group, each in zip(unit.groups, told.groups, strict=True):
            for index in each.frozen:
                list(group.parameters.values())[index].requires_grad_(False)
            if each.holds_gradients and group.gradients is not None:
                group.gradients.keep(True)
            if each.keeps_gathered:
                keep_gathered(group, keeps=True, is_sharded=True)
        if told.slots.sizing is not None:
            use_slots(unit, told.slots)
