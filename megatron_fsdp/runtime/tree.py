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

from megatron_fsdp.runtime.added_params import is_trained, walk

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
        self.ignored = {
            (id(child._parameters), name): child._parameters
            for child in module.modules()
            for name, parameter in child._parameters.items()
            if id(parameter) in ignored
        }
        self.modules: list[dict[str, nn.Module | None]] = []
        self.children: list[nn.Module | None] = []
        self.parameters: list[dict[str, nn.Parameter | None]] = []
        self.absent: list[bool] = []
        # Places of parameters that nobody shards and nobody trains.
        self.frozen: list[tuple[dict[str, nn.Parameter | None], str]] = []

    def check(self, module: nn.Module, units: Callable[[], Iterable[Unit]]) -> None:
        """Look for parameters that were added since the last look.

        Args:
            module: the same as before. units: those below it.
        Raises:
            StateError: one is trained, and no unit owns it.
        """
        modules = list(chain.from_iterable(map(_values, self.modules)))
        absent = list(map(operator.is_, chain.from_iterable(map(_values, self.parameters)), repeat(None)))
        is_new = not self.modules or modules != self.children or absent != self.absent
        if is_new or (self.frozen and any(is_trained(registry.get(name)) for registry, name in self.frozen)):
            walk(self, module, list(units()))
