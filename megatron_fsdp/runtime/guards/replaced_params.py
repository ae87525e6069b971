"""Replaced parameters: tensors that somebody registered in the place of a sharded parameter.

A sharded parameter assigned before the weights were used takes the place for good; anything else is refused, since
gradients would be this rank's alone and what is registered would not be what is saved (docs/design/facade.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dbuffer.dtensor.flat_dtensor import FlatDTensor
from megatron_fsdp.build.ownership import owner_words
from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.lifecycle.make_param_group import adopt_param, materialize_group
from megatron_fsdp.runtime.lifecycle.make_unit import follow_gradients
from megatron_fsdp.runtime.lifecycle.param_registry import ReplacedParam, register, replaced_in
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.step.unit import Unit

__all__ = ["settle"]


def settle(unit: Unit, group: ParameterGroup) -> None:
    """Let sharded parameters that were assigned before a group's weights were used take their places for good.

    Raises:
        StateError: something else is registered there, or nothing is.
    """
    for found in _not_adopted(unit, group):
        place = f"unit {group.name!r}: parameter {list(group.parameters)[found.index]!r}"
        if found.value is None:
            raise StateError(
                f"{place} was taken out of its module after fully_shard. Remove parameters before fully_shard, or set "
                "the values to zero in place and freeze them."
            )
        raise StateError(_replaced(place, found.value))


def _replaced(place: str, value: torch.Tensor) -> str:
    other = owner_words(value)
    if other is not None:
        return (
            f"{place} was replaced by {other} after fully_shard: the unit would go on with its own weights, which are "
            "trained apart. Tie parameters before fully_shard, and give both modules to one unit: fully_shard([first, "
            "second]), or leave both to the unit around them."
        )
    what = "another Parameter" if isinstance(value, nn.Parameter) else "a tensor"
    return (
        f"{place} was replaced by {what} of shape {tuple(value.shape)} after fully_shard, by an assignment or "
        "torch.func.functional_call; its gradients would not be averaged over ranks. Copy the values instead "
        "(load_state_dict, or parameter.copy_(...) under torch.no_grad(), with a DTensor), or replace it before "
        "fully_shard."
    )


def _not_adopted(unit: Unit, group: ParameterGroup) -> Sequence[ReplacedParam]:
    """Return what is registered in a group's places and takes none of them for good."""
    replaced = replaced_in(group.fsdp_params.module_infos)
    if not replaced or group.freshness.generation:
        return replaced
    adopted = {
        found.index: found.value
        for found in replaced
        if isinstance(found.value, FlatDTensor)
        and isinstance(found.value, nn.Parameter)
        and owner_words(found.value) is None
        and _fits(group, found.index, found.value)
    }
    was_meta = group.is_meta
    if was_meta:
        if len(adopted) < len(group.parameters):
            return replaced
        materialize_group(group)
    for index, value in adopted.items():
        adopt_param(group, index, value)
    if was_meta:
        # Materialized parameters were registered over the adopted ones, which are all of them.
        register(group.fsdp_params.module_infos)
        follow_gradients(unit)
    return [found for found in replaced if found.index not in adopted]


def _fits(group: ParameterGroup, index: int, value: FlatDTensor) -> bool:
    param = group.fsdp_params.sharded_params[index]
    assert isinstance(param, FlatDTensor)
    return (
        not group.fsdp_params.has_splits
        and group.fsdp_params.module_infos.indices.count(index) == 1
        and (value.shape, value.dtype, value.device_mesh) == (param.shape, param.dtype, param.device_mesh)
        and not value.is_meta
        and not value._backward_hooks
        and group.weights.remainder is None
    )
