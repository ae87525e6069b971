"""Stand-ins: modules with the units and parameters of a model, which note what using them would compute.

Everything else, every buffer, gather, wait and reduction, is what the engine does with them. The model may be a live
one, whose units are built again, or one of shapes alone (on the meta device), whose units are planned here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer.errors import LayoutError
from dbuffer.mesh import make_reduce_groups, mesh_axes
from dbuffer_kernels.launch import launch_with
from megatron_fsdp.api import put_in_place
from megatron_fsdp.build.builder import GroupPlan, Wishes, plan_groups
from megatron_fsdp.build.no_shard import fsdp_no_shard, is_no_shard
from megatron_fsdp.build.ownership import OwnedParameter, collect_parameters
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.planning.transformer import UnitWork
from megatron_fsdp.policy.mesh import sharding_target
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.policy.strategy import Placements
from megatron_fsdp.runtime.lifecycle.make_param_group import make_param_group
from megatron_fsdp.runtime.lifecycle.make_unit import make_unit
from megatron_fsdp.runtime.step.lanes import turns
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.step.unit import Unit
from megatron_fsdp.runtime.weights.memory_slots import keep_gathered, use_slots
from megatron_fsdp.virtual.device import VirtualDevice, virtual_device
from megatron_fsdp.virtual.recording import Recording, Work

__all__ = ["Axis", "Model", "Sharding", "StandIn", "StoodIn", "live_stand_ins", "shaped_stand_ins", "unsharded"]


class Axis(NamedTuple):
    """One axis of the mesh: its name, its number of ranks, and the place of the rank that is reported on."""

    name: str
    size: int
    rank: int


Axes = tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How every unit of a model of shapes is sharded.

    Attributes:
        axes: of the data-parallel mesh, outermost first. expert_axes: of routed experts, which fewer ranks may hold;
            None: as all else.
    """

    axes: Axes
    placements: Placements
    policy: MixedPrecisionPolicy
    expert_axes: Axes | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(axis.size for axis in self.axes)

    def axes_of(self, module: nn.Module) -> Axes:
        """Return over what a module's unit is sharded."""
        return self.expert_axes if self.expert_axes and type(module).__name__ == "experts" else self.axes


# ---------------------------------------------------------------------- modules

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
        hear: is told of each weight's gradient, by the module and the name here.
    Attributes:
        names: of parameters in the model's unit, by their names here. reads: whether backward reads weights.
        work: as given.
    """

    def __init__(
        self, recording: Recording, work: UnitWork, hear: Callable[[StandIn, str, torch.Tensor], None]
    ) -> None:
        super().__init__()
        self.names: dict[str, str] = {}
        self.reads = True
        self._order: list[str] = []
        self.work = work
        self._recording, self._hear, self._numel = recording, hear, 0

    def call(self, module: StandIn) -> None:
        """Call a module next."""
        self._order.append(f"{len(self._order)}")
        self.register_module(self._order[-1], module)

    def use(self, parameter: nn.Parameter, name: str) -> None:
        """Use a parameter next."""
        self._order.append(f"{len(self._order)}")
        self.names[self._order[-1]] = name
        self.register_parameter(self._order[-1], parameter)
        self._numel += parameter.numel()

    def hold(self, parameter: nn.Parameter, name: str) -> None:
        """Have a parameter that is not used."""
        self.names[f"unused{len(self.names)}"] = name
        self.register_parameter(f"unused{len(self.names) - 1}", parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass a token through everything; values mean nothing."""
        for name in self._order:
            each = getattr(self, name)
            x = each(x) if isinstance(each, nn.Module) else self._use(name, each, x)
        return x

    def _use(self, name: str, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        used: torch.Tensor = _Use.apply(x, weight, self._noting(name, weight), self.reads)  # type: ignore[no-untyped-call]
        return used

    def _noting(self, name: str, weight: torch.Tensor) -> Callable[..., None]:
        """Return what notes the operations of a use: its share of the unit's own."""
        work, recording, share = self.work, self._recording, weight.numel() / self._numel

        def note(what: str, gradient: torch.Tensor | None = None) -> None:
            for kind, times in _TIMES[what].items():
                recording.work(Work(what, kind, int(share * times * getattr(work, kind))))
            if what == "backward" and work.is_layer:
                for kind in ("matrix", "attention"):
                    recording.work(Work("again", f"{kind} again", int(share * getattr(work, kind))), calls=0)
            if gradient is not None:
                self._hear(self, name, gradient)

        return note


# ---------------------------------------------------------------------- models


@dataclass(frozen=True, slots=True)
class StoodIn:
    """A unit of the model.

    Attributes:
        name: path of its (first) module below the model; the class name where that is the model itself.
        modules: class names. ties: for every parameter that is registered in several places, their full names.
        unit: of stand-ins, built as the engine builds the model's. has_hooks: parameters whose class says what is
            gathered, which stand-ins do not know.
    """

    name: str
    modules: tuple[str, ...]
    ties: tuple[tuple[str, ...], ...]
    unit: Unit
    has_hooks: tuple[str, ...] = ()

    def names(self, group: ParameterGroup) -> tuple[str, ...]:
        """Return what the parameters of a group are called in the model's unit."""
        names = []
        for owned in group.owned:
            place = owned.param_module_infos[0]
            assert isinstance(place.module, StandIn)
            names.append(place.module.names[place.attribute])
        return tuple(names)


@dataclass(frozen=True, slots=True)
class Model:
    """Stand-ins for a model: the outermost one, and the units in the order in which modules are registered."""

    device: VirtualDevice
    module: nn.Module
    units: tuple[StoodIn, ...]


Hear = Callable[[StandIn, str, torch.Tensor], None]


class _Copies:
    """Stand-ins for the modules of units below a model, each module once, in the order of registration.

    Args:
        paths: of the modules of units, by identity. stand_in: makes a module for one of them.
        copy: returns what stands for a parameter of a module; None where nobody shards it.
        shares: whether units may have parameters in common.
    Attributes:
        modules: by the identity of what they stand for. places: by that of a parameter, the unit's module and its name
            there.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Mapping[int, str],
        stand_in: Callable[[nn.Module], StandIn],
        copy: Callable[[nn.Module, nn.Parameter], nn.Parameter | None],
        *,
        shares: bool = False,
    ) -> None:
        self.modules: dict[int, StandIn] = {}
        self.places: dict[int, tuple[nn.Module, str]] = {}
        self._model, self._paths, self._stand_in, self._copy, self._shares = model, paths, stand_in, copy, shares
        self._seen: set[int] = set()
        self.outermost = self._made(model)

    def _made(self, module: nn.Module) -> StandIn:
        made = self.modules[id(module)] = self._stand_in(module)
        self._add(module, made, module, "")
        return made

    def _add(self, unit: nn.Module, made: StandIn, module: nn.Module, prefix: str) -> None:
        self._seen.add(id(module))
        for name, parameter in module._parameters.items():
            # A tied parameter gets its gradient when backward reaches the first place that used it.
            owner, other = self.places.get(id(parameter), (unit, ""))
            if owner is not unit and not self._shares:
                raise ConfigError(
                    f"parameter {prefix + name!r} of unit {self.name(unit)!r} is the same tensor as {other!r} of unit "
                    f"{self.name(owner)!r}; tied parameters need one unit: leave both modules to the root, with "
                    "--unit-class naming the others"
                )
            copy = None if parameter is None or id(parameter) in self.places else self._copy(module, parameter)
            if copy is not None:
                if not copy.ndim:
                    raise ConfigError(
                        f"unit {self.name(unit)!r}: parameter {prefix + name!r} has no dimensions, so there are no "
                        "rows to shard; make it 1-d"
                    )
                self.places[id(parameter)] = unit, prefix + name
                made.use(copy, prefix + name)
        for name, child in module.named_children():
            if id(child) in self._paths and id(child) not in self._seen:
                made.call(self._made(child))
            elif id(child) not in self._seen:
                self._add(unit, made, child, f"{prefix}{name}.")

    def name(self, module: nn.Module) -> str:
        """Return the path of a unit's module; its class where that is the model."""
        return self._paths.get(id(module)) or type(module).__name__.removeprefix("FSDP")

    def ties(self) -> dict[int, tuple[tuple[str, ...], ...]]:
        """Return the names of parameters registered in several places, by the identity of the unit's module."""
        found: dict[int, list[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), []).append(name)
        ties: dict[int, tuple[tuple[str, ...], ...]] = {}
        for key, names in found.items():
            if len(names) > 1 and key in self.places:
                owner = id(self.places[key][0])
                ties[owner] = (*ties.get(owner, ()), tuple(names))
        return ties


@contextlib.contextmanager
def _virtual_meshes(
    meshes: Sequence[Axes], *, has_streams: bool
) -> Iterator[tuple[VirtualDevice, dict[Axes, DeviceMesh]]]:
    """Make this process a rank of a job that has these meshes, with the place on each that its axes say."""
    places = []
    for axes in meshes:
        place = 0
        for axis in axes:
            place = place * axis.size + axis.rank
        places.append(place)
    sizes = [math.prod(axis.size for axis in axes) for axes in meshes]
    # Ranks are numbered so that it is the same one everywhere.
    rank = max(places, default=0)
    num_ranks = max((rank - place + size for place, size in zip(places, sizes, strict=True)), default=1)
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(virtual_device(num_ranks, rank, has_streams=has_streams))
        if not has_streams:
            # On a CPU kernels are operators, many and small ones of large tensors.
            stack.enter_context(launch_with(device.launch))
        yield (
            device,
            {
                axes: DeviceMesh(
                    "cpu",
                    (torch.arange(size) + rank - place).view([axis.size for axis in axes]),
                    mesh_dim_names=tuple(axis.name for axis in axes),
                )
                for axes, place, size in zip(meshes, places, sizes, strict=True)
            },
        )


def _put_up(
    modules: list[StandIn],
    owned: list[OwnedParameter],
    plans: Sequence[GroupPlan],
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | int | None = None,
) -> Unit:
    """Make a unit of modules, as ``fully_shard`` does when it has planned the groups."""
    # With reduction="invariant" the divisor is told later on, and it is of no account here.
    specs = [replace(plan.spec, divisor=1.0) for plan in plans]
    groups = [make_param_group(plan.owned, plan.plan, spec, "StandIn") for plan, spec in zip(plans, specs, strict=True)]
    unit = make_unit("StandIn", modules, groups, policy)
    for mesh in {id(plan.spec.mesh): plan.spec.mesh for plan in plans}.values():
        make_reduce_groups(mesh_axes(mesh))
    put_in_place(unit, modules, owned, reshard_after_forward)
    return unit


def _owned(modules: Sequence[nn.Module]) -> list[OwnedParameter]:
    return collect_parameters(modules, ())


@contextlib.contextmanager
def shaped_stand_ins(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    sharding: Sharding,
    work: Callable[[nn.Module], UnitWork],
    hear: Hear,
    *,
    has_streams: bool = True,
) -> Iterator[Model]:
    """Stand in for what ``fully_shard`` of each block, and then of ``model``, would make.

    Args:
        model: its parameters may be on any device, meta included; nothing is done to it.
        blocks: modules below ``model``; the root owns what no block does.
        work: operations of a token in a unit's module. hear: is told of each gradient of a weight.
        has_streams: lanes are streams, as on a GPU.
    Raises:
        ConfigError: a parameter without dimensions, or one that several units would own.
        LayoutError: the planner refuses the padding of a unit.
    """
    chosen = {id(block) for block in blocks if not is_no_shard(block)} | {id(model)}
    paths = {
        id(module): vars(module).get("path", path) for path, module in model.named_modules() if id(module) in chosen
    }
    units = [module for module in model.modules() if id(module) in chosen]

    def copy(module: nn.Module, parameter: nn.Parameter) -> nn.Parameter:
        made = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        return fsdp_no_shard(made) if is_no_shard(module) else made

    meshes = list(dict.fromkeys(map(sharding.axes_of, units)))
    with _virtual_meshes(meshes, has_streams=has_streams) as (device, known):
        copies = _Copies(model, paths, lambda module: StandIn(device.recording, work(module), hear), copy)
        ties, made = copies.ties(), list[StoodIn]()
        # Inner units come after those around them.
        for module in reversed(units):
            name, stand_in = copies.name(module), copies.modules[id(module)]
            target = sharding_target(known[sharding.axes_of(module)], sharding.placements, None)
            owned = _owned([stand_in])
            try:
                plans = plan_groups(owned, Wishes(target, sharding.policy, None, 1, None))
            except LayoutError as error:
                raise LayoutError(f"unit {name!r}: {error}") from error
            unit = _put_up([stand_in], owned, plans, sharding.policy)
            made.append(StoodIn(name, (type(module).__name__,), ties.get(id(module), ()), unit))
        yield Model(device, copies.outermost, tuple(reversed(made)))


# ---------------------------------------------------------------------- live models


@contextlib.contextmanager
def live_stand_ins(model: nn.Module, units: Sequence[Unit], hear: Hear) -> Iterator[Model]:
    """Stand in for a live model, whose ``units`` are in the order in which modules are registered."""
    places = {
        id(_registered(unit, name)): (group, index)
        for unit in units
        for group in unit.groups
        for index, name in enumerate(group.parameters)
    }
    modules = {id(unit): [module for each in unit.modules if (module := each()) is not None] for unit in units}
    ids = {id(module) for each in modules.values() for module in each}
    paths = {id(module): path for path, module in model.named_modules() if id(module) in ids}
    made: dict[tuple[int, int], nn.Parameter] = {}

    def stand_in(group: ParameterGroup, index: int) -> nn.Parameter:
        weight = torch.empty(group.plan.shapes[index], dtype=group.spec.dtypes.stepped)
        made[id(group), index] = nn.Parameter(weight, _was_trained(group))
        return made[id(group), index]

    def copy(module: nn.Module, parameter: nn.Parameter) -> nn.Parameter | None:
        return stand_in(*places[id(parameter)]) if id(parameter) in places else None

    def build(unit: Unit) -> Unit:
        stood = [copies.modules[id(each)] for each in modules[id(unit)] if id(each) in copies.modules]
        for group in unit.groups:
            for index, name in enumerate(group.parameters):
                if (id(group), index) not in made:
                    # Of a module of the unit that is not below the one that was asked about.
                    stood[0].hold(stand_in(group, index), name)
        owned = _owned(stood)
        by_identity = {id(each.parameter): each for each in owned}
        plans = [
            GroupPlan(
                [by_identity[id(made[id(group), index])] for index in range(len(group.parameters))],
                group.plan,
                replace(
                    group.spec, mesh=meshes[_axes(group)], device=torch.device("cpu"), is_pinned=False,
                    is_meta=False, keeps_gathered=False, fuses_weight_gradients=unit.policy.fuse_weight_gradients,
                ),
            )
            for group in unit.groups
        ]  # fmt: skip
        return _put_up(stood, owned, plans, unit.policy, reshard_asked(unit))

    every = [group for unit in units for group in unit.groups]
    has_streams = any(turns(group.spec.device) is not None for group in every)
    with _virtual_meshes(list(dict.fromkeys(map(_axes, every))), has_streams=has_streams) as (device, meshes):
        nothing = UnitWork(0)
        copies = _Copies(model, paths, lambda _: StandIn(device.recording, nothing, hear), copy, shares=True)
        ties, built = copies.ties(), [build(unit) for unit in reversed(units)][::-1]
        _settle(units, built)
        stood_in = []
        for unit, stood in zip(units, built, strict=True):
            mine = modules[id(unit)]
            name = next((paths[id(module)] for module in mine if paths.get(id(module))), copies.name(mine[0]))
            classes = tuple(type(module).__name__.removeprefix("FSDP") for module in mine)
            tied = tuple(names for module in mine for names in ties.get(id(module), ()))
            hooks = tuple(each.name for group in unit.groups for each in group.owned if each.extension is not None)
            stood_in.append(StoodIn(name, classes, tied, stood, hooks))
        yield Model(device, copies.outermost, tuple(stood_in))


def unsharded(model: nn.Module, units: Sequence[Unit]) -> dict[str, nn.Parameter]:
    """Return the parameters of a live model that belong to no unit."""
    owned = {id(_registered(unit, name)) for unit in units for group in unit.groups for name in group.parameters}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in owned}


def reshard_asked(unit: Unit) -> bool | int | None:
    """Return what was asked of ``fully_shard`` as ``reshard_after_forward``."""
    parts = [part.axis.size for group in unit.groups if (part := group.weights.post_forward) is not None]
    return parts[0] if parts else unit.reshard_after_forward


def _axes(group: ParameterGroup) -> Axes:
    return tuple(Axis(axis.name, axis.size, axis.rank) for axis in group.main_weight.axes)


def _registered(unit: Unit, name: str) -> nn.Parameter:
    """Return what is registered now under a parameter's name in its unit: its sharded or its unsharded one."""
    position, _, path = name.partition(".") if len(unit.modules) > 1 else ("0", "", name)
    module = unit.modules[int(position)]()
    assert module is not None
    return module.get_parameter(path)


def _was_trained(group: ParameterGroup) -> bool:
    # The parameters' own flags: the group takes notice of a change in the next forward.
    return group.gradients is not None or any(each.requires_grad for each in group.parameters.values())


def _settle(units: Sequence[Unit], built: Sequence[Unit]) -> None:
    """Set what is set on units and parameters after ``fully_shard``."""
    stand_ins = {id(unit): stood.reference for unit, stood in zip(units, built, strict=True)}
    for unit, stood in zip(units, built, strict=True):
        stood.reshard_after_backward = unit.reshard_after_backward
        stood.unshards_in_backward = unit.unshards_in_backward
        for module in stood.modules:
            stand_in = module()
            assert isinstance(stand_in, StandIn)
            stand_in.reads = unit.unshards_in_backward
        for ahead in ("forward_prefetch", "backward_prefetch"):
            told = [stand_ins[id(each())] for each in getattr(unit, ahead) if id(each()) in stand_ins]
            setattr(stood, ahead, told)
        if unit.backward.max_packed_buffers:
            stood.backward.max_packed_buffers = unit.backward.max_packed_buffers
        for group, copy in zip(unit.groups, stood.groups, strict=True):
            _settle_group(group, copy)
        if unit.slots.sizing is not None:
            use_slots(stood, unit.slots)


def _settle_group(group: ParameterGroup, copy: ParameterGroup) -> None:
    for each, parameter in zip(group.parameters.values(), copy.parameters.values(), strict=True):
        if _was_trained(group) and not each.requires_grad:
            parameter.requires_grad_(False)
    holds = group.gradients is not None and not group.requires_grad and group.gradients.main_grad.is_allocated
    if holds and copy.gradients is not None:
        copy.gradients.keep(True)
    if group.spec.keeps_gathered:
        keep_gathered(copy, keeps=True, is_sharded=True)
