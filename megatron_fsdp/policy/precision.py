"""Which dtype each copy of the weights and gradients has."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from dbuffer_kernels import QUANT_BLOCK
from dbuffer_kernels.quantize import MX_BLOCK
from megatron_fsdp.errors import ConfigError

__all__ = [
    "GroupDtypes",
    "MixedPrecisionPolicy",
    "as_policy",
]


GATHER_DTYPES = ("fp8", "mxfp8", "int8_block")


@dataclass(frozen=True, slots=True)
class GroupDtypes:
    """The four dtypes of one parameter group.

    Attributes:
        compute: of the weights that forward and backward see, and of the all-gather.
        main: of ``main_weight``, which the optimizer updates and checkpoints hold.
        reduce: of the reduce-scatter.
        main_grad: of the gradient that the optimizer reads, and of its accumulation over microbatches.
        is_split: ``main_weight`` is the upper half of FP32 weights, and a buffer of remainders holds the lower.
        gather: "fp8", "mxfp8" or "int8_block" where weights travel in 8 bits and rest in ``main`` alone otherwise.
        moments: "int8" where the optimizer's moments will be 8-bit codes, so that no shard may cut a block of them.
        accumulate: of the sum over ranks, where that is wider than ``reduce``; None: ``reduce``.
    """

    compute: torch.dtype
    main: torch.dtype
    reduce: torch.dtype
    main_grad: torch.dtype
    is_split: bool = False
    moments: str | None = None
    gather: str | None = None
    accumulate: torch.dtype | None = None

    @property
    def block_numel(self) -> int:
        """Elements at whose multiples tensors begin and shards are cut; 1 where nothing asks for it."""
        if self.moments == "int8" or self.gather == "int8_block":
            return QUANT_BLOCK
        return MX_BLOCK if self.gather == "mxfp8" else 1

    @property
    def stepped(self) -> torch.dtype:
        """Of the values that the optimizer steps: FP32 for split weights, else that of ``main_weight``."""
        return torch.float32 if self.is_split else self.main


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
            packed gradient buffer, which saves a tensor and a copy, wherever that buffer has the compute dtype. "wide":
            also into an FP32 buffer from bf16 or fp16 weights; what is then summed was never rounded to 16 bits.
        split_main_params: keep no FP32 copy of trained weights, but the 16 bits that the bf16 ones lack of it, without
            losing a bit: 2 bytes per parameter instead of 4, and gradients rest in bf16 unless told otherwise. For
            ``param_dtype=torch.bfloat16``, FP32 main weights and ``megatron_fsdp.AdamW`` (docs/design/adamw.md).
        moments: "int8" says that ``megatron_fsdp.AdamW(moments="int8")`` will step the unit: its buffers are laid out
            so that no shard cuts a block of 256 elements. None: any layout.
        gather_dtype: how matrices travel in the all-gather, in bytes quantized from the main weights of each shard:
            "fp8" (E4M3, a scale per tensor), "mxfp8" (E4M3, a power of two for 32 elements of a row in forward, of a
            column in backward), "int8_block" (256 elements share a scale). They compute in ``param_dtype`` again;
            gradients stay as they are. Values are the same for any sharding. None: they travel in ``param_dtype``.
        accumulate_dtype: dtype in which a reduce-scatter adds up what the ranks send, where that is wider than
            ``reduce_dtype``: ranks exchange their parts, and each adds up its own in an order that no algorithm of a
            communication library chooses. The bytes of 16 bits, and sums that are rounded like those of 32; it takes a
            second buffer of the unit's packed gradients while they are reduced. None: the library adds up, in
            ``reduce_dtype``.

    Example:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)  # computes in bf16, reduces in FP32
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    main_params_dtype: torch.dtype | None = None
    main_grads_dtype: torch.dtype | None = None
    fuse_weight_gradients: bool | str = True
    split_main_params: bool = False
    moments: str | None = None
    gather_dtype: str | None = None
    accumulate_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.moments not in (None, "int8"):
            raise ConfigError(f"MixedPrecisionPolicy(moments={self.moments!r}): give 'int8' or None")
        if self.gather_dtype not in (None, *GATHER_DTYPES):
            names = ", ".join(map(repr, GATHER_DTYPES))
            raise ConfigError(f"MixedPrecisionPolicy(gather_dtype={self.gather_dtype!r}): give {names} or None")
        for field in fields(self):
            if field.name in ("moments", "gather_dtype"):
                continue
            value = getattr(self, field.name)
            if field.name == "cast_forward_inputs" or (value is None and field.name != "split_main_params"):
                continue
            if field.name in ("fuse_weight_gradients", "split_main_params"):
                choices = "True, False or 'wide'" if field.name == "fuse_weight_gradients" else "True or False"
                if not isinstance(value, bool) and (value != "wide" or field.name != "fuse_weight_gradients"):
                    raise ConfigError(f"MixedPrecisionPolicy({field.name}={value!r}): give {choices}")
                continue
            if not isinstance(value, torch.dtype) or not value.is_floating_point:
                raise ConfigError(
                    f"MixedPrecisionPolicy({field.name}={value!r}): give a floating-point torch.dtype or None"
                )

    def dtypes_for(self, own: torch.dtype, *, requires_grad: bool) -> GroupDtypes:
        """Return the dtypes for parameters of dtype ``own``. Frozen ones get no wider main copy; integers stay.

        Raises:
            ConfigError: weights to split that are not bf16 in compute and FP32 in the optimizer.
        """
        if not own.is_floating_point:
            return GroupDtypes(own, own, own, own)
        compute = self.param_dtype or own
        main = (self.main_params_dtype or own) if requires_grad else own
        is_split = self.split_main_params and requires_grad
        if is_split and (compute, main) != (torch.bfloat16, torch.float32):
            raise ConfigError(
                f"MixedPrecisionPolicy(split_main_params=True): parameters of {own} would compute in {compute} and be "
                f"stepped in {main}; only bf16 weights are the upper half of FP32 ones. Give "
                "param_dtype=torch.bfloat16 and main_params_dtype=torch.float32, or leave split_main_params False."
            )
        main = torch.bfloat16 if is_split else main
        moments = self.moments if requires_grad else None
        reduce, accumulate = self.reduce_dtype or compute, self.accumulate_dtype
        if accumulate is not None and accumulate.itemsize <= reduce.itemsize:
            accumulate = None
        return GroupDtypes(
            compute, main, reduce, self.main_grads_dtype or main, is_split, moments, accumulate=accumulate
        )


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
