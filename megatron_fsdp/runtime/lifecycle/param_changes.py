"""What users do to sharded parameters between steps: convert, save and load them.

``nn.Module.to`` and its like and ``load_state_dict(assign=True)`` mean parameters that are views of a flat buffer, and
stay so; anything else in the place of one is refused (docs/design/facade.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import FlatDTensor
from megatron_fsdp.build.ownership import owner_words
from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.lifecycle.make_param_group import (
    follow_locals,
    materialize_group,
    materialize_unit,
    rebuild,
)
from megatron_fsdp.runtime.step.lanes import settle_host
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup, group_of_parameter
from megatron_fsdp.runtime.step.unit import Unit, units_below
from megatron_fsdp.runtime.weights.param_layout import is_laid_out_like, laid_out

__all__ = [
    "after_load_state_dict", "apply_to_group", "before_load_state_dict", "before_state_dict", "hidden_params",
    "refuse_replaced",
]  # fmt: skip

# ---------------------------------------------------------------- conversion


@contextmanager
def hidden_params(unit: Unit) -> Iterator[None]:
    """Register nothing in the places of a unit's sharded parameters inside the block; afterwards what came meanwhile,
    or these again."""
    infos = [group.fsdp_params.module_infos for group in unit.groups]
    hidden = [place for each in infos for place in each.places if place[0].get(place[1]) is place[2]]
    for registry, attribute, *_ in hidden:
        registry[attribute] = None
    try:
        yield
    finally:
        for registry, attribute, resting, _ in hidden:
            if registry.get(attribute) is None:
                registry[attribute] = resting
        for each in infos:
            each.tell_modules()


def apply_to_group(
    group: ParameterGroup, function: Callable[[torch.Tensor], torch.Tensor], *, is_awaited: bool
) -> None:
    """Apply a function to the main weights of a group.

    Another dtype makes other buffers under the same parameters, of the dtypes that the policy derives from it.
    ``to_empty`` materializes a group that is on the meta device.

    Args:
        is_awaited: whether a backward may still come for which the weights have to stay as they are.
    Raises:
        StateError: the function changes the device, or the dtype at a time when it cannot, or shares the memory with
            other processes.
    """
    current = group.main_weight.local_buffer
    # A function that moves memory would have moved it before it could be refused.
    probe = torch.empty(1, dtype=current.dtype, device=current.device)
    with torch.no_grad():
        found = function(probe)
    if group.is_meta and found.device == group.spec.device:
        materialize_group(group)
    elif found.device != current.device or (probe.device.type == "cpu" and probe.is_shared()):
        what = "go into shared memory" if found.device == current.device else f"move to {found.device}"
        raise StateError(
            f"{_words(group)} rest in a flat buffer on {current.device}, of which they are views, and cannot {what}. "
            "Do so before fully_shard; give other processes model.state_dict(), or parameter.full_tensor()."
        )
    elif found.dtype != current.dtype:
        _convert(group, found.dtype, is_awaited=is_awaited)
    else:
        with torch.no_grad():
            result = function(current)
            if result is not current:
                current.copy_(result)
                group.freshness.has_changed = True


def _words(group: ParameterGroup) -> str:
    return f"unit {group.name!r}: parameters {', '.join(map(repr, group.parameters))}"


def _convert(group: ParameterGroup, dtype: torch.dtype, *, is_awaited: bool) -> None:
    """Hold and use the parameters, which stay the same objects, in the dtypes that belong to another own one."""
    weights, values, params = group.weights, group.main_weight.local_buffer, group.fsdp_params.sharded_params
    obstacles = {
        "main weights are split": weights.remainder is not None,
        "they are sharded over further axes": group.fsdp_params.has_splits,
        "they have gradients (zero_grad() first)": any(param.grad is not None for param in params),
        "a backward of an earlier forward may still come (delete its outputs)": is_awaited,
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise StateError(
                f"{_words(group)} cannot become {dtype}: {obstacle}. Change the dtype before fully_shard, or between "
                "steps."
            )
    dtypes = group.owned[0].dtypes_for(dtype, requires_grad=any(param.requires_grad for param in params))
    rebuild(group, replace(group.spec, dtypes=dtypes))
    group.main_weight.local_buffer.copy_(values)
    group.weights.gather_function = weights.gather_function
    if weights.post_forward is not None:
        group.weights.keep_part_for(weights.post_forward.axis.size)


# ---------------------------------------------------------------- replacement


def refuse_replaced(group: ParameterGroup) -> None:
    """Refuse what is registered in the place of a sharded parameter and is not that, nor the gathered weight.

    Raises:
        StateError: there is such a thing, or nothing.
    """
    infos = group.fsdp_params.module_infos
    for index, (registry, attribute, resting, used) in zip(infos.indices, infos.places, strict=True):
        value = registry.get(attribute)
        if value is not resting and value is not used:
            raise StateError(f"unit {group.name!r}: parameter {list(group.parameters)[index]!r} was {_why_not(value)}")


def _why_not(value: torch.Tensor | None) -> str:
    if value is None:
        return (
            "taken out of its module after fully_shard. Remove parameters before fully_shard, or set the values to "
            "zero in place and freeze them."
        )
    other = owner_words(value)
    if other is not None:
        return (
            f"replaced by {other} after fully_shard: the unit would go on with its own weights, which are trained "
            "apart. Tie parameters before fully_shard, and give both modules to one unit: fully_shard([first, "
            "second]), or leave both to the unit around them."
        )
    what = "another Parameter" if isinstance(value, nn.Parameter) else "a tensor"
    return (
        f"replaced by {what} of shape {tuple(value.shape)} after fully_shard, by an assignment or "
        "torch.func.functional_call; its gradients would not be averaged over ranks. Copy the values instead "
        "(load_state_dict, or parameter.copy_(...) under torch.no_grad(), with a DTensor), or replace it before "
        "fully_shard."
    )


def _readopt(group: ParameterGroup) -> bool:
    """Copy values back where a registered parameter or its tensor was replaced; tell whether any was.

    Raises:
        StateError: the replacement has another shape, dtype or device.
    """
    params, infos, is_changed = group.fsdp_params, group.fsdp_params.module_infos, False
    for index, param in enumerate(params.sharded_params):
        registry, attribute, *_ = infos.places[infos.indices.index(index)]
        current, mine = registry.get(attribute), params.main_weight.get_local_tensor(index)
        if current is None or (current is param and (params.subclass or _lies_in(param, mine))):
            continue
        name = f"unit {group.name!r}: parameter {params.owned[index].name!r}"
        if params.subclass:
            raise StateError(
                f"{name}, a {params.subclass}, was replaced; replace it before fully_shard, or copy values into it"
            )
        if (current.shape, current.dtype, current.device) != (param.shape, mine.dtype, mine.device):
            raise StateError(
                f"{name} was replaced by {current.dtype} {tuple(current.shape)} on {current.device}; its buffer holds "
                f"{mine.dtype} {tuple(param.shape)} on {mine.device}. Change dtype or device before fully_shard, or "
                "use MixedPrecisionPolicy."
            )
        with torch.no_grad():
            rows = current if is_laid_out_like(current, param) else laid_out(params, param, current)
            assert isinstance(rows, DTensor)
            mine.view(-1).copy_(rows.to_local().reshape(-1))
            param.data = params.wrap(index, params.main_weight.get_dtensor(index))
        follow_locals(params)
        if current is not param:
            param.grad = None  # A parameter that is loaded by assign=True brings no gradient.
        is_changed = True
    infos.register()
    return is_changed


def _lies_in(param: torch.Tensor, rows: torch.Tensor) -> bool:
    return isinstance(param, DTensor) and param.to_local().data_ptr() == rows.data_ptr()


# ---------------------------------------------------------------- state dictionaries


def before_state_dict(unit: Unit, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Show sharded parameters."""
    unit.schedule.reshard(unit)


def before_load_state_dict(unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Bring what is loaded into the rows of each rank: whole tensors, and what torch.distributed.tensor cut."""
    for below in units_below(module):
        below.schedule.refuse_replaced_params(below)
        below.schedule.reshard(below)
    settle_host()
    _materialize_for(module, prefix, state_dict)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value, owner = state_dict.get(prefix + name), group_of_parameter(parameter)
        if owner is None or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            continue
        if not is_laid_out_like(value, parameter):
            state_dict[prefix + name] = laid_out(owner.fsdp_params, parameter, value)
        elif isinstance(parameter, FlatDTensor) and isinstance(value, DTensor) and not isinstance(value, FlatDTensor):
            # PyTorch made a DTensor of the parameter's placements. Its own operators, a detach of torch 2.14 even, take
            # the rows of such a one for those of a plain Shard(0).
            state_dict[prefix + name] = parameter.with_local(value.to_local())


def _materialize_for(module: nn.Module, prefix: str, state_dict: dict[str, Any]) -> None:
    """Allocate the units on the meta device that the state dictionary fills; what is missing must not become zeros."""
    names = {id(parameter): prefix + name for name, parameter in module.named_parameters()}
    for unit in units_below(module):
        params = [param for group in unit.groups for param in group.parameters.values()]
        if any(group.is_meta for group in unit.groups) and all(names.get(id(param)) in state_dict for param in params):
            materialize_unit(unit)


def after_load_state_dict(unit: Unit, *_: Any) -> None:
    """Copy values back where a parameter was replaced (``assign=True``)."""
    for group in unit.groups:
        if _readopt(group):
            group.freshness.has_changed = True
