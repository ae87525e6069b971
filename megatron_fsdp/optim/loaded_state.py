"""What any optimizer over sharded parameters is looked at for before it steps: its state's rows, its parameters' kind.

State that an optimizer makes has the rows of its parameters, whichever operator makes it (docs/design/facade.md). State
that ``load_state_dict`` brings may be whole, or a DTensor that PyTorch cut by its own rule.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from dbuffer import FlatDTensor
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.runtime.step.parameter_group import group_of_parameter
from megatron_fsdp.runtime.weights.param_layout import is_laid_out_like, laid_out

__all__ = [
    "SEEN",
    "WHOLE",
    "lay_out_loaded_state",
    "parameters_by_index",
    "parameters_of",
    "refuse_split_weights",
    "state_dtype",
]

# The state dictionary that each optimizer had when it was last looked through; loading makes another one.
SEEN: weakref.WeakKeyDictionary[Optimizer, dict[Any, Any]] = weakref.WeakKeyDictionary()
# How many parameters the groups of each optimizer had when all of them were found to be whole weights.
WHOLE: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()


def parameters_of(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    """Yield the parameters of all param groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def parameters_by_index(optimizer: Optimizer, document: Mapping[str, Any]) -> dict[Any, torch.Tensor]:
    """Return the parameters by what a state dict of the optimizer calls them, whose groups ``torch.optim`` compares."""
    indices = itertools.chain.from_iterable(group["params"] for group in document["param_groups"])
    return dict(zip(indices, parameters_of(optimizer), strict=False))


def state_dtype(optimizer: Optimizer, parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of state that the optimizer makes: its own choice, else that of what it steps."""
    chosen: torch.dtype | None = getattr(optimizer, "moments_dtype", None)
    group = group_of_parameter(parameter)
    return chosen or (parameter.dtype if group is None else group.spec.dtypes.stepped)


def lay_out_loaded_state(optimizer: Optimizer, *_: Any) -> None:
    """Bring state that was loaded since the last step into the parameters' rows; all ranks call it together."""
    if SEEN.get(optimizer) is optimizer.state:
        return
    for parameter in parameters_of(optimizer):
        group, values = group_of_parameter(parameter), optimizer.state.get(parameter)
        if group is None or not values:
            continue
        for key, value in list(values.items()):
            is_per_element = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == parameter.shape
            if not is_per_element:
                continue
            if not isinstance(value, FlatDTensor) or not is_laid_out_like(value, parameter):
                values[key] = laid_out(group.fsdp_params, parameter, value)
            elif (
                isinstance(parameter, FlatDTensor)
                and value.window is None
                and value.device_mesh is not parameter.device_mesh
            ):
                # An equal mesh has process groups of its own: ranks must not differ in whose they gather over.
                values[key] = parameter.with_local(value._local_tensor)
    SEEN[optimizer] = optimizer.state


def refuse_split_weights(optimizer: Optimizer, *_: Any) -> None:
    """Refuse an optimizer that would step the upper halves of split weights as if they were all."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if getattr(optimizer, "steps_split_weights", False) or WHOLE.get(optimizer) == sizes:
        return
    for parameter in parameters_of(optimizer):
        group = group_of_parameter(parameter)
        if group is not None and group.weights.remainder is not None:
            name = next(name for name, param in group.parameters.items() if param is parameter)
            raise ConfigError(
                f"{type(optimizer).__name__}: parameter {name!r} of unit {group.name!r} is the bf16 half of an FP32 "
                "weight (split_main_params=True), which an optimizer of torch.optim would round in every step. Use "
                "megatron_fsdp.AdamW, or shard that unit with split_main_params=False."
            )
    WHOLE[optimizer] = sizes
