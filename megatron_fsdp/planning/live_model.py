"""Inspection: read the facts of a live sharded model."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from megatron_fsdp.errors import StateError
from megatron_fsdp.planning.model_spec import AxisFacts, GroupFacts, ModelFacts, UnitFacts, reshard_reason
from megatron_fsdp.planning.module_order import walk_modules
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.step.unit import Unit, units_below
from megatron_fsdp.runtime.weights.extension_hooks import ExtensionWeights

__all__ = ["read_facts"]


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
    owners: dict[int, tuple[int, int]] = {}
    for position, unit in enumerate(units):
        for number, group in enumerate(unit.groups):
            for name in group.parameters:
                owners[id(_registered(unit, name))] = (position, number)
    places = _places(model)
    outside = [names[0] for key, (names, _) in places.items() if key not in owners]
    outside_bytes = sum(parameter.nbytes for key, (_, parameter) in places.items() if key not in owners)
    ties: dict[int, list[tuple[str, ...]]] = {}
    for key, (names, _) in places.items():
        if len(names) > 1 and key in owners:
            ties.setdefault(owners[key][0], []).append(tuple(names))
    paths = {id(module): path for path, module in model.named_modules()}
    positions = {id(unit): position for position, unit in enumerate(units)}
    roots = {key: root for root, key in enumerate(dict.fromkeys(id(unit.schedule) for unit in units))}
    facts = []
    for position, unit in enumerate(units):
        inner = _unit_facts(unit, positions, roots[id(unit.schedule)])
        path = next((paths[id(reference())] for reference in unit.modules if id(reference()) in paths), "")
        facts.append(replace(inner, name=path or inner.modules[0], ties=tuple(ties.get(position, ()))))
    modules = [[module for reference in unit.modules if (module := reference()) is not None] for unit in units]
    return ModelFacts(tuple(facts), walk_modules(model, modules, owners), tuple(outside), outside_bytes)


def _registered(unit: Unit, name: str) -> nn.Parameter:
    """Return what is registered now under a parameter's name in its unit: its sharded or its unsharded one."""
    position, _, path = name.partition(".") if len(unit.modules) > 1 else ("0", "", name)
    module = unit.modules[int(position)]()
    assert module is not None
    return module.get_parameter(path)


def _places(model: nn.Module) -> dict[int, tuple[list[str], nn.Parameter]]:
    """Return each parameter with all names it has below ``model``, by its id."""
    places: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), ([], parameter))[0].append(name)
    return places


def _unit_facts(unit: Unit, positions: Mapping[int, int], schedule: int) -> UnitFacts:
    modules = [module for reference in unit.modules if (module := reference()) is not None]

    def ahead(references: Sequence[weakref.ref[Unit]]) -> tuple[int, ...]:
        return tuple(positions[key] for reference in references if (key := id(reference())) in positions)

    groups = tuple(_group_facts(group) for group in unit.groups)
    asked = next((group.part_of for group in groups if group.part_of), unit.reshard_after_forward)
    is_root = unit is unit.schedule.root_ref()
    return UnitFacts(
        name=unit.name,
        groups=groups,
        schedule=schedule,
        reshards_after_forward=unit.schedule.reshards_after_forward(unit),
        reshards_after_backward=unit.reshard_after_backward,
        lingers=unit.reshard_after_forward is None and not is_root,
        unshards_in_backward=unit.unshards_in_backward,
        max_packed_buffers=unit.backward.max_packed_buffers,
        forward_prefetch=ahead(unit.forward_prefetch),
        backward_prefetch=ahead(unit.backward_prefetch),
        modules=tuple(type(module).__name__.removeprefix("FSDP") for module in modules),
        reason=reshard_reason(groups, asked, is_root=is_root),
        is_root=is_root,
    )


def _hooks_bytes(group: ParameterGroup) -> int:
    weights = group.weights
    return weights.gathered.nbytes if isinstance(weights, ExtensionWeights) else 0


def _holds_gradients(group: ParameterGroup, *, is_trained: bool) -> bool:
    if group.gradients is None:
        return False
    return group.gradients.binding.keeps or (not is_trained and group.gradients.main_grad.is_allocated)


def _group_facts(group: ParameterGroup) -> GroupFacts:
    axes = tuple(AxisFacts(axis.name, axis.size, axis.rank) for axis in group.main_weight.axes)
    # The parameters' own flags: the group takes notice of a change in the next forward.
    frozen = frozenset(index for index, each in enumerate(group.parameters.values()) if not each.requires_grad)
    is_trained = len(frozen) < len(group.parameters)
    part = group.weights.post_forward
    return GroupFacts(
        tuple(group.parameters),
        group.plan,
        axes,
        group.spec.placements,
        group.spec.dtypes,
        requires_grad=is_trained,
        frozen=frozen if is_trained else frozenset(),
        holds_gradients=_holds_gradients(group, is_trained=is_trained),
        hooks_bytes=_hooks_bytes(group),
        is_offloaded=group.spec.is_offloaded,
        keeps_gathered=group.spec.keeps_gathered,
        part_of=0 if part is None else part.axis.size,
        weight_slot=None if group.rests_whole else group.gathered.storage.slot,
        gradient_slot=None if group.gradients is None else group.gradients.packed.storage.slot,
    )
