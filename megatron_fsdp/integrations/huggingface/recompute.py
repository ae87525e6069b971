"""Activation checkpointing of a model's layers, inside of their units."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp.errors import ConfigError

__all__ = ["recompute_in_backward", "refuse_own_checkpointing"]

# By these names layers are handed the keys and values of earlier tokens. Computing a layer again would add to them.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


class _Recomputed(nn.Module):
    """Mixed into the class of a layer whose activations are computed again in backward."""

    # The hooks of the unit are called outside of forward, so weights are gathered once for both computations.
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward
        if not (self.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        refuse_own_checkpointing(self)
        arguments = {**kwargs, **{name: None for name in _CACHES if name in kwargs}}
        if kwargs.get("use_cache"):
            arguments["use_cache"] = False
        values = [None if hasattr(value, "get_seq_length") else value for value in args]
        return checkpoint(functools.partial(run, **arguments), *values, use_reentrant=False)


def recompute_in_backward(layers: Iterable[nn.Module]) -> None:
    """Make layers compute their activations again in backward, in place; what they return does not change.

    Call it before ``fully_shard``. Layers get no cache of keys and values while they train.
    """
    for layer in layers:
        layer.__class__ = _recomputed_class(type(layer))  # type: ignore[arg-type]  # classes are hashable


def refuse_own_checkpointing(model: nn.Module) -> None:
    """Refuse a model that was told to checkpoint by itself."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            raise ConfigError(
                f"activation_checkpointing contradicts gradient checkpointing, which {type(module).__name__} has on: "
                "leave out gradient_checkpointing_enable(), and its like in TrainingArguments"
            )


@functools.cache
def _recomputed_class(cls: type[nn.Module]) -> type[nn.Module]:
    # The name stays: tools find layers by it.
    return type(cls.__name__, (_Recomputed, cls), {"__module__": cls.__module__})
