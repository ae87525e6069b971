"""Conversion: what ``nn.Module.to`` and its like mean for parameters that are views of a flat buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.lifecycle.make_param_group import materialize_group, rebuild
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup

__all__ = ["apply_to_group"]


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
