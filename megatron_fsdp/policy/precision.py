"""Precision: the dtype of each copy of weights and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, Literal

import torch
from torch import nn

from dbuffer_kernels import QUANT_BLOCK
from megatron_fsdp.errors import ConfigError

__all__ = [
    "GradDtype",
    "GroupDtypes",
    "MixedPrecisionPolicy",
    "as_policy",
    "grad_dtype_of",
    "set_grad_dtype",
]

GradDtype = torch.dtype | Literal["own", "any"]
"""Value of ``grad_dtype_of``: "own" (nothing was set: the parameter's own dtype), "any" (None was set), or a dtype."""

_CHOICES: dict[str, tuple[object, ...]] = {
    "fuse_weight_gradients": (True, False, "wide"),
    "split_main_params": (True, False),
    "moments": (None, "int8"),
    "gather_dtype": (None, "int8_block"),
    "reduction": ("default", "invariant"),
}


@dataclass(frozen=True, slots=True)
class GroupDtypes:
    """The dtypes of one parameter group.

    Attributes:
        compute: dtype of the weights in forward and backward, and of the all-gather.
        main: dtype of ``main_weight``, which the optimizer updates and checkpoints store.
        reduce: dtype of the reduce-scatter.
        main_grad: dtype of the gradient that the optimizer reads, and of accumulation over microbatches.
        is_split: ``main_weight`` is the upper half of FP32 weights, and a buffer of remainders has the lower half.
        gather: "int8_block" if weights are gathered in 8 bits; they are then stored only in ``main``.
        moments: "int8" if the optimizer's moments will be 8-bit codes, so that no shard may cut a block of them.
        accumulate: dtype of the sum over ranks, if wider than ``reduce``; None: ``reduce``.
        reduction: "invariant" if the policy says so; else None.
    """

    compute: torch.dtype
    main: torch.dtype
    reduce: torch.dtype
    main_grad: torch.dtype
    is_split: bool = False
    moments: str | None = None
    gather: str | None = None
    accumulate: torch.dtype | None = None
    reduction: str | None = None

    @property
    def block_numel(self) -> int:
        """Tensors start, and shards are cut, at multiples of this many elements; 1: no restriction."""
        return QUANT_BLOCK if self.moments == "int8" or self.gather else 1

    @property
    def stepped(self) -> torch.dtype:
        """Dtype of the values that the optimizer steps: FP32 for split weights, else that of ``main_weight``."""
        return torch.float32 if self.is_split else self.main


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Mixed precision of one unit. A dtype of None keeps the existing dtype.

    Args:
        param_dtype: compute and all-gather dtype. None: the parameter's own.
        reduce_dtype: dtype of the reduce-scatter and of unreduced gradients. None: ``main_grads_dtype``; else the
            parameter's ``grad_dtype``, which is its own dtype if nothing was set, and ``param_dtype`` if it was set to
            None. FP32 parameters that compute in bf16 are reduced in FP32, as in PyTorch 2.15. If parameters of a unit
            ask for several dtypes, the widest is used.
        output_dtype: floating-point outputs of the module's forward are cast to it.
        cast_forward_inputs: cast floating-point forward inputs to ``param_dtype``.
        main_params_dtype: dtype of the weights that the optimizer steps. None: the parameter's own. ``torch.float32``
            trains a model whose own parameters are bf16 with FP32 main weights.
        main_grads_dtype: dtype in which gradients are stored and accumulated. None: the parameter's ``grad_dtype`` if
            that was set, else the main weights' dtype.
        fuse_weight_gradients: let backward of an ``nn.Linear`` with more than 16,384 weights write the matrix product
            of the weight gradient directly into the unit's packed gradient buffer, if that has the compute dtype. This
            saves a tensor and a copy. "wide": also from 16-bit weights into an FP32 buffer; the summed products are
            then never rounded to 16 bits.
        split_main_params: store no FP32 copy of trained weights, but the 16 bits that their bf16 weights lack. No bit
            is lost: 2 bytes per parameter instead of 4. Gradients are stored in bf16 unless specified otherwise. It
            requires ``param_dtype=torch.bfloat16``, FP32 main weights and ``megatron_fsdp.AdamW``
            (docs/design/adamw.md).
        moments: "int8": ``megatron_fsdp.AdamW(moments="int8")`` will step the unit, so no shard cuts a block of 256
            elements. None: any layout.
        gather_dtype: "int8_block": matrices are gathered as int8, quantized from the main weights of each shard in
            blocks of 256 elements with a scale, and decoded to ``param_dtype``. Values do not depend on the sharding.
            None: they are gathered in ``param_dtype``.
        accumulate_dtype: dtype in which a reduce-scatter sums what the ranks send, if wider than ``reduce_dtype``.
            Ranks exchange their parts, and each sums its shard in a fixed order. Communication stays at 16 bits, while
            sums are rounded as in 32 bits. It takes a second buffer of the unit's packed gradients during the
            reduction. Reductions that run once per step (ZeRO-0 and 1, outer axes) communicate in this dtype. None: the
            communication library sums in ``reduce_dtype``.
        reduction: "invariant": gradients have the same bits on any number of ranks, in every strategy. Microbatches are
            exchanged one by one and summed in FP32 in a fixed order (docs/design/invariance.md). Divide by the number
            of microbatches of all ranks with ``set_gradient_divide_factor``. "default": the fastest way.
        param_dtype_override_fn: called with each parameter when ``fully_shard`` takes it over; it must return the same
            on every rank. It returns the parameter's own dtype, to compute in that, or None or ``param_dtype``. Forward
            inputs are still cast to ``param_dtype``.

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
    reduction: str = "default"
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, name = getattr(self, each.name), each.name
            if name in _CHOICES:
                # Types are compared too, because True == 1.
                is_legal = any(value == choice and type(value) is type(choice) for choice in _CHOICES[name])
                *first, last = map(repr, _CHOICES[name])
                legal = f"{', '.join(first)} or {last}"
            elif name == "param_dtype_override_fn":
                is_legal, legal = value is None or callable(value), "a function of a parameter, or None"
            else:
                is_legal = value is None or (isinstance(value, torch.dtype) and value.is_floating_point)
                legal = "a floating-point torch.dtype or None"
            if not is_legal and name != "cast_forward_inputs":
                raise ConfigError(f"MixedPrecisionPolicy({name}={value!r}). fix: give {legal}")
        if self.reduction == "invariant" and self.accumulate_dtype not in (None, torch.float32):
            raise ConfigError(
                f"MixedPrecisionPolicy(reduction='invariant', accumulate_dtype={self.accumulate_dtype}): invariant "
                "sums are FP32, or reduce_dtype if that is wider. fix: leave accumulate_dtype None"
            )

    def for_parameter(self, name: str, parameter: nn.Parameter) -> MixedPrecisionPolicy:
        """Return the policy of one parameter, with the ``param_dtype`` from ``param_dtype_override_fn``.

        Raises:
            ConfigError: the function returned neither ``param_dtype`` nor the parameter's own dtype.
        """
        if self.param_dtype_override_fn is None:
            return self
        found = self.param_dtype_override_fn(parameter)
        if found is not None and found not in (self.param_dtype, parameter.dtype):
            raise ConfigError(
                f"parameter {name!r}: param_dtype_override_fn returned {found!r}. fix: return its own dtype "
                f"{parameter.dtype}, or None for the policy's param_dtype, which is {self.param_dtype}"
            )
        return replace(self, param_dtype=found or self.param_dtype, param_dtype_override_fn=None)

    def common_reduce_dtype(self, asked: Iterable[tuple[torch.dtype, GradDtype]]) -> torch.dtype | None:
        """Return the ``reduce_dtype`` of a unit: wide enough for all of its gradients, if a parameter sets a dtype.

        Args:
            asked: dtype and ``grad_dtype`` of each trained parameter.
        """
        asked = list(asked)
        if self.reduce_dtype is not None or all(grad_dtype == "own" for _, grad_dtype in asked):
            return self.reduce_dtype
        dtypes = {self._gradient_dtypes(self.param_dtype or own, own, each)[0] for own, each in asked}
        return reduce(torch.promote_types, dtypes)

    def dtypes_for(self, own: torch.dtype, *, requires_grad: bool, grad_dtype: GradDtype = "own") -> GroupDtypes:
        """Return the dtypes of parameters of dtype ``own``. Frozen ones get no wider main copy; integers keep theirs.

        Args:
            grad_dtype: the result of ``grad_dtype_of``.
        Raises:
            ConfigError: weights to split are not bf16 in compute and FP32 in the optimizer.
        """
        if not own.is_floating_point:
            return GroupDtypes(own, own, own, own)
        compute = self.param_dtype or own
        main = (self.main_params_dtype or own) if requires_grad else own
        is_split = self.split_main_params and requires_grad
        if is_split and (compute, main) != (torch.bfloat16, torch.float32):
            raise ConfigError(
                f"MixedPrecisionPolicy(split_main_params=True): parameters of {own} would compute in {compute} and be "
                f"stepped in {main}; only bf16 weights are the upper half of FP32 ones. fix: give "
                "param_dtype=torch.bfloat16 and main_params_dtype=torch.float32, or leave split_main_params False."
            )
        main = compute if is_split else main
        moments = self.moments if requires_grad else None
        dtypes = GroupDtypes(compute, main, main if is_split else own, main, is_split, moments)
        return self.with_gradients(dtypes, grad_dtype)

    def with_gradients(self, dtypes: GroupDtypes, grad_dtype: GradDtype) -> GroupDtypes:
        """Return ``dtypes`` with the requested gradient dtypes; dtypes that are not requested stay."""
        wire, main_grad = self._gradient_dtypes(dtypes.compute, dtypes.reduce, grad_dtype)
        reduction = None if self.reduction == "default" else self.reduction
        wider = None if reduction else self.accumulate_dtype
        wider = None if wider is None or wider.itemsize <= wire.itemsize else wider
        main_grad = main_grad or dtypes.main_grad
        return replace(dtypes, reduce=wire, main_grad=main_grad, accumulate=wider, reduction=reduction)

    def _gradient_dtypes(
        self, compute: torch.dtype, own: torch.dtype, grad_dtype: GradDtype
    ) -> tuple[torch.dtype, torch.dtype | None]:
        """Return the dtype of the reduction, and the requested dtype of resting gradients (None: no request)."""
        if grad_dtype == "any":
            found = self.reduce_dtype or compute
            return found, found
        resting = self.main_grads_dtype if grad_dtype == "own" else grad_dtype
        return self.reduce_dtype or resting or own, resting


def grad_dtype_of(parameter: torch.Tensor) -> GradDtype:
    """Return the ``grad_dtype`` set on a parameter; before PyTorch 2.15, its own dtype counts as not set."""
    found = parameter.grad_dtype
    if not getattr(parameter, "_has_grad_dtype_override", found is not parameter.dtype):
        return "own"
    return "any" if found is None else found


def set_grad_dtype(parameter: torch.Tensor, grad_dtype: GradDtype) -> None:
    """Set the result of ``grad_dtype_of`` on another parameter; "own" sets nothing."""
    if grad_dtype != "own":
        parameter.grad_dtype = None if grad_dtype == "any" else grad_dtype


def as_policy(policy: Any) -> MixedPrecisionPolicy:
    """Return ``policy`` as our ``MixedPrecisionPolicy``; it may be ours, PyTorch's, or None.

    Raises:
        ConfigError: ``policy`` has another class.
    """
    if policy is None:
        return MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if not all(hasattr(policy, name) for name in names):
        raise ConfigError(
            f"mp_policy is a {type(policy).__name__}. fix: give a MixedPrecisionPolicy, ours or "
            "torch.distributed.fsdp's"
        )
    # PyTorch has this field since 2.15.
    override = getattr(policy, "param_dtype_override_fn", None)
    return MixedPrecisionPolicy(**{name: getattr(policy, name) for name in names}, param_dtype_override_fn=override)
