"""Optimizers over sharded parameters, and the gradient norm over all of them."""

from __future__ import annotations

from typing import Any, TypeVar

from torch.optim import Optimizer

from megatron_fsdp.engine.param_group import groups_stepped_by
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.loaded_state import lay_out_loaded_state, refuse_split_weights, show_fresh_state

__all__ = ["fully_shard_optimizer"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def fully_shard_optimizer(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Show gradients in the dtype of the parameters during every step, and zeros as the state before the first one.

    The optimizer may be any ``torch.optim.Optimizer`` over ``model.parameters()`` of sharded modules; its param
    groups are kept, and may change later. PyTorch's optimizers need this call if gradients are accumulated in another
    dtype than that of the main weights (``MixedPrecisionPolicy(main_grads_dtype=)``). Other optimizers train the same
    without it.

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
    if not groups_stepped_by(optimizer):
        raise ConfigError(
            "fully_shard_optimizer: none of the optimizer's parameters is sharded. fix: build the optimizer "
            "after fully_shard, from model.parameters()."
        )
    show_fresh_state(optimizer)
    optimizer.register_load_state_dict_post_hook(lay_out_loaded_state)
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_restore_dtypes)
    return optimizer


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _match_dtypes(optimizer)
    # A closure makes other gradients.
    args = (args[0], *(_matching(optimizer, each) for each in args[1:]))
    return args, {name: _matching(optimizer, each) for name, each in kwargs.items()}


def _matching(optimizer: Optimizer, argument: Any) -> Any:
    """Return an argument of ``step``; for a closure, one that leaves gradients in the dtype of the parameters."""
    if not callable(argument):
        return argument

    def closure() -> Any:
        _restore_dtypes(optimizer)
        result = argument()
        _match_dtypes(optimizer)
        return result

    return closure


def _match_dtypes(optimizer: Optimizer) -> None:
    # The flat AdamW reads gradients of any dtype, and those of split weights may be wider than the parameters.
    if not getattr(optimizer, "steps_split_weights", False):
        for group in groups_stepped_by(optimizer):
            if group.gradient_buffer is not None:
                group.gradient_buffer.binding.match_parameter_dtype()


def _restore_dtypes(optimizer: Optimizer, *_: Any) -> None:
    for group in groups_stepped_by(optimizer):
        if group.gradient_buffer is not None:
            group.gradient_buffer.binding.restore_dtype()
