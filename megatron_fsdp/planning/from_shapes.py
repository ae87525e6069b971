"""Facts from shapes alone: no process group, no device, no weights.

Two sources, the units of a catalog architecture and a module on the meta device, end in the ``ModelFacts`` that a live
model would give, so the report and the forecast are the same code for all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from dbuffer import Plan
from dbuffer.errors import LayoutError
from megatron_fsdp.build.grouping import GroupKey, grouped
from megatron_fsdp.build.no_shard import is_no_shard
from megatron_fsdp.build.packed_layout import is_packed, layout_regions
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.planning.catalog import Architecture, UnitShapes
from megatron_fsdp.planning.live_model import forward_calls
from megatron_fsdp.planning.model_spec import AxisFacts, Call, GroupFacts, ModelFacts, UnitFacts, Use, reshard_reason
from megatron_fsdp.policy.precision import GroupDtypes, MixedPrecisionPolicy
from megatron_fsdp.policy.strategy import Placements

__all__ = [
    "ShapedParameter",
    "Sharding",
    "architecture_facts",
    "build_on_meta",
    "module_facts",
    "repeated_blocks",
    "unit_groups",
]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How every unit is sharded: the mesh as one rank sees it, the strategy and the dtypes.

    Attributes:
        expert_axes: of routed experts, which fewer ranks may hold; None: as all else.
    """

    axes: tuple[AxisFacts, ...]
    placements: Placements
    policy: MixedPrecisionPolicy
    expert_axes: tuple[AxisFacts, ...] | None = None

    @property
    def of_experts(self) -> Sharding:
        """How routed experts are sharded."""
        return self if self.expert_axes is None else replace(self, axes=self.expert_axes, expert_axes=None)

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(axis.size for axis in self.axes)


@dataclass(frozen=True, slots=True)
class ShapedParameter:
    """A parameter without values; ``dtype`` is its own, before any policy; ``is_replicated``: ``fsdp_no_shard``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True
    is_replicated: bool = False


def unit_groups(name: str, parameters: Sequence[ShapedParameter], sharding: Sharding) -> tuple[GroupFacts, ...]:
    """Return the groups that ``fully_shard`` would make of a unit's parameters, in its order.

    Raises:
        LayoutError: the planner refuses the padding of the unit called ``name``.
    """
    try:
        return _unit_groups(parameters, sharding)
    except LayoutError as error:
        raise LayoutError(f"unit {name!r}: {error}") from error


def _unit_groups(parameters: Sequence[ShapedParameter], sharding: Sharding) -> tuple[GroupFacts, ...]:
    groups = []
    for (dtype, requires_grad, is_replicated, *_), alike in grouped(parameters, _key):
        placements = sharding.placements.no_shard_on_all_axes() if is_replicated else sharding.placements
        num_shards = placements.num_shards([axis.size for axis in sharding.axes])
        usual = sharding.policy.dtypes_for(dtype, requires_grad=requires_grad)
        gather = sharding.policy.gather_dtype if dtype.is_floating_point and not is_replicated else None
        packed = [parameter for parameter in alike if is_packed(parameter.shape, gather)]
        others = [parameter for parameter in alike if not is_packed(parameter.shape, gather)]
        for members, dtypes in ((packed, replace(usual, gather=gather)), (others, usual)):
            shapes = tuple(parameter.shape for parameter in members)
            for indices, plan in _regions(shapes, num_shards, dtypes) if members else ():
                names = tuple(members[index].name for index in indices)
                groups.append(GroupFacts(names, plan, sharding.axes, placements, dtypes, requires_grad))
    return tuple(groups)


@functools.lru_cache(maxsize=4096)
def _regions(
    shapes: tuple[tuple[int, ...], ...], num_shards: int, dtypes: GroupDtypes
) -> tuple[tuple[tuple[int, ...], Plan], ...]:
    # Equal units of a model, and the many settings that a search tries, share few layouts.
    return tuple((region.indices, region.plan) for region in layout_regions(shapes, num_shards, dtypes))


def _key(parameter: ShapedParameter) -> GroupKey:
    return GroupKey(parameter.dtype, parameter.requires_grad, parameter.is_replicated)


# ---------------------------------------------------------------------- a catalog architecture


_ENDS = ("embedding", "head")


def architecture_facts(architecture: Architecture, sharding: Sharding, first_layer: int = 0) -> ModelFacts:
    """Return the facts of a catalog architecture: its units inside a root that owns nothing.

    Routed experts are a unit inside of their layer. Where the output matrix is tied, the unit of the embedding holds
    the last norm too, so its call ends with the model's.

    Args:
        first_layer: the number in the whole model of the first layer here.
    """
    root = UnitFacts(
        "model", (), sharding.policy, modules=("model",), reason=reshard_reason((), None, is_root=True), is_root=True
    )
    units = [root]

    def add(shapes: UnitShapes, name: str) -> tuple[int, list[Use], list[Use]]:
        """Add a unit; return its position, and its uses before and after what runs inside of it."""
        groups = _shared_groups(shapes, sharding.of_experts if shapes.name == "experts" else sharding)
        reason = reshard_reason(groups, None, is_root=False)
        units.append(UnitFacts(name, groups, sharding.policy, modules=(shapes.name,), reason=reason))
        position = len(units) - 1
        places = {
            each: (number, index) for number, group in enumerate(groups) for index, each in enumerate(group.names)
        }
        uses = [Use(position, *places[each]) for each, _ in shapes.parameters]
        # Registration order: norms come after the modules that hold nested units, in layers and in whole models.
        inner = max((at for at, (each, _) in enumerate(shapes.parameters) if not _is_norm(each)), default=-1)
        return position, uses[: inner + 1], uses[inner + 1 :]

    calls: list[Call] = []
    around: tuple[int, list[Use], list[Use]] | None = None
    layer = first_layer
    for shapes, nested in _nested(architecture.units):
        for _ in range(shapes.count):
            is_layer = shapes.name not in _ENDS
            name = f"{shapes.name}.{layer}" if is_layer else shapes.name
            layer += is_layer
            position, first, last = add(shapes, name)
            if architecture.tied and shapes is architecture.units[0]:
                around = position, first, last
                continue
            steps: list[Use | Call] = [*first]
            if nested is not None:
                inner, uses, others = add(nested, f"{name}.{nested.name}")
                steps.append(Call(inner, (*uses, *others)))
            calls.append(Call(position, (*steps, *last)))
    if around is not None:
        position, first, last = around
        calls = [Call(position, (*first, *calls, *last))]
    return ModelFacts(tuple(units), Call(0, tuple(calls)))


def _nested(units: Sequence[UnitShapes]) -> Iterator[tuple[UnitShapes, UnitShapes | None]]:
    """Yield each kind of unit with the one inside of it: routed experts follow their layer, with the same count."""
    for position, unit in enumerate(units):
        following = units[position + 1] if position + 1 < len(units) else None
        if unit.name != "experts":
            yield unit, following if following is not None and following.name == "experts" else None


def _is_norm(name: str) -> bool:
    return "norm" in name or name.startswith("ln_")


@functools.lru_cache(maxsize=1024)
def _shared_groups(shapes: UnitShapes, sharding: Sharding) -> tuple[GroupFacts, ...]:
    # Equal units of a model have the very same groups, so what is worked out for one is known for all.
    return unit_groups(shapes.name, [ShapedParameter(name, shape) for name, shape in shapes.parameters], sharding)


# ---------------------------------------------------------------------- a module on the meta device


def repeated_blocks(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules of every ``ModuleList`` of two or more that lies in no other one: a model's usual units."""
    lists: list[tuple[str, nn.ModuleList]] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer, _ in lists)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not is_inside:
            lists.append((path, module))
    return tuple(block for _, blocks in lists for block in blocks)


def module_facts(model: nn.Module, blocks: Sequence[nn.Module], sharding: Sharding) -> ModelFacts:
    """Return the facts that ``model`` would have after ``fully_shard`` of each block and then of itself.

    Args:
        model: its parameters may be on any device, meta included; nothing is done to it.
        blocks: modules below ``model``; the root owns what no block does.
    Raises:
        ConfigError: a parameter without dimensions, or one that several units would own.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    chosen = {id(block) for block in blocks if not is_no_shard(block)}
    modules = [model, *(module for path, module in model.named_modules() if id(module) in chosen and path)]
    members = [_own_parameters(module, chosen) for module in modules]
    _check_owners([paths[id(module)] or type(model).__name__ for module in modules], members)
    replicated = {id(each) for module in model.modules() for each in _replicated_parameters(module)}
    units: list[UnitFacts] = []
    owners: dict[int, Use] = {}
    known: dict[tuple[ShapedParameter, ...], tuple[GroupFacts, ...]] = {}
    for position, (module, parameters) in enumerate(zip(modules, members, strict=True)):
        shaped = tuple(_shaped(name, parameter, id(parameter) in replicated) for name, parameter in parameters.items())
        name = paths[id(module)] or type(module).__name__
        # Equal blocks of a model have the very same groups, so what is worked out for one is known for all.
        if shaped not in known:
            known[shaped] = unit_groups(name, shaped, sharding)
        groups = known[shaped]
        for number, group in enumerate(groups):
            owners.update({id(parameters[each]): Use(position, number, at) for at, each in enumerate(group.names)})
        is_root = position == 0
        units.append(
            UnitFacts(
                name=name,
                groups=groups,
                policy=sharding.policy,
                modules=(type(module).__name__,),
                reason=reshard_reason(groups, None, is_root=is_root),
                is_root=is_root,
                ties=_ties(model, parameters.values()),
            )
        )
    return ModelFacts(tuple(units), forward_calls(model, {id(module): at for at, module in enumerate(modules)}, owners))


def _own_parameters(unit: nn.Module, blocks: set[int]) -> dict[str, nn.Parameter]:
    """Return the parameters of a unit by their first name below it, without those of blocks inside of it."""
    found: dict[int, tuple[str, nn.Parameter]] = {}

    def collect(module: nn.Module, prefix: str) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (prefix + name, parameter))
        for name, child in module.named_children():
            if id(child) not in blocks:
                collect(child, f"{prefix}{name}.")

    collect(unit, "")
    return dict(found.values())


def _check_owners(names: Sequence[str], members: Sequence[dict[str, nn.Parameter]]) -> None:
    owners: dict[int, tuple[str, str]] = {}
    for unit, parameters in zip(names, members, strict=True):
        for name, parameter in parameters.items():
            if not parameter.ndim:
                raise ConfigError(
                    f"unit {unit!r}: parameter {name!r} has no dimensions, so there are no rows to shard; make it 1-d"
                )
            other = owners.setdefault(id(parameter), (unit, name))
            if other != (unit, name):
                raise ConfigError(
                    f"parameter {name!r} of unit {unit!r} is the same tensor as {other[1]!r} of unit {other[0]!r}; "
                    "tied parameters need one unit: leave both modules to the root, with --unit-class naming the others"
                )


def _replicated_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    for parameter in module._parameters.values():
        if parameter is not None and (is_no_shard(module) or is_no_shard(parameter)):
            yield parameter


def _shaped(name: str, parameter: nn.Parameter, is_replicated: bool) -> ShapedParameter:
    return ShapedParameter(name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad, is_replicated)


def _ties(model: nn.Module, owned: Iterable[nn.Parameter]) -> tuple[tuple[str, ...], ...]:
    wanted: dict[int, list[str]] = {id(parameter): [] for parameter in owned}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in wanted:
            wanted[id(parameter)].append(name)
    return tuple(tuple(names) for names in wanted.values() if len(names) > 1)


def build_on_meta(factory: Callable[[], object]) -> nn.Module:
    """Return the module that ``factory`` makes, with all parameters on the meta device: no memory is taken.

    Raises:
        ConfigError: it returns something else than a module, or fails on the meta device.
    """
    try:
        with torch.device("meta"):
            model = factory()
    except Exception as error:
        raise ConfigError(
            f"the factory failed on the meta device: {type(error).__name__}: {error}. Parameters have no values there: "
            "build modules only, and leave initialisation that reads values to reset_parameters"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the factory returned {type(model).__name__}, wanted the nn.Module to plan for")
    return model
