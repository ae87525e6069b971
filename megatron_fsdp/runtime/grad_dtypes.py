"""What users set as the ``grad_dtype`` of sharded parameters: taken over before the first gradient, refused later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

import torch

from megatron_fsdp.build.ownership import settle_grad_dtypes
from megatron_fsdp.errors import StateError
from megatron_fsdp.policy.precision import grad_dtype_of

if TYPE_CHECKING:
    from megatron_fsdp.runtime.fsdp_params import FSDPParams
    from megatron_fsdp.runtime.parameter_group import ParameterGroup
    from megatron_fsdp.runtime.unit import Unit

__all__ = ["allow_any", "follow_grad_dtypes", "refuse_late"]


def follow_grad_dtypes(unit: Unit) -> None:
    """Lay out a unit's gradients as the ``grad_dtype`` of its sharded parameters says, before the first backward.

    Raises:
        StateError: parameters that share a buffer want different dtypes, or have a gradient.
    """
    if unit.backward.number:
        return
    owned = [each for group in unit.groups for each in group.owned]
    params = [param for group in unit.groups for param in group.fsdp_params.sharded_params]
    if all(each.grad_dtype == grad_dtype_of(param) for each, param in zip(owned, params, strict=True)):
        return
    settle_grad_dtypes(owned, unit.policy, params)
    for group in unit.groups:
        _check(group)
        group.make_gradients_as(group.owned[0].policy, group.owned[0].grad_dtype)
    unit.follow_gradients()


def _check(group: ParameterGroup) -> None:
    first = group.owned[0]
    other = next((each for each in group.owned if each.grad_dtype != first.grad_dtype), None)
    if other is not None:
        raise StateError(
            f"unit {group.name!r}: parameter {first.name!r} has grad_dtype={first.grad_dtype} and {other.name!r} has "
            f"{other.grad_dtype}, and their gradients share a buffer. Set grad_dtype before fully_shard, which makes "
            "two buffers then, or set it on both."
        )
    if any(param.grad is not None for param in group.fsdp_params.sharded_params):
        raise StateError(
            f"unit {group.name!r}: grad_dtype of parameter {first.name!r} was changed while it has a gradient. Set it "
            "before the first forward, or call zero_grad() first."
        )


def allow_any(parameters: Iterable[torch.Tensor]) -> None:
    """Let a gradient of any dtype be assigned where the user did not say which."""
    for parameter in parameters:
        if grad_dtype_of(parameter) == "own":
            parameter.grad_dtype = None


def refuse_late(unit: str, fsdp_params: FSDPParams, dtype: torch.dtype, error: RuntimeError) -> NoReturn:
    """Name the parameter to which no gradient of ``dtype`` could be assigned, and take back what was set.

    Raises:
        StateError: its ``grad_dtype`` is another one. RuntimeError: ``error``, where that of none is.
    """
    for index, parameter in enumerate(fsdp_params.sharded_params):
        if parameter.grad_dtype not in (None, dtype):
            found, parameter.grad_dtype = parameter.grad_dtype, dtype
            raise StateError(
                f"{unit}: grad_dtype of parameter {fsdp_params.name_of(index)!r} was set to {found} after gradients of "
                f"{dtype} were laid out for it; set it before the first forward"
            ) from error
    raise error
