"""How units are made, and what becomes of one between steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.runtime.lifecycle import make_param_group
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.step.unit import Unit
from megatron_fsdp.runtime.step.weight_handle import handle_of
from megatron_fsdp.runtime.weights.memory_slots import place_unit

__all__ = ["follow_gradients", "follow_requires_grad", "make_unit", "materialize_unit", "rename_unit"]


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
    for group in unit.groups:
        if not group.rests_whole:
            for weight in group.fsdp_params.unsharded_params:
                handle_of(weight).unit = unit.reference
            unit.releases_weights = True


def follow_requires_grad(unit: Unit, group: ParameterGroup, changed: Sequence[int]) -> None:
    """Take notice of parameters that were frozen or unfrozen, or of gradients that users have kept."""
    is_changed = bool(changed)
    if group.gradients is not None and group.gradients.binding.is_taken:
        is_changed = make_param_group.leave_gradients(group) or is_changed
    make_param_group.follow_requires_grad(group, changed)
    if is_changed:
        follow_gradients(unit)


def materialize_unit(unit: Unit) -> None:
    """Allocate the buffers of parameters that were on the meta device."""
    for group in unit.groups:
        make_param_group.materialize_group(group)
    follow_gradients(unit)


def rename_unit(unit: Unit, name: str) -> None:
    """Take the name that the unit has below a (new) root."""
    unit.name = name
    for group in unit.groups:
        make_param_group.rename_group(group, name)
