"""Keeps the state tensors of any torch optimizer in the rows that its sharded parameters have on each rank.

Two things bring other rows: ``load_state_dict`` with DTensors that PyTorch cut by its own rule, and optimizers that
    make state with
an operator whose result forgets its rows (SGD clones its first momentum; docs/design/facade.md, "Known limit").
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatron_fsdp.parameter_group import ParameterGroup, group_of_parameter, is_laid_out_like

__all__ = ["lay_out_loaded_state", "parameters_of"]

# The state dictionary that each optimizer had at its last step, and of how many parameters it held state then.
_SEEN: weakref.WeakKeyDictionary[Optimizer, tuple[dict[Any, Any], int]] = weakref.WeakKeyDictionary()


def parameters_of(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    """Yield the parameters of all param groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def lay_out_loaded_state(optimizer: Optimizer, *_: Any) -> None:
    """Bring state that was loaded since the last step into the parameters' rows; all ranks call it together."""
    seen = _SEEN.get(optimizer)
    if seen is not None and seen[0] is optimizer.state:
        return
    for group, parameter, values, key in _state_in_other_rows(optimizer):
        values[key] = group.laid_out(parameter, values[key])
    _SEEN[optimizer] = (optimizer.state, len(optimizer.state))


def _lay_out_new_state(optimizer: Optimizer, *_: Any) -> None:
    # State that a step made has the right rows in its local part, and only its placement forgot them.
    seen = _SEEN.get(optimizer)
    if seen is not None and seen[1] == len(optimizer.state):
        return
    for _group, parameter, values, key in _state_in_other_rows(optimizer):
        values[key] = _with_rows_of(parameter, values[key])
    _SEEN[optimizer] = (optimizer.state, len(optimizer.state))


register_optimizer_step_pre_hook(lay_out_loaded_state)
register_optimizer_step_post_hook(_lay_out_new_state)


def _state_in_other_rows(
    optimizer: Optimizer,
) -> Iterator[tuple[ParameterGroup, torch.Tensor, dict[str, Any], str]]:
    for parameter in parameters_of(optimizer):
        group, values = group_of_parameter(parameter), optimizer.state.get(parameter)
        if group is None or not values:
            continue
        for key, value in list(values.items()):
            is_per_element = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == parameter.shape
            if is_per_element and not is_laid_out_like(value, parameter):
                yield group, parameter, values, key


def _with_rows_of(parameter: torch.Tensor, value: Any) -> Any:
    assert isinstance(parameter, DTensor)
    if not isinstance(value, DTensor) or value.to_local().shape != parameter.to_local().shape:
        return value
    shape, stride = parameter.shape, parameter.stride()
    with torch.no_grad():
        return DTensor.from_local(
            value.to_local(), parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
        )
