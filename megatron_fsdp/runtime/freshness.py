"""Optimizer steps: how a group learns that an optimizer may have changed its main weights, and refuses its copies.

Fused and foreach optimizers change a DTensor's memory without touching any version counter, so every step of any
torch.optim.Optimizer in the process counts as a change (docs/design/freshness.md).
"""

from __future__ import annotations

import weakref

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.pending_sums import refuse_pending

__all__ = ["STALE", "mark_gathered", "mark_replaced", "num_optimizer_steps", "refreshes_itself"]

_num_steps = [0]
_REFRESHING: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_CHECKED: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
STALE = "_fsdp_stale"
"""The attribute of tensors that no optimizer may step; its value says why."""


def _count_step(optimizer: Optimizer, *_: object) -> None:
    if optimizer not in _REFRESHING:
        _num_steps[0] += 1


def _check_parameters(optimizer: Optimizer, *_: object) -> None:
    """Refuse sums under way; and tensors whose changes would be lost, once per optimizer and when it has got more."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    refuse_pending(parameters)
    if _CHECKED.get(optimizer) == len(parameters):
        return
    for parameter in parameters:
        reason = parameter.__dict__.get(STALE)
        if reason is not None:
            raise StateError(f"{type(optimizer).__name__} {reason}")
    _CHECKED[optimizer] = len(parameters)


# A compiled step calls them as they are: traced, the count would be a constant of the compiled code.
register_optimizer_step_post_hook(_disable_dynamo(_count_step))
register_optimizer_step_pre_hook(_disable_dynamo(_check_parameters))


def mark_gathered(parameter: torch.Tensor, name: str) -> None:
    """Note that a tensor is a gathered weight, which no optimizer may step."""
    parameter.__dict__[STALE] = (
        f"holds the gathered weights of parameter {name!r} instead of its shard: model.parameters() was called between "
        "a forward and its backward. Build the optimizer before the first forward, or call model.reset_iter_state() "
        "first where a forward has no backward."
    )


def mark_replaced(parameter: torch.Tensor, name: str) -> None:
    """Note that a parameter was replaced by a sharded one, so that no optimizer may step it."""
    parameter.__dict__[STALE] = (
        f"holds parameter {name!r} as it was before fully_shard, which nobody uses any more. Build the optimizer after "
        "fully_shard, or give both to fully_shard_model_and_optimizer."
    )


def num_optimizer_steps() -> int:
    """Return how many steps were taken in this process by optimizers that give no notice themselves."""
    return _num_steps[0]


def refreshes_itself(optimizer: Optimizer) -> None:
    """Say that ``optimizer`` calls ``catch_up`` on its groups after each step, so its steps need no other notice."""
    _REFRESHING.add(optimizer)
