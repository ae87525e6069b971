"""Originals: what ``fully_shard`` changes in modules, kept until it is done, to be put back where it raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["Originals"]


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
