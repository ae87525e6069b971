"""Optimizers over sharded parameters, and the gradient norm over all of them."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

from torch.optim import Optimizer

from megatron_fsdp.engine.freshness import refreshes_itself
from megatron_fsdp.engine.param_group import ParameterGroup, announce_step, group_of_parameter
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.loaded_state import (
    lay_out_loaded_state,
    parameters_of,
    refuse_split_weights,
    show_fresh_state,
)

__all__ = ["follow_groups", "fully_shard_optimizer"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def fully_shard_optimizer(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Refresh the compute weights in one pass right after every ``optimizer.step()``, instead of at the next forward.

    The optimizer may be any ``torch.optim.Optimizer`` over ``model.parameters()`` of sharded modules; its param
    groups are kept. Without this
    call training is as correct: the next forward sees that main weights changed.

    The state dict of an optimizer that has not stepped shows its state, of zeros, as Megatron-FSDP's does, so that
    ``torch.distributed.checkpoint.load`` reads a checkpoint into it; ``load_state_dict`` takes it over.

    Raises:
        ConfigError: the optimizer has no sharded parameter; it was probably built before ``fully_shard``. Or it has
            weights that are split (``MixedPrecisionPolicy.split_main_params``), which ``AdamW`` alone steps.

    Example:
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
        model(batch).square().mean().backward()
        optimizer.step()
    """
    refuse_split_weights(optimizer)
    _GROUPS[optimizer] = []
    follow_groups(optimizer)
    if not _GROUPS[optimizer]:
        raise ConfigError(
            "fully_shard_optimizer: none of the optimizer's parameters is sharded. Build the optimizer after "
            "fully_shard, from model.parameters()."
        )
    refreshes_itself(optimizer)
    show_fresh_state(optimizer)
    optimizer.register_load_state_dict_post_hook(lay_out_loaded_state)
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    return optimizer


# The parameter groups that each optimizer given to ``fully_shard_optimizer`` steps.
_GROUPS: weakref.WeakKeyDictionary[Optimizer, list[weakref.ref[ParameterGroup]]] = weakref.WeakKeyDictionary()


def follow_groups(optimizer: Optimizer) -> None:
    """Note which parameter groups an optimizer steps now, if it was given to ``fully_shard_optimizer``."""
    if optimizer not in _GROUPS:
        return
    groups: dict[int, weakref.ref[ParameterGroup]] = {}
    for parameter in parameters_of(optimizer):
        group = group_of_parameter(parameter)
        if group is not None:
            groups[id(group)] = weakref.ref(group)
    _GROUPS[optimizer] = list(groups.values())


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    groups = [group for reference in _GROUPS[optimizer] if (group := reference()) is not None]
    announce_step(groups)
    # The flat AdamW reads gradients of any dtype, and those of split weights may be wider than the parameters.
    for group in groups if not getattr(optimizer, "steps_split_weights", False) else ():
        if group.gradients is not None:
            group.gradients.binding.match_parameter_dtype()


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for reference in _GROUPS[optimizer]:
        group = reference()
        if group is not None and group.gradients is not None:
            group.gradients.binding.restore_dtype()
