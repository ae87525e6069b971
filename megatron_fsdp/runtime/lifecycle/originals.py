"""Originals: what ``fully_shard`` changes in modules, kept until it is done, to be put back where it raises."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.runtime.lifecycle.module import sharded_class

__all__ = ["Originals", "check_conversion"]


class Originals:
    """The parameters, buffers and classes of some modules and of all modules below them, as they are now.

    As a context it puts them back when an exception is raised inside.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        below = {id(module): module for root in modules for module in root.modules()}
        self._kept = [
            (module, type(module), dict(module._parameters), dict(module._buffers)) for module in below.values()
        ]

    def __enter__(self) -> Originals:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for module, cls, parameters, buffers in self._kept:
                if type(module) is not cls:
                    module.__class__ = cls
                _put_back(module, module._parameters, parameters)
                _put_back(module, module._buffers, buffers)
        self._kept.clear()


def _put_back(module: nn.Module, registry: Any, originals: dict[str, Any]) -> None:
    """Register what was registered before; only what was changed is touched."""
    for name, original in originals.items():
        if registry.get(name) is original:
            continue
        if isinstance(original, torch.Tensor) and type(module).__setattr__ is not nn.Module.__setattr__:
            # Modules with their own __setattr__ (recurrent ones) keep further references to their weights.
            setattr(module, name, original)
        registry[name] = original


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
