"""Hooks: what PyTorch calls when a unit's modules run."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterable
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from megatron_fsdp.runtime.guards.added_params import is_trained, walk
from megatron_fsdp.runtime.guards.pytree import map_tensors
from megatron_fsdp.runtime.lifecycle.module import _innermost_transform
from megatron_fsdp.runtime.step.unit import Unit, is_in_backward, units_below

__all__ = [
    "Tree",
    "after_forward",
    "before_forward",
    "caster",
]


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
        # Hooks are counted, so that one which a user registers is seen.
        self.hooks: list[dict[int, Any]] = []
        self.num_hooks = -1
        # Places of parameters that nobody shards and nobody trains.
        self.frozen: list[tuple[dict[str, nn.Parameter | None], str]] = []

    def count_hooks(self) -> None:
        """Take the forward hooks that are there for known."""
        self.num_hooks = sum(map(len, self.hooks))

    def check(self, module: nn.Module, units: Callable[[], Iterable[Unit]]) -> None:
        """Look for parameters that were added since the last look.

        Args:
            module: the same as before. units: those below it.
        Raises:
            StateError: one is trained, and no unit owns it.
        """
        modules = list(chain.from_iterable(map(_values, self.modules)))
        absent = list(map(operator.is_, chain.from_iterable(map(_values, self.parameters)), repeat(None)))
        is_new = modules != self.children or absent != self.absent or sum(map(len, self.hooks)) != self.num_hooks
        if is_new or (self.frozen and any(is_trained(registry.get(name)) for registry, name in self.frozen)):
            walk(self, module, list(units()))


@functools.cache
def caster(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return a function that casts every floating-point tensor in a nested structure to ``dtype``."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not dtype else tensor

    def cast_all(value: Any) -> Any:
        if type(value) is tuple or (type(value) is dict and not value):
            for each in value:
                if type(each) is not torch.Tensor or each.dtype is not dtype:
                    break
            else:
                return value
        return map_tensors(cast, value)

    return cast_all


def before_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Gather a unit's weights for the call of one of its modules; return the arguments, cast, where that is asked."""
    if torch.compiler.is_dynamo_compiling():
        # The compiler would trace hooks into a unit's graph, and with them the switch to unsharded parameters.
        return _untraced_before(unit, module, args, kwargs)  # type: ignore[no-any-return]  # as this
    if unit is unit.schedule._root():
        if not is_in_backward():
            unit.backward.recover()
        unit.trees[id(module)].check(module, lambda: units_below(module))
    if _innermost_transform() is None:
        _gather(unit, module, (args, kwargs))
    else:
        # A transform of torch.func would wrap buffers and what collectives return.
        with temporarily_clear_interpreter_stack():
            _gather(unit, module, ())
    policy = unit.policy
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        cast = caster(policy.param_dtype)
        return cast(args), cast(kwargs)
    return None


def _gather(unit: Unit, module: nn.Module, given: Any) -> None:
    if is_in_backward():
        unit.backward.before_recomputation(unit, module)
    else:
        unit.schedule.before_forward(unit, module, given)


def after_forward(unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Watch what the call of a module leaves for backward, and reshard; return its output, cast where that is asked."""
    if torch.compiler.is_dynamo_compiling():
        return _untraced_after(unit, module, args, output)
    if unit.policy.output_dtype is not None:
        output = caster(unit.policy.output_dtype)(output)
    unit.schedule.after_forward(unit, module, args, output)
    return output


_untraced_before: Any = _disable_dynamo(before_forward)
_untraced_after: Any = _disable_dynamo(after_forward)
