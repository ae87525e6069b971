"""Weight gradients that are multiplied straight into their unit's buffer: which linear layers, and expert weights."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd import forward_ad

from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.runtime.step.fsdp_params import SMALL_NUMEL, WeightHandle, handle_of
from megatron_fsdp.runtime.step.fused_linear import (
    FusedLinear,
    as_factor,
    has_transforms,
    product_into_buffer,
)
from megatron_fsdp.runtime.weights.gathered_weight import KINDS

if TYPE_CHECKING:
    from megatron_fsdp.runtime.step.gradients import GradientBuffer

__all__ = ["expert_matmul", "fuse_linear_layers", "offer_products"]


_WEIGHTS = (torch.Tensor, nn.Parameter, *KINDS)
MIN_NUMEL = SMALL_NUMEL + 1
"""Weights of fewer elements are not worth the Python of a fused layer: their gradients wait and are copied together."""


def fuse_linear_layers(owned: Iterable[OwnedParameter]) -> None:
    """Mix ``FusedLinear`` into the linear layers that hold one of the parameters as their weight.

    Left alone are layers with a ``forward`` of their own, small weights, and those that are sharded over further axes.
    """
    for parameter in owned:
        if parameter.parameter.numel() < MIN_NUMEL:
            continue
        for info in parameter.param_module_infos:
            kind = type(info.module)
            if parameter.split is None and info.attribute == "weight" and kind.forward is nn.Linear.forward:
                info.module.__class__ = _fused_class(kind)  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _fused_class(kind: type[nn.Linear]) -> type[FusedLinear]:
    # The name is the class's own, as models are printed by it and units named after it; the qualified name differs.
    namespace = {"__module__": kind.__module__, "__qualname__": f"FusedLinear.{kind.__name__}", "_plain_class": kind}
    return type(kind.__name__, (FusedLinear, kind), namespace)


def offer_products(
    weights: Sequence[torch.Tensor],
    views: Sequence[torch.Tensor],
    receiver: GradientBuffer,
    *,
    is_wide: bool = False,
) -> None:
    """Let backward multiply gradients of gathered weights into ``views``, where a product of theirs has the dtype.

    Args:
        weights: the gathered parameters, in plan order. views: of their packed buffer. receiver: who keeps it.
        is_wide: also into FP32 views of 16-bit weights.
    """
    for index, (weight, view) in enumerate(zip(weights, views, strict=True)):
        is_plain = type(weight) in _WEIGHTS and weight.ndim in (2, 3) and weight.is_floating_point()
        fits = weight.dtype is view.dtype or (is_wide and weight.itemsize == 2 and view.dtype is torch.float32)
        if is_plain and fits and weight.device == view.device:
            handle = handle_of(weight)
            handle.gradients, handle.index = weakref.ref(receiver), index


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
    # Recorded by autograd alone, not by a transform of functions or forward mode.
    is_plain = torch.is_grad_enabled() and not has_transforms() and forward_ad._current_level < 0
    if torch.compiler.is_compiling() or handle is None or not is_plain:
        return torch.bmm(input, weight)
    takes = weight.requires_grad and handle.gradients() is not None
    factor = as_factor(input, weight) if takes else None
    if factor is None:
        return torch.bmm(input, weight)
    output: torch.Tensor = product_into_buffer(factor, weight, None, handle)
    return output
