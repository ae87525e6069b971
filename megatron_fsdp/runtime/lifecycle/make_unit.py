"""How units are made, and what becomes of one between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from megatron_fsdp.build.ownership import settle_grad_dtypes
from megatron_fsdp.errors import StateError
from megatron_fsdp.policy.precision import MixedPrecisionPolicy, grad_dtype_of
from megatron_fsdp.runtime.lifecycle.make_param_group import make_gradients, materialize_group, set_requires_grad
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.step.unit import Unit
from megatron_fsdp.runtime.weights.memory_slots import place_unit

__all__ = [
    "follow_grad_dtypes", "follow_gradients", "follow_requires_grad", "make_unit", "materialize_unit", "rename_unit",
]  # fmt: skip


def make_unit(
    name: str, modules: Sequence[nn.Module], groups: Sequence[ParameterGroup], policy: MixedPrecisionPolicy
) -> Unit:
    """Return the unit of some modules."""
    unit = Unit(name, modules, groups, policy)
    for group in groups:
        group.unit = id(unit)
    follow_gradients(unit)
    return unit


def follow_gradients(unit: Unit) -> None:
    """Take notice of gradient buffers that were made or changed: after materialization, freezing, unfreezing."""
    if unit.slots.sizing is not None:
        place_unit(unit)
    unit.count_gradients()
    for buffer in unit.gradients:
        buffer.observe(unit)


def follow_requires_grad(unit: Unit, group: ParameterGroup, changed: Sequence[int]) -> None:
    """Take notice of parameters that were frozen or unfrozen, or of gradients that users have kept.

    Raises:
        StateError: an unfrozen parameter has no main weight of the dtype that the policy wants.
    """
    is_changed, params, main = bool(changed), group.fsdp_params, group.spec.dtypes.main
    if group.gradients is not None and group.gradients.binding.is_taken:
        group.gradients.binding.dropped()
        if group.gradients.binding.is_taken:
            # Who took gradients before ``zero_grad`` keeps their memory.
            make_gradients(group)
            is_changed = True
    for index in changed:
        owned, trained = group.owned[index], params.sharded_params[index].requires_grad
        if trained and group.gradients is None:
            wanted = owned.dtypes_for(main, requires_grad=True).stepped
            if wanted is not main:
                raise StateError(
                    f"unit {group.name!r}: parameter {owned.name!r} was frozen when it was sharded, so it has no main "
                    f"weight of {wanted}. Call fully_shard while it is trainable, and freeze it afterwards; or leave "
                    "main_params_dtype None."
                )
            make_gradients(group)
        assert group.gradients is not None
        set_requires_grad(params, index, trained)
        group.gradients.binding.trained[index] = trained
    if is_changed:
        follow_gradients(unit)


def materialize_unit(unit: Unit) -> None:
    """Allocate the buffers of parameters that were on the meta device."""
    for group in unit.groups:
        materialize_group(group)
    follow_gradients(unit)


def rename_unit(unit: Unit, name: str) -> None:
    """Take the name that the unit has below a (new) root."""
    unit.name = name
    for group in unit.groups:
        group.name = name
        group.weights.rename(name)
        if group.gradients is not None:
            group.gradients.rename(name)


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
        first = group.owned[0]
        for other in group.owned:
            if other.grad_dtype != first.grad_dtype:
                raise StateError(
                    f"unit {group.name!r}: parameter {first.name!r} has grad_dtype={first.grad_dtype} and "
                    f"{other.name!r} has {other.grad_dtype}, and their gradients share a buffer. Set grad_dtype before "
                    "fully_shard, which makes two buffers then, or set it on both."
                )
        if any(param.grad is not None for param in group.fsdp_params.sharded_params):
            raise StateError(
                f"unit {group.name!r}: grad_dtype of parameter {first.name!r} was changed while it has a gradient. Set "
                "it before the first forward, or call zero_grad() first."
            )
        if group.gradients is not None:
            group.spec = replace(group.spec, dtypes=first.policy.with_gradients(group.spec.dtypes, first.grad_dtype))
            make_gradients(group)
    follow_gradients(unit)
