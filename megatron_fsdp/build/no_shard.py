"""fsdp_no_shard: parameters that stay whole on every rank; their gradients are reduced with the others."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from megatron_fsdp.errors import ConfigError

__all__ = ["fsdp_no_shard", "is_no_shard"]

T = TypeVar("T", bound="nn.Module | nn.Parameter")
_MARK = "_fsdp_no_shard"


def fsdp_no_shard(target: T) -> T:
    """Keep a module's parameters, or one parameter, replicated: no gather before use; gradients are still averaged.

    Call it before ``fully_shard``. The parameters become part of the unit around them, which all-reduces their
    gradients on the last microbatch, and optimizer state is whole on every rank. Replicate parameters that are tiny,
    used everywhere, or used outside of any forward. ``fully_shard`` on a marked module, or on a module below one, does
    nothing, so the module gets no hooks. ``explain`` lists the replicated parameters.

    Args:
        target: a module, with everything below it, or a parameter. Modules keep the mark through ``to_empty`` and
            meta initialisation. PyTorch makes new parameter objects there, so mark a single parameter afterwards, or
            shard it first and call ``to_empty`` on the sharded model.
    Returns:
        ``target``.
    Raises:
        ConfigError: ``target`` is neither.

    Example:
        for block in model.blocks:
            fsdp_no_shard(block.norm)  # small, and used by every token
            fully_shard(block)
    """
    if isinstance(target, nn.Module):
        for module in target.modules():
            setattr(module, _MARK, True)
    elif isinstance(target, nn.Parameter):
        setattr(target, _MARK, True)
    else:
        raise ConfigError(f"fsdp_no_shard: found {type(target).__name__}. fix: give a module or a parameter")
    return target


def is_no_shard(target: nn.Module | nn.Parameter) -> bool:
    """Return whether ``fsdp_no_shard`` was called on a parameter, on its module, or on a module above."""
    return bool(vars(target).get(_MARK, False))
