"""What a training step asks of each sharded parameter: its ``.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from dbuffer.dtensor.placed_tensor import PlacedTensor, keep_from_dynamo

_GRAD: Any = torch.Tensor.grad
_get_grad, _set_grad = _GRAD.__get__, _GRAD.__set__
# Calls a function without the overrides of subclasses, in less time than it takes to switch them off and on.
_plainly: Any = torch._C._disabled_torch_function_impl


class GradDrops:
    """Calls a function when ``.grad`` of tensors that share it is set to None by Python code.

    Attributes:
        last: the only tensor of which it is called; None for any.
    """

    __slots__ = ("function", "last")

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.last: weakref.ref[torch.Tensor] | None = None


class ParameterTensor(PlacedTensor):
    """A sharded tensor whose ``.grad`` is a property of its own: optimizers read it of all parameters in every step.

    Attributes:
        on_grad_dropped: what is called when ``.grad`` is set to None by Python code.
        pending_grad: what ``.grad`` shows instead of what it is, until it is set.
        gradient_of: the parameter whose ``.grad`` this is, where its memory takes that parameter's next gradients: any
            other one is given a copy of it.
    """

    on_grad_dropped: GradDrops | None = None
    pending_grad: torch.Tensor | None = None
    gradient_of: weakref.ref[torch.Tensor] | None = None

    @property
    def grad(self) -> torch.Tensor | None:
        """As of any tensor."""
        if self.pending_grad is not None:
            return self.pending_grad
        gradient: torch.Tensor | None = _plainly(_get_grad, (), (self,))
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None and (owner := getattr(value, "gradient_of", None)) and owner() is not self:
            value = value.clone()
        _plainly(_set_grad, (), (self, value))
        if self.pending_grad is not None:
            self.pending_grad = None
        drops = self.on_grad_dropped
        if value is None and drops is not None and (drops.last is None or drops.last() is self):
            drops.function()

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


keep_from_dynamo(ParameterTensor.__dict__["grad"])
