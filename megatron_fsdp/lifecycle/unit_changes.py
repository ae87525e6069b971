"""Make a unit, and change it between steps: frozen parameters, held gradients, ``grad_dtype``, another name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from megatron_fsdp.build.ownership import settle_grad_dtypes
from megatron_fsdp.engine.backward import UnitGradientListener
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.errors import StateError
from megatron_fsdp.lifecycle.make_param_group import make_gradients, materialize_group, set_requires_grad
from megatron_fsdp.policy.precision import MixedPrecisionPolicy, grad_dtype_of
from megatron_fsdp.variants.invariant_reduction import InvariantReduction
from megatron_fsdp.variants.memory_slots import place_unit

__all__ = [
    "apply_grad_dtypes",
    "apply_requires_grad",
    "make_unit",
    "materialize_unit",
    "rename_unit",
    "replace_held_gradients",
    "update_gradient_buffers",
]


def make_unit(
    name: str, modules: Sequence[nn.Module], groups: Sequence[ParameterGroup], policy: MixedPrecisionPolicy
) -> Unit:
    """Return the unit of some modules."""
    unit = Unit(name, modules, groups, policy)
    update_gradient_buffers(unit)
    return unit


def update_gradient_buffers(unit: Unit) -> None:
    """Connect a unit with its gradient buffers, after some were made or parameters were frozen or unfrozen."""
    if unit.slots.sizing is not None:
        place_unit(unit)
    unit.count_trained()
    for buffer in unit.gradient_buffers:
        buffer.listener = UnitGradientListener(unit)
        if isinstance(buffer.reduction, InvariantReduction):
            buffer.reduction.unit = unit.reference


def apply_requires_grad(unit: Unit, group: ParameterGroup, changed: Sequence[int]) -> None:
    """Train or freeze parameters of a group as the user has said, and make a gradient buffer if the group needs one.

    Args:
        changed: the indices of these parameters.
    Raises:
        StateError: an unfrozen parameter has no main weight of the dtype that the policy wants.
    """
    params, main = group.fsdp_params, group.spec.dtypes.main
    for index in changed:
        owned, trained = group.owned[index], params.sharded_params[index].requires_grad
        if trained and group.gradient_buffer is None:
            wanted = owned.dtypes_for(main, requires_grad=True).stepped
            if wanted is not main:
                raise StateError(
                    f"unit {group.name!r}: parameter {owned.name!r} was frozen when it was sharded, so it has no main "
                    f"weight of {wanted}. fix: call fully_shard while it is trainable, and freeze it afterwards; or "
                    "leave main_params_dtype None"
                )
            make_gradients(group)
        assert group.gradient_buffer is not None
        set_requires_grad(params, index, trained)
        group.gradient_buffer.binding.trained[index] = trained
    update_gradient_buffers(unit)


def replace_held_gradients(unit: Unit, group: ParameterGroup) -> None:
    """Make another gradient buffer if the user still holds a tensor in ``main_grad``, which keeps its values then."""
    old = group.gradient_buffer
    assert old is not None
    old.binding.release_if_dropped()
    if not old.binding.memory.is_held or old.binding.sum is not None:
        # A sum under way lies in the same memory, and is refused or dropped first.
        return
    try:
        make_gradients(group)
        update_gradient_buffers(unit)
    except BaseException:
        group.gradient_buffer = old
        unit.count_trained()
        raise
    old.is_replaced = True


def materialize_unit(unit: Unit) -> None:
    """Allocate the buffers of parameters that were on the meta device."""
    for group in unit.groups:
        materialize_group(group)
    update_gradient_buffers(unit)


def rename_unit(unit: Unit, name: str) -> None:
    """Rename a unit: ``name`` is its path below a new root."""
    unit.name = name
    for group in unit.groups:
        group.name = name
        group.weights.rename(name)
        if group.gradient_buffer is not None:
            group.gradient_buffer.rename(name)


def apply_grad_dtypes(unit: Unit) -> None:
    """Lay out a unit's gradients as the ``grad_dtype`` of its sharded parameters says, before the first backward.

    Raises:
        StateError: parameters that share a buffer want different dtypes, or have a gradient.
    """
    if unit.root.backward.number:
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
                    f"{other.name!r} has {other.grad_dtype}, and their gradients share a buffer. fix: set grad_dtype "
                    "before fully_shard, which makes two buffers then, or set it on both"
                )
        if any(param.grad is not None for param in group.fsdp_params.sharded_params):
            raise StateError(
                f"unit {group.name!r}: grad_dtype of parameter {first.name!r} was changed while it has a gradient. "
                "fix: set it before the first forward, or call zero_grad() first"
            )
        if group.gradient_buffer is not None:
            group.spec = replace(group.spec, dtypes=first.policy.with_gradients(group.spec.dtypes, first.grad_dtype))
            make_gradients(group)
    update_gradient_buffers(unit)
