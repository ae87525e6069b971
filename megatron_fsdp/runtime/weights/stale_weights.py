"""Tensors that an optimizer may hold and must not step: what it changes there would be lost."""

from __future__ import annotations

from torch.optim.optimizer import Optimizer

from dbuffer import FlatDTensor
from megatron_fsdp.build.ownership import owned_name
from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.step.parameter_group import group_of_parameter

__all__ = ["refuse_stale"]


def refuse_stale(optimizer: Optimizer) -> None:
    """Refuse an optimizer that holds gathered weights, or parameters that sharded ones have replaced.

    Raises:
        StateError: it names the first of them.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        handle, name = parameter.__dict__.get("_fsdp_handle"), owned_name(parameter)
        if handle is not None and handle.parameter:
            raise StateError(
                f"{type(optimizer).__name__} holds the gathered weights of parameter {handle.parameter!r} instead of "
                "its shard: model.parameters() was called between a forward and its backward. Build the optimizer "
                "before the first forward, or call model.reset_iter_state() first where a forward has no backward."
            )
        if name is None:
            continue
        group = group_of_parameter(parameter)
        # A sharded one without a group is of a model that is gone.
        is_current = isinstance(parameter, FlatDTensor) if group is None else parameter is group.parameters.get(name)
        if not is_current:
            raise StateError(
                f"{type(optimizer).__name__} holds parameter {name!r} as it was before fully_shard, to_empty or an "
                "assignment, which is used no more. Build the optimizer afterwards, or give both to "
                "fully_shard_model_and_optimizer."
            )
