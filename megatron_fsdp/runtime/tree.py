"""Tree: what is registered below a sharded module, looked at in every forward for what was added since.

A parameter that nobody shards is trained on this rank's gradients alone. So one that was added after ``fully_shard``
and is trained is refused by name. The look costs some nanoseconds per module; only a difference is walked through.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from torch import nn

from megatron_fsdp.errors import StateError

if TYPE_CHECKING:
    from megatron_fsdp.runtime.unit import Unit

__all__ = ["Tree"]

_values: Callable[[dict[str, Any]], Iterable[Any]] = dict.values


class Tree:
    """The modules and the places of parameters below one module.

    Args:
        module: a module of a unit, which owns this. It is not referred to, but the dictionaries of those below it are.
        ignored: ids of the parameters that the caller asked to leave alone.
    """

    def __init__(self, module: nn.Module, ignored: Container[int]) -> None:
        self._ignored = {
            (id(child._parameters), name): child._parameters
            for child in module.modules()
            for name, parameter in child._parameters.items()
            if id(parameter) in ignored
        }
        self._modules: list[dict[str, nn.Module | None]] = []
        self._children: list[nn.Module | None] = []
        self._parameters: list[dict[str, nn.Parameter | None]] = []
        self._absent: list[bool] = []
        # Places of parameters that nobody shards and nobody trains.
        self._frozen: list[tuple[dict[str, nn.Parameter | None], str]] = []

    def check(self, module: nn.Module, units: Callable[[], Iterable[Unit]]) -> None:
        """Look for parameters that were added since the last look.

        Args:
            module: the same as before. units: those below it.
        Raises:
            StateError: one is trained, and no unit owns it.
        """
        modules = list(chain.from_iterable(map(_values, self._modules)))
        absent = list(map(operator.is_, chain.from_iterable(map(_values, self._parameters)), repeat(None)))
        is_new = not self._modules or modules != self._children or absent != self._absent
        if is_new or (self._frozen and any(_is_trained(registry.get(name)) for registry, name in self._frozen)):
            self._walk(module, list(units()))

    def _walk(self, module: nn.Module, units: Iterable[Unit]) -> None:
        owned = {(id(registry), name) for unit in units for registry, name in unit.places()}
        known = [tree._ignored for unit in units for tree in unit.trees.values()]
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
                        "gradient, but no unit owns it: its gradients would stay on this rank. Add modules and "
                        "parameters before fully_shard; or call fully_shard on the new module before its parameters "
                        "go to an optimizer; or freeze it (requires_grad_(False)); or name it in ignored_params, and "
                        "reduce its gradients yourself."
                    )
                frozen.append((child._parameters, name))
        self._frozen = frozen
        self._modules = [child._modules for child in below.values()]
        self._parameters = [child._parameters for child in below.values()]
        self._children = list(chain.from_iterable(map(_values, self._modules)))
        self._absent = [parameter is None for parameter in chain.from_iterable(map(_values, self._parameters))]


def _is_trained(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.requires_grad
