"""Where parameters are registered: found when a unit is made, taken over, hidden, and looked through for others."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.runtime.step.fsdp_params import ParamModuleInfos, Place

__all__ = [
    "ReplacedParam", "hide", "make_module_infos", "register", "registered", "replaced_in", "unhide",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReplacedParam:
    """Something that is registered where a parameter was.

    Attributes:
        index: of the parameter in the group. value: what is there; None for nothing.
    """

    index: int
    value: torch.Tensor | None


def make_module_infos(
    owned: Sequence[OwnedParameter], sharded: Sequence[nn.Parameter], unsharded: Sequence[nn.Parameter]
) -> ParamModuleInfos:
    """Return the places of parameters, and what is to be registered there."""
    places: list[Place] = []
    indices: list[int] = []
    modules: list[weakref.ref[nn.Module] | None] = []
    for index, (parameter, resting, used) in enumerate(zip(owned, sharded, unsharded, strict=True)):
        for info in parameter.param_module_infos:
            places.append((info.module._parameters, info.attribute, resting, used))
            indices.append(index)
            is_plain = type(info.module).__setattr__ is nn.Module.__setattr__
            modules.append(None if is_plain else weakref.ref(info.module))
    return ParamModuleInfos(places, indices, modules)


def registered(infos: ParamModuleInfos, index: int) -> torch.Tensor | None:
    """Return what is registered now where parameter ``index`` was first found."""
    registry, attribute, *_ = infos.places[infos.indices.index(index)]
    return registry.get(attribute)


def replaced_in(infos: ParamModuleInfos) -> list[ReplacedParam]:
    """Return what is registered in the places of parameters beside these."""
    return [
        ReplacedParam(infos.indices[position], registry.get(attribute))
        for position, (registry, attribute, resting, used) in enumerate(infos.places)
        if (found := registry.get(attribute)) is not resting and found is not used
    ]


def register(infos: ParamModuleInfos) -> None:
    """Register the sharded parameters, whatever was there."""
    for registry, attribute, resting, _ in infos.plain:
        registry[attribute] = resting
    for module, attribute, resting, _ in infos.assigned:
        setattr(module(), attribute, resting)
    infos.shows_gathered = False


def hide(infos: ParamModuleInfos) -> list[Place]:
    """Register nothing in the places of the sharded parameters; return what ``unhide`` takes to undo it."""
    hidden = [place for place in infos.places if place[0].get(place[1]) is place[2]]
    _assign(infos, is_shown=False)
    for registry, attribute, *_ in hidden:
        registry[attribute] = None
    return hidden


def unhide(infos: ParamModuleInfos, hidden: Sequence[Place]) -> None:
    """Register again what ``hide`` took away, where nothing else is registered."""
    for registry, attribute, resting, _ in hidden:
        if registry.get(attribute) is None:
            registry[attribute] = resting
    _assign(infos, is_shown=True)


def _assign(infos: ParamModuleInfos, *, is_shown: bool) -> None:
    """Let modules with a ``__setattr__`` of their own see that their sharded parameters come or go."""
    for reference, attribute, resting, _ in infos.assigned:
        module = reference()
        if module is not None and module._parameters.get(attribute) is resting:
            setattr(module, attribute, resting if is_shown else None)
