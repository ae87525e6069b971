"""What makes modules ``FSDPModule``s: their class, and the hooks by which PyTorch tells that they run."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

from torch import nn

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.runtime.grads.fuse import fuse_linear_layers
from megatron_fsdp.runtime.lifecycle.module import FSDPModule, sharded_class, unit_of
from megatron_fsdp.runtime.lifecycle.param_registry import register
from megatron_fsdp.runtime.lifecycle.state_dict import after_load_state_dict, before_load_state_dict, before_state_dict
from megatron_fsdp.runtime.step.schedule import after_forward, before_forward
from megatron_fsdp.runtime.step.unit import Unit

__all__ = ["check_conversion", "convert", "register_fsdp_forward_method"]


def check_conversion(modules: Iterable[nn.Module]) -> None:
    """Raise where a module's class can't be changed, as of a ``ScriptModule``.

    Raises:
        ConfigError: it names the module.
    """
    for module in modules:
        cls = type(module)
        try:
            module.__class__ = sharded_class(cls)  # type: ignore[arg-type]  # classes are hashable
            module.__class__ = cls
        except TypeError as error:
            raise ConfigError(
                f"{cls.__name__} cannot become an FSDPModule: {error}. Call fully_shard on the module around it, or on "
                "the nn.Module that it was made from"
            ) from error


def convert(modules: Iterable[nn.Module], unit: Unit) -> None:
    """Register the unit's parameters, and make the modules ``FSDPModule``s with hooks; after ``check_conversion``."""
    for group in unit.groups:
        if group.spec.fuses_weight_gradients:
            fuse_linear_layers(group.owned)
        register(group.fsdp_params.module_infos)
    for module in modules:
        module.__class__ = sharded_class(type(module))  # type: ignore[arg-type]  # classes are hashable
        module._fsdp_unit = unit  # type: ignore[assignment]  # not a submodule or tensor: lands in the instance dictionary
        module.register_forward_pre_hook(functools.partial(before_forward, unit), prepend=True, with_kwargs=True)
        # Also called, with None for the output, when forward raised: parameters must not stay gathered then.
        module.register_forward_hook(functools.partial(after_forward, unit), always_call=True)
        module.register_state_dict_pre_hook(functools.partial(before_state_dict, unit))
        module.register_load_state_dict_pre_hook(functools.partial(before_load_state_dict, unit))
        module.register_load_state_dict_post_hook(functools.partial(after_load_state_dict, unit))


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
        args, kwargs = before_forward(unit, self, args, kwargs) or (args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = after_forward(unit, self, args, output)
        return output

    setattr(module, method_name, types.MethodType(call, module))
