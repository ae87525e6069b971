"""Detect parameters that were added to a sharded module and belong to no unit."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain
from typing import Any

from torch import nn

from megatron_fsdp.engine.hooks import StepHooks
from megatron_fsdp.engine.module_tree import ModuleTree
from megatron_fsdp.engine.unit import Call, Unit, units_below
from megatron_fsdp.errors import StateError

__all__ = ["AddedParams", "make_tree"]

_values: Callable[[dict[str, Any]], Iterable[Any]] = dict.values


def make_tree(module: nn.Module, ignored: Container[int]) -> ModuleTree:
    """Return the tree below a module of a unit, which owns it; it refers to the dictionaries below, not to modules.

    Args:
        ignored: ids of the parameters that the caller asked to leave alone.
    """
    return ModuleTree(
        {
            (id(child._parameters), name): child._parameters
            for child in module.modules()
            for name, parameter in child._parameters.items()
            if id(parameter) in ignored
        }
    )


class AddedParams(StepHooks[Unit, Call]):
    """Looks for parameters that were added since the last forward of the root."""

    def on_root_forward(self, unit: Unit, module: nn.Module) -> None:
        """Look through everything below the module, if modules or parameters were added there.

        Raises:
            StateError: a trained parameter belongs to no unit.
        """
        tree = unit.trees[id(module)]
        if tree.is_changed():
            _walk(tree, module, list(units_below(module)))


def _walk(tree: ModuleTree, module: nn.Module, units: Sequence[Unit]) -> None:
    """Search the submodules for parameters without a unit, and record the tree that was checked.

    Raises:
        StateError: one of them is trained.
    """
    infos = [group.fsdp_params.module_infos for unit in units for group in unit.groups]
    owned = {(id(registry), name) for each in infos for registry, name, *_ in each.places}
    known = [other.ignored for unit in units for other in unit.trees.values()]
    below = dict(module.named_modules())
    frozen = []
    for path, child in below.items():
        for name, parameter in child._parameters.items():
            place = (id(child._parameters), name)
            if parameter is None or place in owned or any(place in ignored for ignored in known):
                continue
            if parameter.requires_grad:
                full_name = f"{path}.{name}" if path else name
                raise StateError(
                    f"{type(module).__name__}: parameter {full_name!r} was added after fully_shard and requires a "
                    "gradient, but no unit owns it: its gradients would stay on this rank. fix: add modules and "
                    "parameters before fully_shard; or call fully_shard on the new module before its parameters "
                    "go to an optimizer; or freeze it (requires_grad_(False)); or name it in ignored_params, and "
                    "reduce its gradients yourself"
                )
            frozen.append((child._parameters, name))
    tree.frozen = frozen
    tree.modules = [child._modules for child in below.values()]
    tree.parameters = [child._parameters for child in below.values()]
    tree.children = list(chain.from_iterable(map(_values, tree.modules)))
    tree.absent = [parameter is None for parameter in chain.from_iterable(map(_values, tree.parameters))]
