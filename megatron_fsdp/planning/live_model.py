"""Inspection: what a live sharded model was built from."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

from torch import nn

from megatron_fsdp.errors import StateError
from megatron_fsdp.planning.model_spec import AxisFacts, Call, GroupFacts, ModelFacts, UnitFacts, Use, reshard_reason
from megatron_fsdp.runtime.step.cuda_lane import turns
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.step.unit import Unit, units_below
from megatron_fsdp.runtime.weights.extension_hooks import ExtensionWeights

__all__ = ["Owners", "forward_calls", "read_facts"]

# id of a registered parameter -> its use
Owners = Mapping[int, Use]


def read_facts(model: nn.Module) -> ModelFacts:
    """Return the facts of every unit in ``model``, and the forward pass in the order in which modules are registered.

    Raises:
        StateError: no module of ``model`` is sharded.
    """
    units = list(units_below(model))
    if not units:
        raise StateError(
            f"{type(model).__name__} holds no sharded module; call fully_shard on its blocks and on it first"
        )
    owners = {
        id(_registered(unit, name)): Use(position, number, index)
        for position, unit in enumerate(units)
        for number, group in enumerate(unit.groups)
        for index, name in enumerate(group.parameters)
    }
    places: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), ([], parameter))[0].append(name)
    ties: dict[int, list[tuple[str, ...]]] = {}
    for key, (names, _) in places.items():
        if len(names) > 1 and key in owners:
            ties.setdefault(owners[key].unit, []).append(tuple(names))
    paths = {id(module): path for path, module in model.named_modules()}
    positions = {id(unit): position for position, unit in enumerate(units)}
    # Equal groups are one object, as what is alike runs once.
    known: dict[GroupFacts, GroupFacts] = {}
    facts = tuple(
        _unit_facts(unit, positions, paths, tuple(ties.get(position, ())), known) for position, unit in enumerate(units)
    )
    modules = {id(module): position for position, unit in enumerate(units) for module in _modules(unit)}
    devices = {group.spec.device for unit in units for group in unit.groups}
    return ModelFacts(
        facts,
        forward_calls(model, modules, owners),
        tuple(names[0] for key, (names, _) in places.items() if key not in owners),
        sum(parameter.nbytes for key, (_, parameter) in places.items() if key not in owners),
        any(turns(device) is not None for device in devices),
    )


def forward_calls(model: nn.Module, units: Mapping[int, int], owners: Owners) -> Call:
    """Return one pass over ``model``, each module once, in the order in which modules are registered.

    Args:
        units: the position of its unit, by the id of a unit's module. owners: of every sharded parameter.
    """
    seen: set[int] = set()

    def steps(module: nn.Module) -> list[Use | Call]:
        seen.add(id(module))
        # A tied parameter gets its gradient when backward reaches the first place that used it.
        parameters = [each for each in module._parameters.values() if each is not None and id(each) not in seen]
        seen.update(map(id, parameters))
        found: list[Use | Call] = [owners[id(each)] for each in parameters if id(each) in owners]
        for child in module.children():
            if id(child) in seen:
                continue
            inner = steps(child)
            found += [Call(units[id(child)], tuple(inner))] if id(child) in units else inner
        return found

    return Call(units.get(id(model), -1), tuple(steps(model)))


def _modules(unit: Unit) -> list[nn.Module]:
    return [module for reference in unit.modules if (module := reference()) is not None]


def _registered(unit: Unit, name: str) -> nn.Parameter:
    """Return what is registered now under a parameter's name in its unit: its sharded or its unsharded one."""
    position, _, path = name.partition(".") if len(unit.modules) > 1 else ("0", "", name)
    module = unit.modules[int(position)]()
    assert module is not None
    return module.get_parameter(path)


def _unit_facts(
    unit: Unit,
    positions: Mapping[int, int],
    paths: Mapping[int, str],
    ties: tuple[tuple[str, ...], ...],
    known: dict[GroupFacts, GroupFacts],
) -> UnitFacts:
    modules = _modules(unit)
    names = tuple(type(module).__name__.removeprefix("FSDP") for module in modules)

    def ahead(references: Sequence[weakref.ref[Unit]]) -> tuple[int, ...]:
        return tuple(positions[key] for reference in references if (key := id(reference())) in positions)

    groups = tuple(known.setdefault(found, found) for found in map(_group_facts, unit.groups))
    parts = [part.axis.size for group in unit.groups if (part := group.weights.post_forward) is not None]
    asked: bool | int | None = parts[0] if parts else unit.reshard_after_forward
    is_root = unit is unit.schedule.root_ref()
    return UnitFacts(
        next((paths[id(module)] for module in modules if paths.get(id(module))), names[0]),
        groups,
        unit.policy,
        asked,
        unit.reshard_after_backward,
        unit.unshards_in_backward,
        unit.backward.max_packed_buffers,
        ahead(unit.forward_prefetch),
        ahead(unit.backward_prefetch),
        unit.slots,
        names,
        reshard_reason(groups, asked, is_root=is_root),
        ties,
        is_root,
    )


def _group_facts(group: ParameterGroup) -> GroupFacts:
    axes = tuple(AxisFacts(axis.name, axis.size, axis.rank) for axis in group.main_weight.axes)
    # The parameters' own flags: the group takes notice of a change in the next forward.
    frozen = frozenset(index for index, each in enumerate(group.parameters.values()) if not each.requires_grad)
    spec = group.spec
    requires_grad = group.gradients is not None or len(frozen) < len(group.parameters)
    gradients = group.gradients
    # With slots, and in CPU memory, the engine holds them by itself.
    holds = gradients is not None and not group.requires_grad and gradients.main_grad.is_allocated
    return GroupFacts(
        tuple(group.parameters), group.plan, axes, spec.placements, spec.dtypes, requires_grad,
        frozen if requires_grad else frozenset(), spec.is_offloaded, spec.keeps_gathered, holds,
        isinstance(group.weights, ExtensionWeights),
    )  # fmt: skip
