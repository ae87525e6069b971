"""Outputs of modules inside of a unit by which backward may come to it first: a hook of the user may have taken them.

Hooks on those modules watch until backward has come to the unit by its own outputs, and to theirs afterwards; then they
go, since PyTorch calls modules without hooks much faster. They come back when anybody registers a forward hook on a
module, and stay where one of theirs was first. What this does not see, the versions of released weights refuse
(docs/design/order.md, "Whatever leads backward into a unit").
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.runtime.step.fused_linear import FusedLinear, has_transforms
from megatron_fsdp.runtime.step.outputs import WATCHERS
from megatron_fsdp.runtime.step.pytree import iterate_tensors
from megatron_fsdp.runtime.step.unit import Call, Unit

__all__ = ["InnerOutputs", "readers_of"]


def readers_of(owned: Iterable[OwnedParameter], unit: Unit) -> list[nn.Module]:
    """Return the modules inside of the unit whose backward reads weights of it.

    Left out: the unit's own modules, which are watched in any case; ``FusedLinear``, whose backward asks itself;
    look-ups, whose backward reads no weight.
    """
    if not unit.releases_weights:
        return []
    outermost = {id(reference()) for reference in unit.modules}
    modules = {id(info.module): info.module for parameter in owned for info in parameter.param_module_infos}
    lookups = (nn.Embedding.forward, nn.EmbeddingBag.forward)
    return [
        module
        for key, module in modules.items()
        if key not in outermost and type(module).forward not in lookups and not isinstance(module, FusedLinear)
    ]


class InnerOutputs:
    """The hooks on the modules inside of one unit.

    Args:
        unit: it is referred to weakly, as the modules are.
    """

    def __init__(self, modules: Iterable[nn.Module], unit: Unit) -> None:
        self._unit = unit.reference
        self._modules = [weakref.ref(module) for module in modules]
        self._handles: list[Any] = []
        self._was_first = self._was_later = False

    def arm(self) -> bool:
        """Hook the modules, if they are not; tell whether there are any."""
        self._was_later = False
        if not self._handles:
            for reference in self._modules:
                module = reference()
                if module is not None:
                    self._handles.append(module.register_forward_hook(self._after_module))
        return bool(self._handles)

    def attributed(self, module: nn.Module) -> list[nn.Module]:
        """Return a module of the unit, and those in it, not PyTorch's own, that have weights and may keep tensors."""
        inner = {id(child) for child in module.modules()}
        found = [each for reference in self._modules if (each := reference()) is not None and id(each) in inner]
        return [module, *(each for each in found if not type(each).__module__.startswith("torch.nn."))]

    def disarm(self) -> bool:
        """Unhook the modules, if it was seen that this may be done; tell whether they are not hooked now."""
        if self._was_later and not self._was_first:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        return not self._handles

    def _after_module(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        unit = self._unit()
        call = None if unit is None else unit.open_call
        if call is None or torch.compiler.is_dynamo_compiling() or has_transforms() or not torch.is_grad_enabled():
            return
        for tensor in iterate_tensors(output):
            node = tensor.grad_fn
            if node is not None and node._sequence_nr() >= call.first_node:
                hook: Any = functools.partial(self._reached, call, node.metadata, tensor.output_nr)
                hook.__torch_unserializable__ = True  # as in ``_watchers``
                tensor.register_hook(hook)
                call.unit.expect(call)

    def _reached(self, call: Call, metadata: Any, output_nr: int, gradient: torch.Tensor) -> None:
        backward = call.unit.backward
        if (backward.is_under_way and call.entered == backward.number) or (WATCHERS, output_nr) in metadata:
            self._was_later = True
        else:
            self._was_first = True
        backward.before_reading(call.unit, call)
