"""Expert weights whose gradients are multiplied straight into their unit's buffer, as those of linear layers are."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from megatron_fsdp.runtime.step.fused_linear import (
    applied,
    as_factor,
    has_transforms,
    task_id,
    watched,
    weight_gradient,
)
from megatron_fsdp.runtime.step.weight_handle import WeightHandle

__all__ = ["expert_matmul"]


class _ExpertsIntoBuffer(torch.autograd.Function):
    """``torch.bmm``, with the gradient of the weight added to its unit's buffer."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, handle: WeightHandle, call: Any) -> torch.Tensor:
        ctx.to_save = (input, weight if ctx.needs_input_grad[0] else None)
        ctx.handle, ctx.call = handle, call
        ctx.materialize_grads = False
        return torch.bmm(input, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None
        unit, call = ctx.handle.unit(), ctx.call
        if unit is not None and (unit.entered is not call or unit.entered_task != task_id()):
            unit.backward.before_reading(unit, call)
        input, weight = ctx.saved_tensors
        of_input = None if weight is None else torch.bmm(gradient, weight.mT)
        return of_input, weight_gradient(ctx, input.mT, gradient), None, None


_experts_into_buffer = applied(_ExpertsIntoBuffer)


def expert_matmul(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``torch.bmm(input, weight)``; backward multiplies the gradient of an expert weight into its unit's buffer.

    For models that compute their experts in batches of equal size. An ordinary ``torch.bmm`` makes a tensor of the
    gradients of all experts first. It is one where the weight is not gathered, or the conditions of ``nn.Linear``'s
    fusion do not hold (docs/design/fused_gradients.md).

    Args:
        input: (experts, tokens, in). weight: (experts, in, out).
    Returns:
        (experts, tokens, out).

    Example:
        experts = nn.Parameter(torch.randn(8, 16, 32))
        tokens = torch.randn(8, 100, 16)  # 100 tokens for each of 8 experts
        output = expert_matmul(tokens, experts)
    """
    handle: WeightHandle | None = getattr(weight, "_fsdp_handle", None)
    if torch.compiler.is_compiling() or handle is None or not _is_recorded_plainly():
        return torch.bmm(input, weight)
    takes = weight.requires_grad and handle.gradients() is not None
    factor, unit = as_factor(input, weight) if takes else None, handle.unit()
    if factor is None:
        return watched(torch.bmm(input, weight), unit)
    output: torch.Tensor = _experts_into_buffer(factor, weight, handle, unit and unit.open_call)
    return output


def _is_recorded_plainly() -> bool:
    """Whether autograd alone records what runs now, not a transform of functions or forward mode."""
    return torch.is_grad_enabled() and not has_transforms() and forward_ad._current_level < 0
