"""Tensors that an optimizer may hold and must not step: what it changes there would be lost."""

from __future__ import annotations

import torch
from torch.optim.optimizer import Optimizer

from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.step.freshness import hear_of_steps

__all__ = ["STALE", "mark_gathered", "mark_replaced"]

STALE = "_fsdp_stale"
"""The attribute of tensors that no optimizer may step; its value says why."""


def _check_parameters(optimizer: Optimizer) -> None:
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if STALE in parameter.__dict__:
            raise StateError(f"{type(optimizer).__name__} {parameter.__dict__[STALE]}")


def _mark(parameter: torch.Tensor, reason: str) -> None:
    hear_of_steps(_check_parameters)
    parameter.__dict__[STALE] = reason


def mark_gathered(parameter: torch.Tensor, name: str) -> None:
    """Note that a tensor is a gathered weight, which no optimizer may step."""
    _mark(
        parameter,
        f"holds the gathered weights of parameter {name!r} instead of its shard: model.parameters() was called between "
        "a forward and its backward. Build the optimizer before the first forward, or call model.reset_iter_state() "
        "first where a forward has no backward.",
    )


def mark_replaced(parameter: torch.Tensor, name: str) -> None:
    """Note that a parameter was replaced by a sharded one, so that no optimizer may step it."""
    _mark(
        parameter,
        f"holds parameter {name!r} as it was before fully_shard, which is used no more. Build the optimizer after "
        "fully_shard, or give both to fully_shard_model_and_optimizer.",
    )
