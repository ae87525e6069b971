"""Modules inside of a unit by whose tensors backward may come to it first: those that a user has hooked, or written.

What a user's hook sees of a module, its inputs and outputs, is watched as the unit's own outputs are. What none of this
sees, the versions of released weights refuse (docs/design/order.md, "Whatever leads backward into a unit").
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.runtime.step.fused_linear import has_transforms
from megatron_fsdp.runtime.step.unit import Unit

__all__ = ["keepers", "readers_of", "watch_hooked"]


def readers_of(owned: Iterable[OwnedParameter], unit: Unit) -> list[weakref.ref[nn.Module]]:
    """Return the modules inside of a unit that have weights of it, without its own."""
    outermost = {id(reference()) for reference in unit.modules}
    modules = {id(info.module): info.module for parameter in owned for info in parameter.param_module_infos}
    return [weakref.ref(module) for key, module in modules.items() if key not in outermost]


def keepers(unit: Unit, module: nn.Module) -> list[nn.Module]:
    """Return a module of the unit, and those in it, not PyTorch's own, that have weights and may keep tensors."""
    inner = {id(child) for child in module.modules()}
    found = [each for reference in unit.readers if (each := reference()) is not None and id(each) in inner]
    return [module, *(each for each in found if not type(each).__module__.startswith("torch.nn."))]


def watch_hooked(units: Sequence[Unit]) -> None:
    """Watch what goes through modules inside of units on which there are forward hooks.

    Args:
        units: those around others before these.
    """
    owners = {
        id(child): (unit, child)
        for unit in units
        for reference in unit.modules
        if (module := reference()) is not None
        for child in module.modules()
    }
    for unit, module in owners.values():
        hooks = module._forward_hooks.values()
        if hooks and unit.releases_weights and "_fsdp_unit" not in vars(module) and _watch not in map(_function, hooks):
            module.register_forward_hook(partial(_watch, unit.reference))


def _function(hook: Any) -> Any:
    return getattr(hook, "func", hook)


def _watch(reference: weakref.ref[Unit], module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    unit = reference()
    if unit is not None and not (torch.compiler.is_dynamo_compiling() or has_transforms()):
        unit.schedule.watch(unit, (args, output))
