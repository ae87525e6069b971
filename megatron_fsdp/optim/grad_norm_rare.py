"""What clipping meets seldom: gradients of frozen parameters, and calls that are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer.placements import BufferPlacement
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.runtime.step.fsdp_params import grads_of
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.weights.param_layout import own_rows

__all__ = ["HeldGradients", "of_frozen", "refuse_norm", "refuse_pending"]


@dataclass(frozen=True, slots=True)
class HeldGradients:
    """Gradients of one group on this rank.

    Attributes:
        flat: their elements. placements: of the buffer that they lie in. scale: multiplies them, wherever they lie.
    """

    group: ParameterGroup
    flat: torch.Tensor
    placements: Sequence[BufferPlacement]
    scale: Callable[[torch.Tensor], None]


def of_frozen(group: ParameterGroup) -> Iterator[HeldGradients]:
    """Yield what the user put in ``.grad`` of a group that is frozen, which has no buffer for it."""
    for index, gradient in enumerate(grads_of(group.fsdp_params.sharded_params)):
        if gradient is not None:
            rows, placements = own_rows(group.fsdp_params, index, gradient), group.main_weight.placements
            yield HeldGradients(group, rows.reshape(-1), placements, functools.partial(_scale, gradient))


def _scale(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local.mul_(factor.to(local))


def refuse_norm(model: object, norm_type: float) -> NoReturn:
    """Raise a ``ConfigError`` that says what ``clip_grad_norm_`` takes."""
    if isinstance(model, nn.Module):
        raise ConfigError(f"clip_grad_norm_: norm_type={norm_type}; supported are numbers above 0, and inf")
    raise ConfigError(
        f"clip_grad_norm_: found a {type(model).__name__}, wanted the model. Give the model itself, or its "
        "parameters to torch.nn.utils.clip_grad_norm_."
    )


def refuse_pending(name: str) -> NoReturn:
    """Raise a ``StateError`` for the gradients of a unit that are still being summed up."""
    raise StateError(
        f"{name}: clip_grad_norm_ before gradients are final; run the last microbatch's backward "
        "with synchronization (outside of no_sync, or after set_requires_gradient_sync(True))"
    )
