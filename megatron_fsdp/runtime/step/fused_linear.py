"""FusedLinear: linear layers whose backward multiplies the weight's gradient straight into its unit's packed buffer.

Without it autograd makes a tensor of the gradient, which is then copied into the packed buffer: four bytes moved per
bf16 parameter, and memory for both. Here the matrix product writes into the buffer, or adds to what lies there, and
autograd is handed no gradient for the weight. It still tells the weight when all of its uses are through, as for any
parameter (docs/design/fused_gradients.md).
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional

from megatron_fsdp.runtime.step.fsdp_params import NO_BUFFER, WeightHandle

__all__ = ["FusedLinear", "as_factor", "has_transforms", "product_into_buffer"]


class FusedLinear(nn.Linear):
    """Mixed into the class of the linear layers of a unit; it keeps the class's name, and computes what that does.

    ``type(layer).__mro__`` shows it. A copied or unpickled layer is of the original class again.
    """

    _plain_class: type[nn.Linear]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input @ weight.T + bias``, as ``nn.Linear`` does."""
        try:
            # As ``self.weight`` finds them, without a call for each.
            parameters: Any = self._parameters
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:
            # Parametrizations compute them.
            weight, bias = self.weight, self.bias
        if torch.compiler.is_dynamo_compiling():
            return functional.linear(input, weight, bias)
        try:
            handle: WeightHandle = weight._fsdp_handle
        except AttributeError:
            return functional.linear(input, weight, bias)
        # On CPU also where no buffer takes the weight's gradient: PyTorch's operator makes that before the input's, and
        # holds it beside the copy of the weight that oneDNN makes for the latter. Elsewhere that would only cost the
        # host: PyTorch's own operator takes a third of the time for a forward and a backward.
        if handle.gradients is NO_BUFFER and not input.is_cpu:
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
    """Return what the weight is multiplied with: the input, cast as autocast casts it; None where they do not fit."""
    if type(input) not in _PLAIN or input.layout is not torch.strided:
        return None
    if torch.is_autocast_enabled(weight.device.type):
        if torch.get_autocast_dtype(weight.device.type) is not weight.dtype or input.dtype is torch.float64:
            # The weight is cast too, and the gradient that is a matrix product is that of the cast weight.
            return None
        input = input.to(weight.dtype)
    return input if input.dtype is weight.dtype else None


class _ProductIntoBuffer(torch.autograd.Function):
    """``functional.linear``, or ``torch.bmm`` for a weight of three axes.

    The gradient of the weight is added to its unit's buffer, where that takes products.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, handle: WeightHandle
    ) -> torch.Tensor:
        # What ``save_for_backward`` does.
        ctx.to_save = (input, weight if ctx.needs_input_grad[0] else None)
        ctx.handle, ctx.is_batched = handle, weight.ndim == 3
        ctx.materialize_grads = False
        return torch.bmm(input, weight) if ctx.is_batched else functional.linear(input, weight, bias)

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
    """Return the gradient ``left @ right`` of a weight for autograd; None where the buffer took it, or none is wanted.

    Args:
        ctx: whose next node but one is the end of the weight in the graph: it accumulates, and then calls the hook that
            counts arrivals.
    """
    handle: WeightHandle = ctx.handle
    buffer = handle.gradients()
    if buffer is None or not buffer.takes_products or torch.is_grad_enabled():
        return left @ right
    node = ctx.next_functions[1][0]
    weight = node.variable
    if not weight.requires_grad:
        # Frozen since forward.
        return None
    try:
        if not torch._C._will_engine_execute_node(node):
            # torch.autograd.grad, or backward(inputs=...), for other tensors: nothing may be accumulated.
            return None
    except RuntimeError:
        # torch.autograd.grad for this very weight, or a call of the node by hand: the caller gets the gradient.
        return left @ right
    if weight._backward_hooks:
        # Whoever has a hook wants to see the gradient.
        return left @ right
    buffer.receive_product(handle.index, left, right)
    return None


# Its ``apply``, without what callers have seen to and what only other functions need: PyTorch's own looks for
# transforms first, as callers here do, and for another way to call its backward.
_ProductIntoBuffer._backward_cls.apply = _ProductIntoBuffer.backward  # type: ignore[attr-defined]
product_into_buffer: Any = super(torch.autograd.Function, _ProductIntoBuffer).apply
