"""FusedLinear: linear layers whose backward multiplies the weight's gradient straight into its unit's packed buffer.

Otherwise autograd makes a tensor of the gradient, which is then copied into the packed buffer: four bytes moved per
bf16 parameter, and memory for both. Here the matrix product writes into the buffer or adds to it, and autograd gets no
gradient for the weight. Autograd still calls the weight's hook after all of its uses (docs/design/fused_gradients.md).
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional

from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.engine.params import NO_BUFFER, SMALL_NUMEL, WeightHandle, handle_of
from megatron_fsdp.engine.unsharded_param import KINDS

__all__ = [
    "FusedLinear",
    "as_factor",
    "expert_matmul",
    "fuse_linear_layers",
    "has_transforms",
    "offer_products",
    "product_into_buffer",
]


class FusedLinear(nn.Linear):
    """A mixin for the class of a unit's linear layers, with the same name and the same results.

    ``type(layer).__mro__`` shows it. A copied or unpickled layer has the original class again.
    """

    _plain_class: type[nn.Linear]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input @ weight.T + bias``, as ``nn.Linear`` does."""
        try:
            # Faster than ``self.weight``, which calls ``nn.Module.__getattr__``.
            parameters: Any = self._parameters
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:
            # A parametrization computes the weight or the bias.
            weight, bias = self.weight, self.bias
        if torch.compiler.is_dynamo_compiling():
            return functional.linear(input, weight, bias)
        try:
            handle: WeightHandle = weight._fsdp_handle
        except AttributeError:
            return functional.linear(input, weight, bias)
        # On CPU the fused function saves memory even without a buffer: PyTorch's operator computes the weight's
        # gradient first, and holds it while oneDNN copies the weight for the input's gradient. On other devices it
        # would only cost host time: PyTorch's operator takes a third of it for a forward and a backward.
        if handle.gradient_buffer is NO_BUFFER and not input.is_cpu:
            return functional.linear(input, weight, bias)
        if not torch.is_grad_enabled() or has_transforms() or forward_ad._current_level >= 0:
            return functional.linear(input, weight, bias)
        is_cast = input.dtype is not weight.dtype or torch.is_autocast_enabled(input.device.type)
        factor = as_factor(input, weight) if is_cast else input
        is_plain = type(factor) in _PLAIN and factor.layout is torch.strided  # type: ignore[union-attr]  # None is no tensor
        if not is_plain or not weight.requires_grad or (bias is not None and bias.dtype is not weight.dtype):
            return functional.linear(input, weight, bias)
        output: torch.Tensor = product_into_buffer(factor, weight, bias, handle)
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = tuple(super().__reduce_ex__(protocol))
        return copyreg._reconstructor, (self._plain_class, object, None), *state  # type: ignore[attr-defined]


_PLAIN = (torch.Tensor, nn.Parameter)
has_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active


def as_factor(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Return the input cast as autocast casts it, to multiply the weight with; None if their dtypes differ."""
    if type(input) not in _PLAIN or input.layout is not torch.strided:
        return None
    if torch.is_autocast_enabled(weight.device.type):
        if torch.get_autocast_dtype(weight.device.type) is not weight.dtype or input.dtype is torch.float64:
            # Autocast casts the weight too, and the matrix product would be the gradient of the cast weight.
            return None
        input = input.to(weight.dtype)
    return input if input.dtype is weight.dtype else None


class _ProductIntoBuffer(torch.autograd.Function):
    """``functional.linear``, or ``torch.bmm`` for a weight of three axes.

    Backward adds the gradient of the weight to its unit's buffer if that takes products.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, handle: WeightHandle
    ) -> torch.Tensor:
        # The same as ``save_for_backward``, without the call.
        ctx.to_save = (input, weight if ctx.needs_input_grad[0] else None)
        ctx.handle, ctx.is_batched = handle, weight.ndim == 3
        ctx.materialize_grads = False
        if ctx.is_batched:
            return torch.bmm(input, weight)
        output = functional.linear(input, weight, bias)
        # With a bias the output may be a view. Autograd forbids changing a view that a function returns in place, which
        # models do (``x += residual``). ``data`` is the same memory, but no view.
        return output if bias is None or not output._is_view() else output.data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None
        input, weight = ctx.saved_tensors
        if ctx.is_batched:
            of_input = None if weight is None else torch.bmm(gradient, weight.mT)
            return of_input, _weight_gradient(ctx, input.mT, gradient), None, None
        rows, inputs = gradient, input
        if input.ndim > 2:
            rows, inputs = gradient.flatten(0, -2), input.flatten(0, -2)
        elif input.ndim == 1:
            rows, inputs = gradient.unsqueeze(0), input.unsqueeze(0)
        of_input = None if weight is None else torch.mm(rows, weight)
        if of_input is not None and inputs is not input:
            of_input = of_input.view(input.shape)
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return of_input, _weight_gradient(ctx, rows.T, inputs), of_bias, None


def _weight_gradient(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient ``left @ right`` of a weight for autograd; None if the buffer took it or none is wanted.

    Args:
        ctx: of the backward. Its second next function is the weight's AccumulateGrad node.
    """
    handle: WeightHandle = ctx.handle
    buffer = handle.gradient_buffer()
    if buffer is None or not buffer.takes_products or torch.is_grad_enabled():
        return left @ right
    node = ctx.next_functions[1][0]
    weight = node.variable
    if not weight.requires_grad:
        # The user has frozen the weight since forward.
        return None
    try:
        if not torch._C._will_engine_execute_node(node):
            # torch.autograd.grad or backward(inputs=...) for other tensors must accumulate nothing here.
            return None
    except RuntimeError:
        # torch.autograd.grad for this very weight, or a call of the node by hand: the caller gets the gradient.
        return left @ right
    if weight._backward_hooks:
        # The user's hook must see the gradient.
        return left @ right
    buffer.receive_product(handle.index, left, right)
    return None


# ``_ProductIntoBuffer.apply`` without two checks: for functorch transforms, which callers here have made, and for a
# ``vjp`` instead of a ``backward``.
_ProductIntoBuffer._backward_cls.apply = _ProductIntoBuffer.backward  # type: ignore[attr-defined]
product_into_buffer: Any = super(torch.autograd.Function, _ProductIntoBuffer).apply


# ---------------------------------------------------------------- which layers and weights


_WEIGHTS = (torch.Tensor, nn.Parameter, *KINDS)
MIN_NUMEL = SMALL_NUMEL + 1
"""Smaller weights are not fused, which would cost more host time than copying their gradients in one call."""


def fuse_linear_layers(owned: Iterable[OwnedParameter]) -> None:
    """Mix ``FusedLinear`` into the linear layers whose weight is one of the parameters.

    Skip layers that override ``forward``, small weights, and weights that tensor parallelism has sharded.
    """
    for parameter in owned:
        if parameter.parameter.numel() < MIN_NUMEL:
            continue
        for info in parameter.param_module_infos:
            kind = type(info.module)
            if parameter.tensor_parallel is None and info.attribute == "weight" and kind.forward is nn.Linear.forward:
                info.module.__class__ = _fused_class(kind)  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _fused_class(kind: type[nn.Linear]) -> type[FusedLinear]:
    # Models print the class name and units are named after it, so it stays; the qualified name differs.
    namespace = {"__module__": kind.__module__, "__qualname__": f"FusedLinear.{kind.__name__}", "_plain_class": kind}
    return type(kind.__name__, (FusedLinear, kind), namespace)


def offer_products(
    weights: Sequence[torch.Tensor],
    views: Sequence[torch.Tensor],
    receiver: object,
    *,
    is_wide: bool = False,
) -> None:
    """Make backward multiply gradients of weights into ``views``, if a weight and its view have the same dtype.

    Args:
        weights: the unsharded parameters, in plan order. views: their slices of the packed buffer.
        receiver: the ``GradientBuffer`` of these views.
        is_wide: also multiply gradients of 16-bit weights into FP32 views.
    """
    for index, (weight, view) in enumerate(zip(weights, views, strict=True)):
        is_plain = type(weight) in _WEIGHTS and weight.ndim in (2, 3) and weight.is_floating_point()
        fits = weight.dtype is view.dtype or (is_wide and weight.itemsize == 2 and view.dtype is torch.float32)
        if is_plain and fits and weight.device == view.device:
            handle = handle_of(weight)
            handle.gradient_buffer, handle.index = weakref.ref(receiver), index


def expert_matmul(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``torch.bmm(input, weight)``; backward multiplies the gradient of an expert weight into its unit's buffer.

    For models that compute their experts in batches of equal size. ``torch.bmm`` would first make a tensor of the
    gradients of all experts. If the weight is not gathered, or the conditions for fusing ``nn.Linear`` do not hold,
    this function calls ``torch.bmm`` (docs/design/fused_gradients.md).

    Args:
        input: (experts, tokens, in). weight: (experts, in, out).
    Returns:
        (experts, tokens, out).

    Example:
        experts = nn.Parameter(torch.randn(8, 16, 32))
        tokens = torch.randn(8, 100, 16)  # 100 tokens for each of 8 experts
        output = expert_matmul(tokens, experts)
    """
    handle: WeightHandle | None = getattr(weight, "_fsdp_handle", None)
    # Neither a functorch transform nor forward mode may record the product.
    is_plain = torch.is_grad_enabled() and not has_transforms() and forward_ad._current_level < 0
    if torch.compiler.is_compiling() or handle is None or not is_plain:
        return torch.bmm(input, weight)
    takes = weight.requires_grad and handle.gradient_buffer() is not None
    factor = as_factor(input, weight) if takes else None
    if factor is None:
        return torch.bmm(input, weight)
    output: torch.Tensor = product_into_buffer(factor, weight, None, handle)
    return output
