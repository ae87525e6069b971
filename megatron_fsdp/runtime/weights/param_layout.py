"""Tensors that users give, as DTensors with the rows that a sharded parameter has on each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from dbuffer.dtensor.flat_dtensor import FlatDTensor
from megatron_fsdp.errors import StateError

if TYPE_CHECKING:
    from megatron_fsdp.runtime.step.fsdp_params import FSDPParams

__all__ = ["is_laid_out_like", "laid_out", "own_rows"]


def laid_out(params: FSDPParams, param: torch.Tensor, value: torch.Tensor) -> DTensor:
    """Return ``value``, a whole tensor or a DTensor of any placement, as a DTensor laid out like a parameter.

    Every rank of the mesh calls it. One whole tensor exists at a time.
    """
    index = next(position for position, other in enumerate(params.sharded_params) if other is param)
    template, split = params.sharded_params[index], params.owned[index].split
    assert isinstance(template, FlatDTensor)
    local = torch.empty_like(template.to_local(), dtype=value.dtype)
    held = params.main_weight.layout.held(index)
    whole = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
    part = (whole if split is None else split.local_part(whole)).reshape(-1)
    local.view(-1).copy_(part[held.start : held.stop])
    return FlatDTensor.from_local(
        local, template.device_mesh, template.placements, run_check=False, shape=template.shape,
        stride=template.stride(),
    )  # fmt: skip


def own_rows(params: FSDPParams, index: int, gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a gradient that autograd or the user gave a sharded parameter.

    Raises:
        StateError: it is a plain tensor.
    """
    if not isinstance(gradient, DTensor):
        raise StateError(
            f"{params.main_weight.name}: .grad of parameter {params.owned[index].name!r} was replaced by a plain "
            "tensor; assign a DTensor laid out like the parameter, or change the gradient in place"
        )
    if not is_laid_out_like(gradient, params.sharded_params[index]):
        gradient = laid_out(params, params.sharded_params[index], gradient)
    return gradient.to_local()


def is_laid_out_like(value: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether ``value`` may stand beside a sharded parameter as it is: a DTensor with the very rows of its ranks."""
    if not isinstance(value, DTensor) or not isinstance(param, DTensor):
        return False
    return value.to_local().numel() == param.to_local().numel() and _placed(value) == _placed(param)


def _placed(value: DTensor) -> list[str]:
    # With the rows of each rank, which take no part in the comparison of placements.
    return [repr(placement) for placement in value.placements]
