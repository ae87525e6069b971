"""What users set as the ``grad_dtype`` of sharded parameters: taken over before the first gradient, refused later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_fsdp.build.ownership import settle_grad_dtypes
from megatron_fsdp.errors import StateError
from megatron_fsdp.policy.precision import grad_dtype_of
from megatron_fsdp.runtime.lifecycle.make_param_group import make_gradients_as
from megatron_fsdp.runtime.lifecycle.make_unit import follow_gradients

if TYPE_CHECKING:
    from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
    from megatron_fsdp.runtime.step.unit import Unit

__all__ = [
    "follow_grad_dtypes",
]


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
        make_gradients_as(group, group.owned[0].policy, group.owned[0].grad_dtype)
    follow_gradients(unit)


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
