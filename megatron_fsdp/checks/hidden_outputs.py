"""Find tensors that a unit returns inside sets, distributions, closures, generators and user classes.

Backward has to gather the unit's weights before it reaches them, and PyTorch's pytree does not look into such objects.
"""

from __future__ import annotations

import collections
import gc
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatron_fsdp.engine.backward import pre_backward
from megatron_fsdp.engine.hooks import StepHooks
from megatron_fsdp.engine.outputs import watch_output
from megatron_fsdp.engine.unit import Call, Unit

__all__ = ["HiddenOutputs"]

_MAX_OBJECTS = 1_000
_SKIPPED = (type, types.ModuleType, types.CodeType, types.FrameType, nn.Module, str, bytes, int, float, complex)


class HiddenOutputs(StepHooks[Unit, Call]):
    """Finds the tensors that objects in outputs hold."""

    def on_opaque_output(self, call: Call, objects: Sequence[Any]) -> None:
        """Enter ``call`` when backward reaches a tensor that the objects hold and that was computed in the call."""
        for tensor in _tensors_in(objects):
            node: Any = tensor.grad_fn
            if node is not None and node._sequence_nr() >= call.first_node:
                watch_output(call, tensor, pre_backward)


def _tensors_in(objects: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that objects refer to, through at most ``_MAX_OBJECTS`` others."""
    waiting, seen = collections.deque(objects), set[int]()
    while waiting and len(seen) < _MAX_OBJECTS:
        each = waiting.popleft()
        kind = type(each)
        if id(each) in seen or each is None or issubclass(kind, _SKIPPED):
            continue
        seen.add(id(each))
        if issubclass(kind, torch.Tensor):
            yield each
            waiting.extend(vars(each).values())
        elif issubclass(kind, types.FunctionType):
            # Closure, defaults and attributes may hold outputs; globals do not.
            waiting.extend((each.__closure__, each.__defaults__, each.__kwdefaults__, vars(each)))
        elif issubclass(kind, types.GeneratorType):
            waiting.extend(() if each.gi_frame is None else each.gi_frame.f_locals.values())
        else:
            waiting.extend(gc.get_referents(each))
