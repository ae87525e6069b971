"""ModuleTree: the modules and parameters below a module, to notice when a user adds some after ``fully_shard``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

from torch import nn

__all__ = ["ModuleTree"]


_values: Callable[[dict[str, Any]], Iterable[Any]] = dict.values


@dataclass(eq=False)
class ModuleTree:
    """The modules and parameters below one module of a unit, as ``checks/added_params.py`` found them last.

    Attributes:
        ignored: the places of ``ignored_params``, each the identity of a dictionary and a name.
        modules, parameters: the ``_modules`` and ``_parameters`` dictionaries of all modules below.
        children: the values of ``modules``; None before the first look.
        absent: for each value of ``parameters``, True if the value is None.
        frozen: the places of parameters that are neither sharded nor trained.
    """

    ignored: dict[tuple[int, str], Any]
    modules: list[dict[str, nn.Module | None]] = field(default_factory=list)
    children: list[nn.Module | None] | None = None
    parameters: list[dict[str, nn.Parameter | None]] = field(default_factory=list)
    absent: list[bool] = field(default_factory=list)
    frozen: list[tuple[dict[str, nn.Parameter | None], str]] = field(default_factory=list)

    def is_changed(self) -> bool:
        """Return whether a module or parameter was added since the last look, or a frozen parameter was unfrozen."""
        modules = list(chain.from_iterable(map(_values, self.modules)))
        absent = list(map(operator.is_, chain.from_iterable(map(_values, self.parameters)), repeat(None)))
        if modules != self.children or absent != self.absent:
            return True
        found = (registry.get(name) for registry, name in self.frozen)
        return any(parameter is not None and parameter.requires_grad for parameter in found)
