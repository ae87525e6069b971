"""What a training step asks of each sharded parameter: its ``.grad``, and whether any was frozen."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dbuffer.dtensor.placed_tensor import PlacedTensor

__all__ = ["NUM_FLAGS_SET", "GradDrops", "ParameterTensor"]

AnyParameter = TypeVar("AnyParameter", bound="ParameterTensor")

_GRAD: Any = torch.Tensor.grad
_get_grad, _set_grad = _GRAD.__get__, _GRAD.__set__
# Calls a function without the overrides of subclasses, in less time than it takes to switch them off and on.
_plainly: Any = torch._C._disabled_torch_function_impl
_REQUIRES_GRAD: Any = torch._C.TensorBase.requires_grad
NUM_FLAGS_SET = [0]
"""How often any sharded tensor was frozen or unfrozen so far: one number to look at instead of each."""


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
    """A sharded tensor whose ``.grad`` and ``requires_grad`` are properties of its own.

    Attributes:
        on_grad_dropped: what is called when ``.grad`` is set to None by Python code.
        gradient_of: the parameter whose ``.grad`` this is, where its memory takes that parameter's next gradients: any
            other one is given a copy of it.
    """

    on_grad_dropped: GradDrops | None = None
    gradient_of: weakref.ref[torch.Tensor] | None = None

    @property
    def grad(self) -> torch.Tensor | None:
        """As of any tensor; a property of its own because optimizers read it of every parameter in every step."""
        gradient: torch.Tensor | None = _plainly(_get_grad, (), (self,))
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            _plainly(_set_grad, (), (self, None))
            drops = self.on_grad_dropped
            if drops is not None and (drops.last is None or drops.last() is self):
                drops.function()
            return
        if isinstance(value, ParameterTensor) and value.gradient_of is not None:
            value = value if value.gradient_of() is self else value.clone()
        _plainly(_set_grad, (), (self, value))

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def requires_grad(self) -> bool:
        """As of any tensor; a property of its own so that a change is noticed."""
        with torch._C.DisableTorchFunctionSubclass():
            flag: bool = _REQUIRES_GRAD.__get__(self)
            return flag

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        NUM_FLAGS_SET[0] += 1
        with torch._C.DisableTorchFunctionSubclass():
            _REQUIRES_GRAD.__set__(self, value)

    def requires_grad_(self: AnyParameter, requires_grad: bool = True) -> AnyParameter:
        """As of any tensor."""
        NUM_FLAGS_SET[0] += 1
        with torch._C.DisableTorchFunctionSubclass():
            super().requires_grad_(requires_grad)
        return self


_FRAMES = torch._C._dynamo.eval_frame
# Dynamo has no word for what these call: it breaks its graph there, and they run as they are.
for _property in (ParameterTensor.__dict__["grad"], ParameterTensor.__dict__["requires_grad"]):
    for _function in (_property.fget, _property.fset):
        _function._torchdynamo_disable = True
        _FRAMES.set_code_exec_strategy(
            _function.__code__, _FRAMES._FrameExecStrategy(_FRAMES._FrameAction.SKIP, _FRAMES._FrameAction.DEFAULT)
        )
