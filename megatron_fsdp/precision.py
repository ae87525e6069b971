"""Which dtype each copy of the weights and gradients has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.structure import map_tensors

__all__ = ["GroupDtypes", "MixedPrecisionPolicy", "as_policy", "caster"]


@dataclass(frozen=True, slots=True)
class GroupDtypes:
    """The four dtypes of one parameter group.

    Attributes:
        compute: of the weights that forward and backward see, and of the all-gather.
        main: of the weights that the optimizer updates and checkpoints hold.
        reduce: of the reduce-scatter.
        main_grad: of the gradient that the optimizer reads, and of its accumulation over microbatches.
    """

    compute: torch.dtype
    main: torch.dtype
    reduce: torch.dtype
    main_grad: torch.dtype


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Mixed precision of one unit. Every field may be None, which keeps what is there.

    Args:
        param_dtype: compute and all-gather dtype. None: the parameter's own.
        reduce_dtype: reduce-scatter dtype. None: the compute dtype.
        output_dtype: floating-point outputs of the module's forward are cast to it.
        cast_forward_inputs: cast floating-point forward inputs to ``param_dtype``.
        main_params_dtype: dtype of the weights the optimizer steps. None: the parameter's own. Give
            ``torch.float32`` to train a
            model whose own parameters are bf16 with FP32 main weights.
        main_grads_dtype: dtype in which gradients rest and accumulate. None: the main weights'.
        fuse_weight_gradients: let the backward of ``nn.Linear`` multiply the weight's gradient straight into the unit's
            packed gradient buffer, which saves a tensor and a copy, wherever that buffer has the compute dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    main_params_dtype: torch.dtype | None = None
    main_grads_dtype: torch.dtype | None = None
    fuse_weight_gradients: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "cast_forward_inputs" or value is None:
                continue
            if field.name == "fuse_weight_gradients":
                if not isinstance(value, bool):
                    raise ConfigError(f"MixedPrecisionPolicy({field.name}={value!r}): give True or False")
                continue
            if not isinstance(value, torch.dtype) or not value.is_floating_point:
                raise ConfigError(
                    f"MixedPrecisionPolicy({field.name}={value!r}): give a floating-point torch.dtype or None"
                )

    def dtypes_for(self, own: torch.dtype, *, requires_grad: bool) -> GroupDtypes:
        """Return the dtypes for parameters of dtype ``own``. Frozen ones get no wider main copy; integers stay."""
        if not own.is_floating_point:
            return GroupDtypes(own, own, own, own)
        compute = self.param_dtype or own
        main = (self.main_params_dtype or own) if requires_grad else own
        return GroupDtypes(compute, main, self.reduce_dtype or compute, self.main_grads_dtype or main)


def as_policy(policy: Any) -> MixedPrecisionPolicy:
    """Return our policy for ours, for PyTorch's ``MixedPrecisionPolicy``, or for None.

    Raises:
        ConfigError: ``policy`` is something else.
    """
    if policy is None:
        return MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if not all(hasattr(policy, name) for name in names):
        raise ConfigError(
            f"mp_policy is a {type(policy).__name__}; give a MixedPrecisionPolicy, ours or torch.distributed.fsdp's"
        )
    return MixedPrecisionPolicy(**{name: getattr(policy, name) for name in names})


@functools.cache
def caster(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return a function that casts every floating-point tensor in a nested structure to ``dtype``."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not dtype else tensor

    return functools.partial(map_tensors, cast)
