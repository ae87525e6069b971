"""Brings loaded optimizer state into the rows that sharded parameters have on each rank.

State that an optimizer makes has the rows of its parameters, whichever operator makes it (docs/design/facade.md). State
that ``load_state_dict`` brings may be whole, or a DTensor that PyTorch cut by its own rule.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dbuffer import FlatDTensor
from megatron_fsdp.parameter_group import group_of_parameter, is_laid_out_like

__all__ = ["lay_out_loaded_state", "parameters_of"]

# The state dictionary that each optimizer had when it was last looked through; loading makes another one.
_SEEN: weakref.WeakKeyDictionary[Optimizer, dict[Any, Any]] = weakref.WeakKeyDictionary()


def parameters_of(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    """Yield the parameters of all param groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def lay_out_loaded_state(optimizer: Optimizer, *_: Any) -> None:
    """Bring state that was loaded since the last step into the parameters' rows; all ranks call it together."""
    if _SEEN.get(optimizer) is optimizer.state:
        return
    for parameter in parameters_of(optimizer):
        group, values = group_of_parameter(parameter), optimizer.state.get(parameter)
        if group is None or not values:
            continue
        for key, value in list(values.items()):
            is_per_element = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == parameter.shape
            if is_per_element and not (isinstance(value, FlatDTensor) and is_laid_out_like(value, parameter)):
                values[key] = group.laid_out(parameter, value)
    _SEEN[optimizer] = optimizer.state


register_optimizer_step_pre_hook(lay_out_loaded_state)
