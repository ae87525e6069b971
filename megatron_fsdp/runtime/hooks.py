"""Hooks: what PyTorch calls when a unit's modules run."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.runtime.module import FSDPModule, _innermost_transform, sharded_class, unit_of, units_below
from megatron_fsdp.runtime.pytree import caster
from megatron_fsdp.runtime.state_dict import _after_load_state_dict, _before_load_state_dict, _before_state_dict
from megatron_fsdp.runtime.unit import Unit, is_in_backward

__all__ = [
    "convert",
    "register_fsdp_forward_method",
]


def convert(modules: Iterable[nn.Module], unit: Unit) -> None:
    """Make the modules ``FSDPModule``s of ``unit`` and install the hooks."""
    for module in modules:
        module.__class__ = sharded_class(type(module))  # type: ignore[arg-type]  # classes are hashable
        module._fsdp_unit = unit  # type: ignore[assignment]  # not a submodule or tensor: lands in the instance dictionary
        module.register_forward_pre_hook(functools.partial(_before_forward, unit), prepend=True, with_kwargs=True)
        # Also called, with None for the output, when forward raised: parameters must not stay gathered then.
        module.register_forward_hook(functools.partial(_after_forward, unit), always_call=True)
        module.register_state_dict_pre_hook(functools.partial(_before_state_dict, unit))
        module.register_load_state_dict_pre_hook(functools.partial(_before_load_state_dict, unit))
        module.register_load_state_dict_post_hook(functools.partial(_after_load_state_dict, unit))


def _before_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
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


def _after_forward(unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return _untraced_after(unit, module, args, output)
    if unit.policy.output_dtype is not None:
        output = caster(unit.policy.output_dtype)(output)
    unit.schedule.after_forward(unit, module, args, output)
    return output


_untraced_before: Any = _disable_dynamo(_before_forward)
_untraced_after: Any = _disable_dynamo(_after_forward)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat a call of another method (``generate``, ``encode``) like one of ``forward``: weights are gathered for it.

    Nothing happens to a module that is not sharded, so model code may call it in either case.

    Raises:
        ConfigError: the module has no such method.

    Example:
        fully_shard(model)
        register_fsdp_forward_method(model, "encode")
        encoded = model.encode(batch)
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ConfigError(f"{type(module).__name__} has no method {method_name!r} to register as a forward method")
    unit = unit_of(module)

    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        changed = _before_forward(unit, self, args, kwargs)
        args, kwargs = changed if changed is not None else (args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = _after_forward(unit, self, args, output)
        return output

    setattr(module, method_name, types.MethodType(call, module))
