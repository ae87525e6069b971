"""Hooks: what PyTorch calls when a unit's modules run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from megatron_fsdp.runtime.step.pytree import map_tensors
from megatron_fsdp.runtime.step.schedule import Schedule
from megatron_fsdp.runtime.step.unit import Unit, is_in_backward, units_below

__all__ = ["after_forward", "before_forward", "caster"]

_task_id: Callable[[], int] = torch._C._current_graph_task_id
_innermost_transform = torch._C._functorch.peek_interpreter_stack


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
    schedule: Schedule = unit.schedule
    if unit is schedule.root_ref():
        if not is_in_backward():
            unit.backward.recover()
        tree = unit.trees[id(module)]
        if tree.is_changed():
            schedule.guards.walk(tree, module, list(units_below(module)))
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
    schedule: Schedule = unit.schedule
    if _task_id() != -1:
        schedule.guards.before_recomputation(unit, module)
    else:
        schedule.before_forward(unit, module, given)


def after_forward(unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Watch what the call of a module leaves for backward, and reshard; return its output, cast where that is asked."""
    if torch.compiler.is_dynamo_compiling():
        return _untraced_after(unit, module, args, output)
    if unit.policy.output_dtype is not None:
        output = caster(unit.policy.output_dtype)(output)
    schedule: Schedule = unit.schedule
    schedule.after_forward(unit, module, args, output)
    return output


_untraced_before: Any = _disable_dynamo(before_forward)
_untraced_after: Any = _disable_dynamo(after_forward)
