"""State dictionaries: what happens to a unit around ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import FlatDTensor
from megatron_fsdp.runtime.lifecycle.make_param_group import readopt
from megatron_fsdp.runtime.lifecycle.make_unit import materialize_unit
from megatron_fsdp.runtime.step.lanes import settle_host
from megatron_fsdp.runtime.step.parameter_group import group_of_parameter
from megatron_fsdp.runtime.step.unit import Unit, units_below
from megatron_fsdp.runtime.weights.param_layout import is_laid_out_like, laid_out

__all__ = ["after_load_state_dict", "before_load_state_dict", "before_state_dict"]


def before_state_dict(unit: Unit, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Show sharded parameters."""
    unit.schedule.reshard(unit)


def before_load_state_dict(unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Bring what is loaded into the rows of each rank: whole tensors, and what torch.distributed.tensor cut."""
    for below in units_below(module):
        # What was assigned in the place of a parameter is what the values are for.
        below.schedule.settle_replaced_params(below)
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
        if readopt(group):
            group.freshness.has_changed = True
