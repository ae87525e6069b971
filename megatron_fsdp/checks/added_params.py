"""Detect parameters that were added to a sharded module and belong to no unit."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain, repeat
from typing import Any, NoReturn

from torch import nn

from megatron_fsdp.engine.hooks import StepHooks
from megatron_fsdp.engine.unit import Call, Unit, units_below
from megatron_fsdp.errors import StateError

__all__ = ["AddedParams", "watch_tree"]

_values: Callable[[dict[str, Any]], Iterable[Any]] = dict.values


class AddedParams(StepHooks[Unit, Call]):
    """Looks for parameters that were added since the last forward of the root."""

    def on_root_forward(self, unit: Unit, module: nn.Module) -> None:
        """Look through everything below the module, if modules or parameters were added there.

        Raises:
            StateError: a trained parameter belongs to no unit.
        """
        tree = _tree_of(module)
        if tree.is_changed():
            tree.look_through(module, list(units_below(module)))


def watch_tree(module: nn.Module, ignored: Container[int]) -> None:
    """Record what is below a module of a unit, for ``AddedParams``.

    Args:
        ignored: ids of the parameters that the caller asked to leave alone.
    """
    vars(module)["_fsdp_tree"] = _ModuleTree(module, ignored)


def _tree_of(module: nn.Module) -> _ModuleTree:
    tree: _ModuleTree = vars(module)["_fsdp_tree"]
    return tree


class _ModuleTree:
    """The modules and parameters below one module of a unit, as they were at the last look.

    It refers to dictionaries, not to modules.

    Attributes:
        ignored: the places of ``ignored_params``, each the identity of a dictionary and a name.
    """

    def __init__(self, module: nn.Module, ignored: Container[int]) -> None:
        self.ignored = {
            (id(child._parameters), name): child._parameters
            for child in module.modules()
            for name, parameter in child._parameters.items()
            if id(parameter) in ignored
        }
        # The ``_modules`` and ``_parameters`` dictionaries of all modules below.
        self._modules: list[dict[str, nn.Module | None]] = []
        self._parameters: list[dict[str, nn.Parameter | None]] = []
        # The values of ``_modules``; None before the first look. For each value of ``_parameters``, whether it is None.
        self._children: list[nn.Module | None] | None = None
        self._absent: list[bool] = []
        # The places of parameters that are neither sharded nor trained.
        self._frozen: list[tuple[dict[str, nn.Parameter | None], str]] = []

    def is_changed(self) -> bool:
        """Return whether a module or parameter was added since the last look, or a frozen parameter was unfrozen."""
        modules = list(chain.from_iterable(map(_values, self._modules)))
        absent = list(map(operator.is_, chain.from_iterable(map(_values, self._parameters)), repeat(None)))
        if modules != self._children or absent != self._absent:
            return True
        found = (registry.get(name) for registry, name in self._frozen)
        return any(parameter is not None and parameter.requires_grad for parameter in found)

    def look_through(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Search everything below a module for parameters without a unit, and record what is there.

        Args:
            units: the units of the module and of all modules below.
        Raises:
            StateError: a parameter without a unit is trained.
        """
        infos = [group.fsdp_params.module_infos for unit in units for group in unit.groups]
        owned = {(id(registry), name) for each in infos for registry, name, *_ in each.places}
        modules = [each for unit in units for reference in unit.modules if (each := reference()) is not None]
        ignored = [_tree_of(each).ignored for each in modules]
        below = dict(module.named_modules())
        frozen = []
        for path, child in below.items():
            for name, parameter in child._parameters.items():
                place = (id(child._parameters), name)
                if parameter is None or place in owned or any(place in each for each in ignored):
                    continue
                if parameter.requires_grad:
                    _refuse(module, f"{path}.{name}" if path else name)
                frozen.append((child._parameters, name))
        self._frozen = frozen
        self._modules = [child._modules for child in below.values()]
        self._parameters = [child._parameters for child in below.values()]
        self._children = list(chain.from_iterable(map(_values, self._modules)))
        self._absent = [parameter is None for parameter in chain.from_iterable(map(_values, self._parameters))]


def _refuse(module: nn.Module, name: str) -> NoReturn:
    raise StateError(
        f"{type(module).__name__}: parameter {name!r} was added after fully_shard and requires a "
        "gradient, but no unit owns it: its gradients would stay on this rank. fix: add modules and "
        "parameters before fully_shard; or call fully_shard on the new module before its parameters "
        "go to an optimizer; or freeze it (requires_grad_(False)); or name it in ignored_params, and "
        "reduce its gradients yourself"
    )
