"""ModelSnapshot: what a step that is only run to look at it would change, put back afterwards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatron_fsdp.checkpoint.random_state import random_state, restore_random_state
from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.step.unit import units_below

__all__ = ["ModelSnapshot"]


class ModelSnapshot:
    """Keeps ``.grad``, buffers and random state of a sharded model while a ``with`` block runs, and puts them back.

    Inside, parameters begin without gradients, and hooks that wait for gradients of sharded parameters (optimizers in
    backward) are not called. Copies are made of what there is: a gradient shard where ``.grad`` was set. Weights are
    not kept: forward and backward do not change them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._units = list(units_below(model))
        self._buffers: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []
        self._hooks: list[tuple[dict[int, Callable[..., object]], dict[int, Callable[..., object]]]] = []
        self._random: dict[str, torch.Tensor] = {}

    def __enter__(self) -> ModelSnapshot:
        self._check()
        self._random = random_state()
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._buffers.append((module, name, buffer, buffer.detach().clone()))
        for parameter in self._model.parameters():
            gradient = parameter.grad
            # The engine's gradients lie in memory that it will use again, and plain ones are accumulated into.
            values = None if gradient is None else gradient.detach().clone()
            self._gradients.append((parameter, gradient, values))
            hooks: dict[int, Callable[..., object]] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if hooks:
                self._hooks.append((hooks, dict(hooks)))
                hooks.clear()
        self._forget_gradients()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            for unit in self._units:
                unit.backward.reset()
        self.rewind()
        with torch.no_grad():
            for parameter, gradient, values in self._gradients:
                parameter.grad = gradient
                if gradient is not None and values is not None:
                    gradient.copy_(values)
        for hooks, kept in self._hooks:
            hooks.update(kept)

    def rewind(self) -> None:
        """Go back to the beginning of the block: no gradients, buffers and random state as they were."""
        self._forget_gradients()
        self.rewind_random()
        with torch.no_grad():
            for module, name, buffer, values in self._buffers:
                buffer.copy_(values)
                module._buffers[name] = buffer

    def rewind_random(self) -> None:
        """Set the random generators to their state at the beginning."""
        restore_random_state(self._random)

    def _forget_gradients(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None

    def _check(self) -> None:
        for unit in self._units:
            if not unit.requires_gradient_sync or not unit.requires_all_reduce:
                raise StateError(f"unit {unit.name!r} is in no_sync: call this outside, between steps")
            for group in unit.groups:
                gradients = group.gradients
                if gradients is not None and gradients.binding.is_under_way:
                    # Says which parameter, and what to do.
                    gradients.binding.settled()
                    raise StateError(f"unit {unit.name!r}: gradients are a sum under way; call zero_grad() first")
