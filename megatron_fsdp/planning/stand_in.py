"""Stand-ins: modules with a model's units and parameters that record which operations each use would take.

Everything else is the engine's own: buffers, gathers, waits and reductions. The model may be live, and then its units
are rebuilt; or it may have only shapes (on the meta device), and then ``fully_shard`` shards its stand-ins.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer.errors import LayoutError
from dbuffer.events import tell
from dbuffer.mesh import make_groups, mesh_axes
from dbuffer_kernels.launch import launch_with
from megatron_fsdp.api import fully_shard, put_in_place
from megatron_fsdp.build.no_shard import fsdp_no_shard, is_no_shard
from megatron_fsdp.build.ownership import collect_parameters
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.params import handle_of
from megatron_fsdp.engine.streams import turns
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.lifecycle.make_param_group import make_param_group
from megatron_fsdp.lifecycle.module import FSDPModule, unit_of
from megatron_fsdp.lifecycle.unit_changes import make_unit, rename_unit
from megatron_fsdp.planning.transformer import UnitWork
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.policy.strategy import Placements
from megatron_fsdp.variants.memory_slots import keep_gathered, use_slots
from megatron_fsdp.virtual.device import VirtualDevice, virtual_device
from megatron_fsdp.virtual.recording import Recording, Work

__all__ = [
    "Axes",
    "Axis",
    "Model",
    "Sharding",
    "StandIn",
    "StoodIn",
    "live_stand_ins",
    "put",
    "reshard_asked",
    "shaped_stand_ins",
    "unsharded",
]


class Axis(NamedTuple):
    """One axis of the mesh: its name, its number of ranks, and the position of the simulated rank."""

    name: str
    size: int
    rank: int


Axes = tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How to shard every unit of a model that has only shapes.

    Attributes:
        axes: axes of the data-parallel mesh, outermost first. expert_axes: axes of routed experts, which may be
            sharded over fewer ranks; None: as all other units.
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
        """Return the mesh axes over which a module's unit is sharded."""
        return self.expert_axes if self.expert_axes and type(module).__name__ == "experts" else self.axes


# ---------------------------------------------------------------------- modules

# How often each kind of forward operation runs: a matrix product has two in backward, one for the weight gradient.
_TIMES = {"forward": {"matrix": 1, "attention": 1}, "backward": {"matrix": 1, "attention": 2}, "weight": {"matrix": 1}}


class _Use(torch.autograd.Function):
    """An autograd function for one use of a weight: records its products, and returns gradients without values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, module: StandIn) -> torch.Tensor:
        if module._reads:
            ctx.save_for_backward(weight)
        ctx.module, ctx.handle, ctx.shape, ctx.dtype = module, handle_of(weight), weight.shape, weight.dtype
        module._note("forward", weight.numel())
        return torch.empty(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        # Reading the saved weight raises an error if it is not gathered by now.
        _ = ctx.saved_tensors
        ctx.module._note("backward", ctx.shape.numel())
        x = torch.empty(1) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return x, None, None
        gradient = torch.empty(ctx.shape, dtype=ctx.dtype)
        ctx.module._note("weight", ctx.shape.numel())
        tell("computed", (ctx.handle.group(), gradient))
        return x, gradient, None


class StandIn(nn.Module):
    """A module that uses a unit's parameters and calls its inner units, in the order in which they were added.

    Args:
        path: path of the module within the model.
    """

    def __init__(self, path: str, recording: Recording) -> None:
        super().__init__()
        # Names with an underscore, because the model's names are used too. Each weight gets a share of the unit's
        # operations in proportion to its size.
        self._path, self._work, self._recording, self._reads = path, UnitWork(0), recording, True
        self._numel, self._order = 0, list[tuple[nn.Module, str]]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send a token with meaningless values through all parts."""
        for module, name in self._order:
            part = getattr(module, name)
            x = part(x) if isinstance(part, nn.Module) else _Use.apply(x, part, self)  # type: ignore[no-untyped-call]
        return x

    def _add(self, name: str, part: nn.Parameter | StandIn, *, is_used: bool = True) -> None:
        """Register a parameter or inner unit under a name, which may have dots; forward uses it next if ``is_used``."""
        place = put(self, name, part)
        if is_used:
            self._order.append(place)
            self._numel += part.numel() if isinstance(part, nn.Parameter) else 0

    def _note(self, what: str, numel: int) -> None:
        """Record the operations of using ``numel`` weights: their share of the unit's operations."""
        share, where = numel / self._numel, " in a layer" if self._work.is_layer else ""
        for kind, times in _TIMES[what].items():
            self._recording.work(Work(what, kind + where, int(share * times * getattr(self._work, kind))))


def put(module: nn.Module, name: str, part: nn.Parameter | nn.Module) -> tuple[nn.Module, str]:
    """Register ``part`` below a module under a dotted name; return the module that holds it, and its name there."""
    *path, attribute = name.split(".")
    for each in path:
        if each not in module._modules:
            module.add_module(each, nn.Module())
        module = module.get_submodule(each)
    setattr(module, attribute, part)
    return module, attribute


@functools.lru_cache(maxsize=256)
def _class(name: str) -> type[StandIn]:
    return type(name, (StandIn,), {})


# ---------------------------------------------------------------------- models


@dataclass(frozen=True, slots=True)
class StoodIn:
    """A unit of the model, and the unit of stand-ins that represents it.

    Attributes:
        modules: class names of the model's modules. work: operations per token.
        unit: the stand-ins' unit, built by the engine like the model's. Its name is the path of its first module in the
            model, or the class name if that is the model itself.
        has_hooks: parameters whose class has its own all-gather hooks, which stand-ins do not have.
    """

    modules: tuple[str, ...]
    work: UnitWork
    unit: Unit
    has_hooks: tuple[str, ...] = ()

    @classmethod
    def of(cls, unit: Unit, modules: Sequence[nn.Module], has_hooks: tuple[str, ...] = ()) -> StoodIn:
        """Describe a unit of stand-ins for ``modules``, and name it."""
        parts = [part for module in unit.modules if isinstance(part := module(), StandIn)]
        kinds = tuple(type(module).__name__.removeprefix("FSDP") for module in modules)
        rename_unit(unit, next((part._path for part in parts if part._path), kinds[0]))
        return cls(kinds, parts[0]._work, unit, has_hooks)

    @property
    def name(self) -> str:
        """The unit's name."""
        return self.unit.name

    def names(self, group: ParameterGroup) -> tuple[str, ...]:
        """Return the names of a group's parameters in the model's unit."""
        prefixed = len(self.unit.modules) > 1
        return tuple(name.partition(".")[2] if prefixed else name for name in group.parameters)


@dataclass(frozen=True, slots=True)
class Model:
    """Stand-ins for a model: the device, the outermost module, and all units in order of registration."""

    device: VirtualDevice
    module: nn.Module
    units: tuple[StoodIn, ...]


def _copied(
    model: nn.Module,
    units: Sequence[nn.Module],
    copy: Callable[[nn.Module, nn.Parameter], nn.Parameter | None],
    works: Mapping[str, UnitWork],
    recording: Recording,
) -> dict[int, StandIn]:
    """Return stand-ins for a model and for the modules of units below it, keyed by the identity of the module.

    Args:
        copy: returns the stand-in of a module's parameter, always the same one; None if the parameter is unsharded.
        works: as in ``shaped_stand_ins``.
    """
    chosen = {id(module) for module in (*units, model)}
    paths = {id(module): vars(module).get("path", path) for path, module in model.named_modules()}
    made: dict[int, StandIn] = {}
    seen: set[int] = set()

    def stand_in(module: nn.Module) -> StandIn:
        kind = type(module).__name__.removeprefix("FSDP")
        found = made[id(module)] = _class(kind)(paths[id(module)], recording)
        fill(found, module, "")
        found._work = works.get(kind) or UnitWork(2 * found._numel, is_layer=module is not model)
        return found

    def fill(around: StandIn, module: nn.Module, prefix: str) -> None:
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            copied = None if parameter is None else copy(module, parameter)
            if copied is not None:
                # A tied parameter is used once, where backward reaches it last.
                around._add(prefix + name, copied, is_used=id(parameter) not in seen)
                seen.add(id(parameter))
        for name, child in module.named_children():
            if id(child) in chosen - seen:
                around._add(prefix + name, stand_in(child))
            elif id(child) not in seen:
                fill(around, child, f"{prefix}{name}.")

    stand_in(model)
    return made


@contextlib.contextmanager
def _virtual_meshes(
    meshes: Sequence[Axes], *, has_streams: bool
) -> Iterator[tuple[VirtualDevice, dict[Axes, DeviceMesh]]]:
    """Make this process a rank of a virtual job with these meshes, at the position that their axes give."""
    meshes = list(dict.fromkeys(meshes))
    sizes = [math.prod(axis.size for axis in axes) for axes in meshes]
    places = [functools.reduce(lambda place, axis: place * axis.size + axis.rank, axes, 0) for axes in meshes]
    # Ranks are numbered so that this process has the same rank in all meshes.
    rank = max(places, default=0)
    firsts = [rank - place for place in places]
    num_ranks = max((first + size for first, size in zip(firsts, sizes, strict=True)), default=1)
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(virtual_device(num_ranks, rank, has_streams=has_streams))
        if not has_streams:
            # On a CPU, kernels run as torch operators, which need many launches; here each is recorded once.
            stack.enter_context(launch_with(device.launch))
        made = {}
        for axes, first, size in zip(meshes, firsts, sizes, strict=True):
            ranks = torch.arange(first, first + size).view([axis.size for axis in axes])
            made[axes] = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(axis.name for axis in axes))
        yield device, made


@contextlib.contextmanager
def shaped_stand_ins(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    sharding: Sharding,
    works: Mapping[str, UnitWork],
    *,
    has_streams: bool = True,
) -> Iterator[Model]:
    """Make stand-ins for a model of shapes, and call ``fully_shard`` on those of each block and of the model.

    Args:
        model: its parameters may be on any device, including meta; it is not changed.
        blocks: modules below ``model``; the root owns the parameters that are in no block.
        works: operations per token of a unit, by its module's class name; default: two per parameter.
        has_streams: lanes are streams, as on a GPU.
    Raises:
        ConfigError, OwnershipError: the parameters cannot be sharded in this way.
        LayoutError: the planner refuses a unit's padding.
    """
    chosen = {id(block) for block in blocks if not is_no_shard(block)} | {id(model)}
    units = [module for module in model.modules() if id(module) in chosen]
    made: dict[int, nn.Parameter] = {}

    def copy(module: nn.Module, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in made:
            copied = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), parameter.requires_grad)
            copied.__dict__.update(parameter.__dict__)
            made[id(parameter)] = fsdp_no_shard(copied) if is_no_shard(module) else copied
        return made[id(parameter)]

    with _virtual_meshes(list(map(sharding.axes_of, units)), has_streams=has_streams) as (device, meshes):
        copies = _copied(model, units, copy, works, device.recording)
        made.clear()
        # Reversed, because inner units must be sharded before the units around them.
        for module in reversed(units):
            stand_in = copies[id(module)]
            try:
                fully_shard(stand_in, meshes[sharding.axes_of(module)], sharding.placements, mp_policy=sharding.policy)
            except LayoutError as error:
                name = stand_in._path or type(stand_in).__name__
                raise LayoutError(f"unit {name!r}: {error}") from error
            # The value does not matter here, but reduction="invariant" requires one.
            FSDPModule.set_gradient_divide_factor(stand_in, 1.0)  # type: ignore[arg-type]  # it is one now
        stood = tuple(StoodIn.of(unit_of(copies[id(module)]), [module]) for module in units)
        yield Model(device, copies[id(model)], stood)


# ---------------------------------------------------------------------- live models


@contextlib.contextmanager
def live_stand_ins(model: nn.Module, units: Sequence[Unit], *, has_streams: bool | None = None) -> Iterator[Model]:
    """Make stand-ins for a live model; ``units`` are in order of module registration.

    Args:
        has_streams: lanes are streams, as on a GPU. None: as on the model's own device.
    """
    every = [group for unit in units for group in unit.groups]
    modules = {id(unit): [module for each in unit.modules if (module := each()) is not None] for unit in units}
    places = {id(now): (group, index) for group in every for index, now in enumerate(_registered(group))}
    made: dict[tuple[int, int], nn.Parameter] = {}

    def stand_in(group: ParameterGroup, index: int) -> nn.Parameter:
        if (id(group), index) not in made:
            weight = torch.empty(group.plan.shapes[index], dtype=group.spec.dtypes.stepped)
            made[id(group), index] = nn.Parameter(weight, _was_trained(group))
        return made[id(group), index]

    def copy(_: nn.Module, parameter: nn.Parameter) -> nn.Parameter | None:
        return stand_in(*places[id(parameter)]) if id(parameter) in places else None

    def build(unit: Unit) -> Unit:
        """Do what ``fully_shard`` does after planning, with the groups of ``unit``."""
        stood = [copies[id(each)] for each in modules[id(unit)] if id(each) in copies]
        for group in unit.groups:
            for index, name in enumerate(group.parameters):
                if (id(group), index) not in made:
                    # The parameter belongs to a module of the unit that is outside the given model.
                    stood[0]._add(f"elsewhere.{name}", stand_in(group, index), is_used=False)
        owned = collect_parameters(stood, ())
        by_identity = {id(each.parameter): each for each in owned}
        groups = []
        for group in unit.groups:
            spec = replace(
                group.spec, mesh=meshes[_axes(group)], device=torch.device("cpu"), divisor=1.0, is_pinned=False,
                is_meta=False, keeps_gathered=False, fuses_weight_gradients=unit.policy.fuse_weight_gradients,
            )  # fmt: skip
            mine = [by_identity[id(made[id(group), index])] for index in range(len(group.parameters))]
            groups.append(make_param_group(mine, group.plan, spec, "StandIn"))
        built = make_unit("StandIn", stood, groups, unit.policy)
        for mesh in {id(group.spec.mesh): group.spec.mesh for group in groups}.values():
            make_groups(mesh_axes(mesh))
        put_in_place(built, stood, owned, reshard_asked(unit))
        return built

    on_streams = _on_streams(every) if has_streams is None else has_streams
    with _virtual_meshes(list(map(_axes, every)), has_streams=on_streams) as (device, meshes):
        inside = [module for each in modules.values() for module in each]
        copies = _copied(model, inside, copy, {}, device.recording)
        built = [build(unit) for unit in reversed(units)][::-1]
        _settle(units, built)
        yield Model(device, copies[id(model)], tuple(map(StoodIn.of, built, modules.values(), map(_hooks, units))))


def unsharded(model: nn.Module, units: Sequence[Unit]) -> dict[str, nn.Parameter]:
    """Return the parameters of a live model that belong to no unit, by name."""
    owned = {id(each) for unit in units for group in unit.groups for each in _registered(group)}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in owned}


def reshard_asked(unit: Unit) -> bool | int | None:
    """Return the ``reshard_after_forward`` that the user gave to ``fully_shard``."""
    parts = [part.axis.size for group in unit.groups if (part := group.weights.post_forward) is not None]
    return parts[0] if parts else unit.reshard_after_forward


def _registered(group: ParameterGroup) -> list[torch.Tensor | None]:
    """Return the tensors that modules currently hold for a group's parameters, sharded or unsharded."""
    places = (each.param_module_infos[0] for each in group.owned)
    return [place.module._parameters.get(place.attribute) for place in places]


def _on_streams(groups: Sequence[ParameterGroup]) -> bool:
    return any(turns(group.spec.device) is not None for group in groups)


def _axes(group: ParameterGroup) -> Axes:
    return tuple(Axis(axis.name, axis.size, axis.rank) for axis in group.main_weight.axes)


def _hooks(unit: Unit) -> tuple[str, ...]:
    return tuple(each.name for group in unit.groups for each in group.owned if each.extension is not None)


def _was_trained(group: ParameterGroup) -> bool:
    # Read from the parameters, because the group only notices a changed flag in its next forward.
    return group.gradient_buffer is not None or any(each.requires_grad for each in group.parameters.values())


def _settle(units: Sequence[Unit], built: Sequence[Unit]) -> None:
    """Copy settings that users made on units and parameters after ``fully_shard``."""
    references = {id(unit): stood.reference for unit, stood in zip(units, built, strict=True)}
    for unit, stood in zip(units, built, strict=True):
        stood.reshard_after_backward = unit.reshard_after_backward
        stood.unshards_in_backward = unit.unshards_in_backward
        for part in (module() for module in stood.modules):
            assert isinstance(part, StandIn)
            part._reads = unit.unshards_in_backward
        for ahead in ("forward_prefetch", "backward_prefetch"):
            setattr(stood, ahead, [references[id(each())] for each in getattr(unit, ahead) if id(each()) in references])
        if unit.root.backward.max_packed_buffers:
            stood.root.backward.max_packed_buffers = unit.root.backward.max_packed_buffers
        stood.root.prefetch_bytes = unit.root.prefetch_bytes
        for group, copy in zip(unit.groups, stood.groups, strict=True):
            _settle_group(group, copy)
        if unit.slots.sizing is not None:
            # Stand-ins have no communicator and no GPU; slots take as many bytes from the device's allocator.
            use_slots({stood: replace(unit.slots, source="device")})


def _settle_group(group: ParameterGroup, copy: ParameterGroup) -> None:
    for each, parameter in zip(group.parameters.values(), copy.parameters.values(), strict=True):
        if _was_trained(group) and not each.requires_grad:
            parameter.requires_grad_(False)
    holds = (
        group.gradient_buffer is not None and not group.requires_grad and group.gradient_buffer.main_grad.is_allocated
    )
    if holds and copy.gradient_buffer is not None:
        copy.gradient_buffer.keep(True)
    if group.spec.keeps_gathered:
        keep_gathered(copy, keeps=True, is_sharded=True)
