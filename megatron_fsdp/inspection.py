"""Inspection: read the facts of a live sharded model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from megatron_fsdp.errors import StateError
from megatron_fsdp.facts import AxisFacts, GroupFacts, ModelFacts, UnitFacts, Visit, VisitKind
from megatron_fsdp.module import FsdpModule, units_below
from megatron_fsdp.parameter_group import ParameterGroup
from megatron_fsdp.schedule import Schedule
from megatron_fsdp.unit import Unit

__all__ = ["read_facts"]

# id of a registered parameter -> (position of its unit, of its group)
_Owners = Mapping[int, tuple[int, int]]


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
    return ModelFacts(tuple(facts), tuple(_Walk(model, units, owners).visits(model)), tuple(outside), outside_bytes)


def _registered(unit: Unit, name: str) -> nn.Parameter:
    """Return what is registered now under a parameter's name in its unit: its sharded or its gathered face."""
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

    return UnitFacts(
        name=unit.name,
        groups=tuple(_group_facts(group) for group in unit.groups),
        schedule=schedule,
        reshards_after_forward=_schedule(unit).reshards_after_forward(unit),
        reshards_after_backward=unit.reshard_after_backward,
        forward_prefetch=ahead(unit.forward_prefetch),
        backward_prefetch=ahead(unit.backward_prefetch),
        modules=tuple(type(module).__name__.removeprefix("FSDP") for module in modules),
        reason=_reason(unit),
    )


def _schedule(unit: Unit) -> Schedule:
    assert isinstance(unit.schedule, Schedule)
    return unit.schedule


def _reason(unit: Unit) -> str:
    if not unit.groups:
        return "nothing to release: it has no parameters of its own"
    if all(group.rests_whole for group in unit.groups):
        return "nothing to release: its weights rest whole on every rank"
    if unit.reshard_after_forward is not None:
        action = "released" if unit.reshard_after_forward else "kept"
        return f"{action} after forward: reshard_after_forward={unit.reshard_after_forward}"
    if unit is _schedule(unit).root:
        return "kept after forward: it is the root"
    return "released after forward: the default below the root"


def _group_facts(group: ParameterGroup) -> GroupFacts:
    axes = tuple(AxisFacts(axis.name, axis.size, axis.rank) for axis in group.main_weight.axes)
    return GroupFacts(
        tuple(group.parameters), group.plan, axes, group.spec.placements, group.spec.dtypes, group.requires_grad
    )


class _Walk:
    """A pass over the modules in registration order, each once."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], owners: _Owners) -> None:
        below = {id(module) for module in model.modules()}
        self._positions = {id(unit): position for position, unit in enumerate(units)}
        self._pending = [{id(reference()) for reference in unit.modules} & below for unit in units]
        self._is_open = [False] * len(units)
        self._owners = owners
        self._seen: set[int] = set()

    def visits(self, module: nn.Module) -> Iterator[Visit]:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        position = self._positions[id(module._fsdp_unit)] if isinstance(module, FsdpModule) else -1
        if position >= 0 and not self._is_open[position]:
            self._is_open[position] = True
            yield Visit(VisitKind.OPEN, position)
        yield from self._uses(module._parameters.values())
        for child in module.children():
            yield from self.visits(child)
        if position >= 0:
            self._pending[position].discard(id(module))
            if not self._pending[position]:
                yield Visit(VisitKind.CLOSE, position)

    def _uses(self, parameters: Iterable[torch.Tensor | None]) -> Iterator[Visit]:
        for parameter in parameters:
            if parameter is not None and id(parameter) in self._owners and id(parameter) not in self._seen:
                # A tied parameter gets its gradient when backward reaches the first place that used it.
                self._seen.add(id(parameter))
                yield Visit(VisitKind.USE, *self._owners[id(parameter)])
