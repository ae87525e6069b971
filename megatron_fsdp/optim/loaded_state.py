"""Load the state of any optimizer over sharded parameters, and show it before the first step.

State that an optimizer makes has the rows of its parameters, whichever operator makes it (docs/design/facade.md). State
that ``load_state_dict`` brings may be whole, or a DTensor that PyTorch cut by its own rule.

``torch.optim`` creates state in the first step, so the ``state_dict()`` of a new optimizer is empty, and
``torch.distributed.checkpoint.load`` would load nothing into it. The state dict therefore shows zeros, from which a
step gives the same result as without state. Only the returned dictionary holds them (docs/design/checkpoint.md).
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer import FlatDTensor
from megatron_fsdp.engine.param_group import group_of_parameter
from megatron_fsdp.engine.params import is_laid_out_like, laid_out
from megatron_fsdp.errors import ConfigError

__all__ = [
    "SEEN",
    "lay_out_loaded_state",
    "parameters_by_index",
    "parameters_of",
    "refuse_split_weights",
    "show_fresh_state",
    "state_dtype",
    "was_only_shown",
    "without_fresh_state",
]

_log = logging.getLogger(__name__)
# The state dictionary that each optimizer had when it was last looked through; loading makes another one.
SEEN: weakref.WeakKeyDictionary[Optimizer, dict[Any, Any]] = weakref.WeakKeyDictionary()
# The empty state that the last state dict of an optimizer had.
_EMPTY: weakref.WeakKeyDictionary[Optimizer, dict[Any, Any]] = weakref.WeakKeyDictionary()
# The zeros in state dicts that are still referenced.
_SHOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()


def parameters_of(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    """Yield the parameters of all param groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def parameters_by_index(optimizer: Optimizer, document: Mapping[str, Any]) -> dict[Any, torch.Tensor]:
    """Return the parameters by their keys in a state dict of the optimizer, whose groups ``torch.optim`` compares."""
    indices = itertools.chain.from_iterable(group["params"] for group in document["param_groups"])
    return dict(zip(indices, parameters_of(optimizer), strict=False))


def state_dtype(optimizer: Optimizer, parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the optimizer's state: its own choice, else the dtype of the parameters."""
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
                # Equal meshes have different process groups, and all ranks must gather over the same one.
                values[key] = parameter.with_local(value._local_tensor)
    SEEN[optimizer] = optimizer.state


def refuse_split_weights(optimizer: Optimizer, *_: Any) -> None:
    """Refuse an optimizer that would step the upper halves of split weights as if they were all."""
    if getattr(optimizer, "steps_split_weights", False):
        return
    for parameter in parameters_of(optimizer):
        group = group_of_parameter(parameter)
        if group is not None and group.weights.remainder is not None:
            name = next(name for name, param in group.parameters.items() if param is parameter)
            raise ConfigError(
                f"{type(optimizer).__name__}: parameter {name!r} of unit {group.name!r} is the bf16 half of an FP32 "
                "weight (split_main_params=True), which an optimizer of torch.optim would round in every step. "
                "fix: use megatron_fsdp.AdamW, or shard that unit with split_main_params=False."
            )


# ---------------------------------------------------------------- before the first step


def show_fresh_state(optimizer: Optimizer) -> None:
    """Let ``state_dict()`` show zeros for parameters without state, for optimizers that are known to begin with them.

    Those are ``torch.optim.Adam``, ``AdamW`` and ``SGD``, and this project's with moments of floating-point numbers.
    """
    optimizer.register_state_dict_post_hook(_add_fresh_state)
    optimizer.register_load_state_dict_pre_hook(_warn_of_nothing, prepend=True)


def without_fresh_state(optimizer: Optimizer, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of the optimizer with the state that it has, and nothing that is only shown."""
    named = parameters_by_index(optimizer, document)
    shown = {index for index, parameter in named.items() if not optimizer.state.get(parameter)}
    return {**document, "state": {key: values for key, values in document["state"].items() if key not in shown}}


def was_only_shown(values: Mapping[str, Any]) -> bool:
    """Return whether these are zeros that a state dict showed, with no values loaded into them since."""
    moments = [value for value in values.values() if isinstance(value, FlatDTensor) and value._local_tensor.numel()]
    return bool(moments) and all(value in _SHOWN and value._local_tensor._version == 0 for value in moments)


def _add_fresh_state(optimizer: Optimizer, document: dict[str, Any]) -> dict[str, Any]:
    state, named = dict(document["state"]), parameters_by_index(optimizer, document)
    for group in document["param_groups"]:
        keys = _fresh_keys(optimizer, group)
        for index in group["params"]:
            parameter = named[index]
            if keys and parameter.requires_grad and not optimizer.state.get(parameter):
                state[index] = {key: _zeros(optimizer, group, parameter, key) for key in keys}
    _EMPTY[optimizer] = {} if state else state
    return {**document, "state": state}


def _fresh_keys(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of the zeros from which a step of a param group is as from no state; none where it is not so."""
    kind = type(optimizer)
    if kind in (Adam, AdamW):
        return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
    if kind is SGD:
        return ("momentum_buffer",) if group["momentum"] and not group["dampening"] else ()
    own: tuple[str, ...] = optimizer.fresh_keys(group) if hasattr(optimizer, "fresh_keys") else ()
    return own


def _zeros(optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, key: str) -> torch.Tensor:
    if key != "step":
        zeros = torch.zeros_like(parameter.detach(), dtype=state_dtype(optimizer, parameter))
        _SHOWN[zeros] = True
        return zeros
    is_beside = group.get("capturable") or (group.get("fused") and type(optimizer) in (Adam, AdamW))
    return torch.zeros((), device=parameter.device if is_beside else "cpu")


def _warn_of_nothing(optimizer: Optimizer, document: dict[str, Any]) -> None:
    if not document["state"] and document["state"] is _EMPTY.get(optimizer):
        _log.warning(
            "%s: the state dict of an optimizer that has not stepped came back, with no state in it. If a checkpoint "
            "was to be read into it, none was: use megatron_fsdp.load_checkpoint, or step once before",
            type(optimizer).__name__,
        )
