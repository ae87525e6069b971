"""Walk: the forward pass over a module tree, as visits in the order in which modules are registered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from megatron_fsdp.planning.model_spec import Visit, VisitKind

__all__ = ["Owners", "walk_modules"]

# id of a registered parameter -> (position of its unit, of its group)
Owners = Mapping[int, tuple[int, int]]


def walk_modules(model: nn.Module, units: Sequence[Sequence[nn.Module]], owners: Owners) -> tuple[Visit, ...]:
    """Return the visits of one pass over ``model``, each module once, and the uses of trained parameters alone.

    Args:
        units: the modules of each unit, by position; a unit is open from its first module to the end of its last.
        owners: position of the unit and of the group of every sharded parameter, by its id.
    """
    return tuple(_Walk(model, units, owners).visits(model))


class _Walk:
    def __init__(self, model: nn.Module, units: Sequence[Sequence[nn.Module]], owners: Owners) -> None:
        below = {id(module) for module in model.modules()}
        self._positions = {id(module): position for position, modules in enumerate(units) for module in modules}
        self._pending = [{id(module) for module in modules} & below for modules in units]
        self._is_open = [False] * len(units)
        self._owners = owners
        self._seen: set[int] = set()

    def visits(self, module: nn.Module) -> Iterator[Visit]:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        position = self._positions.get(id(module), -1)
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
            if parameter is None or not parameter.requires_grad or id(parameter) in self._seen:
                continue
            # A tied parameter gets its gradient when backward reaches the first place that used it.
            self._seen.add(id(parameter))
            if id(parameter) in self._owners:
                yield Visit(VisitKind.USE, *self._owners[id(parameter)])
