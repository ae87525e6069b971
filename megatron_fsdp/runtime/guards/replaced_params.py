"""Replaced parameters: tensors that somebody registered in the place of a sharded parameter, and what becomes of them.

The rule (docs/design/facade.md): what a plain model would compute is computed, or refused by name. A tensor that needs
no gradient is used for the call, as in ``torch.func.functional_call``. One that needs a gradient would get this rank's
alone, and is refused. A sharded parameter assigned before the first forward takes the place for good.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import stateless

from dbuffer.dtensor.flat_dtensor import FlatDTensor
from megatron_fsdp.build.ownership import owner_words
from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.lifecycle.make_param_group import adopt_param, materialize_group
from megatron_fsdp.runtime.lifecycle.make_unit import follow_gradients
from megatron_fsdp.runtime.lifecycle.param_registry import ReplacedParam, override, register, replaced_in
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.step.unit import Unit

__all__ = ["admit"]


def admit(unit: Unit, group: ParameterGroup, *, is_call: bool = True) -> None:
    """Use what is registered in the places of a group's parameters for the forward call that begins, or refuse it.

    Sharded parameters that were assigned before its weights were used take their places for good.

    Args:
        is_call: False outside of calls, where whatever else is there is refused.
    Raises:
        StateError: autograd would leave a gradient there that no rank reduces, or nothing is there.
    """
    for found in _not_adopted(unit, group, is_call=is_call):
        value = found.value
        place = f"unit {group.name!r}: parameter {list(group.parameters)[found.index]!r}"
        if value is None:
            raise StateError(
                f"{place} was taken out of its module after fully_shard. Remove parameters before fully_shard, or set "
                "the values to zero in place and freeze them."
            )
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise StateError(
                f"{place} was replaced by a tensor of a torch.func transform (grad, vmap, jvp), whose gradients are "
                "not averaged over ranks. Run such transforms on a model that is not sharded; functional_call with "
                "tensors that require no gradient works."
            )
        if not is_call or (torch.is_grad_enabled() and value.requires_grad):
            raise StateError(_replaced(place, value))
        if group.fsdp_params.has_splits:
            raise StateError(
                f"{place} was replaced after fully_shard, and is sharded over further axes besides: copy the values "
                "into the parameter, which is a DTensor, instead."
            )
        # As gathered weights are: whole, in the compute dtype, where compute happens.
        with torch.no_grad():
            whole = value.full_tensor() if isinstance(value, DTensor) else value.detach()
        like = group.gathered
        override(group.fsdp_params.module_infos, found, whole.to(device=like.device, dtype=like.dtype))


def _replaced(place: str, value: torch.Tensor) -> str:
    other = owner_words(value)
    if other is not None:
        return (
            f"{place} was replaced by {other} after fully_shard: the unit would go on with its own weights, which are "
            "trained apart. Tie parameters before fully_shard, and give both modules to one unit: fully_shard([first, "
            "second]), or leave both to the unit around them."
        )
    what = "another Parameter" if isinstance(value, nn.Parameter) else "a tensor that requires a gradient"
    return (
        f"{place} was replaced by {what} of shape {tuple(value.shape)} after fully_shard; its gradients would not be "
        "averaged over ranks. Copy the values instead (load_state_dict, or parameter.copy_(...) under torch.no_grad(), "
        "with a DTensor), replace it before fully_shard, or call under torch.no_grad()."
    )


def _is_functional_call() -> bool:
    """Whether torch.func.functional_call is under way, which puts back what it has replaced."""
    code = stateless._functional_call.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return False


def _not_adopted(unit: Unit, group: ParameterGroup, *, is_call: bool) -> Sequence[ReplacedParam]:
    """Return what is registered in a group's places and takes none of them for good."""
    replaced = replaced_in(group.fsdp_params.module_infos)
    if not replaced or group.freshness.generation or (is_call and _is_functional_call()):
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
