"""prefetch_elements: how far gathers run ahead of compute, by size instead of by units."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.runtime.lifecycle.module import FSDPModule, unit_of

__all__ = ["prefetch_elements"]


def prefetch_elements(model: nn.Module, num_elements: int) -> None:
    """Let each unit start the gathers of as many units ahead as hold ``num_elements`` elements together.

    What ``--suggested-communication-unit-size`` asks for: many small units are then in flight at a time, as one large
    one would be. The last unit started may exceed the number, and there is always one. They take memory for as long
    as they wait for their turn.

    The order is that of registration, backwards in backward, alike on all ranks whatever each of them computes.
    Calling ``set_modules_to_forward_prefetch`` or ``set_modules_to_backward_prefetch`` afterwards replaces it.
    Elements are those of parameters, whatever their dtype.
    """
    if num_elements < 1:
        raise ConfigError(f"prefetch_elements({num_elements}); wanted at least 1 element")
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise StateError(f"{type(model).__name__} holds no sharded module; call fully_shard on it first")
    forward = _with_parameters(model.modules())
    # A unit around others is the last to end in forward, and so the first in backward.
    backward = _with_parameters(_children_first(model, set()))[::-1]
    for position, unit in enumerate(forward):
        unit.set_modules_to_forward_prefetch(_as_many(forward[position + 1 :], num_elements))
    for position, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch(_as_many(backward[position + 1 :], num_elements))


def _with_parameters(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    """Return one module of each unit that owns parameters, in the order given."""
    units: dict[int, FSDPModule] = {}
    for module in modules:
        if isinstance(module, FSDPModule) and unit_of(module).groups:
            units.setdefault(id(unit_of(module)), module)
    return list(units.values())


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _as_many(units: Sequence[FSDPModule], num_elements: int) -> list[FSDPModule]:
    """Return the first units that together hold so many elements, or all of them."""
    sizes = [sum(p.numel() for group in unit_of(unit).groups for p in group.parameters.values()) for unit in units]
    before = itertools.accumulate(sizes, initial=0)
    return [unit for unit, total in zip(units, before, strict=False) if total < num_elements]
