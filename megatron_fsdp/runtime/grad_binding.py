"""The ``.grad`` of many sharded parameters at once, and small gradients on their way into a buffer together.

An attribute of a DTensor costs a Python call, a copy of a few elements a launch; a unit has dozens of each.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer

__all__ = ["CastGradients", "SmallGradients", "assign_grads", "clear_grads", "grads_of", "outside"]

_GRAD: Any = torch._C.TensorBase.grad
_get, _set = _GRAD.__get__, _GRAD.__set__
_SMALL_NUMEL = 1 << 14
_MAX_WAITING = 64


def grads_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return ``.grad`` of each parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_get, parameters))


def clear_grads(parameters: Iterable[torch.Tensor]) -> None:
    """Set ``.grad`` of each parameter to None."""
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            _set(parameter, None)


def assign_grads(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], wanted: Sequence[int]
) -> list[Callable[[], object]]:
    """Set ``.grad`` of the parameters that are wanted (nonzero); return the calls of their hooks, in order."""
    calls: list[Callable[[], object]] = []
    with torch._C.DisableTorchFunctionSubclass():
        for parameter, gradient, is_wanted in zip(parameters, gradients, wanted, strict=True):
            if is_wanted:
                if _get(parameter) is not gradient:
                    _set(parameter, gradient)
                hooks: dict[int, Callable[..., object]] | None = parameter._post_accumulate_grad_hooks
                if hooks:
                    calls += (functools.partial(hook, parameter) for hook in hooks.values())
    return calls


def outside(
    gradients: Sequence[torch.Tensor | None], faces: Sequence[torch.Tensor], buffer: DBuffer
) -> list[torch.Tensor]:
    """Return this rank's parts of those gradients that are tensors of their own, not the buffer's.

    Args:
        gradients: DTensors, in the order of the buffer's tensors; None for none.
        faces: known to be the buffer's, in the same order; none where they were not made yet.
    """
    if faces and all(map(operator.is_, gradients, faces)):
        return []
    found = []
    for index, gradient in enumerate(gradients):
        local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
        if local is not None and local.numel() and local.data_ptr() != buffer.get_local_tensor(index).data_ptr():
            found.append(local)
    return found


class CastGradients:
    """Gradients shown in another dtype for the length of an optimizer's step.

    Args:
        dtype: which. wrap: returns the DTensor of a parameter, by its index, over another buffer.
    """

    def __init__(self, dtype: torch.dtype, wrap: Callable[[int, DTensor], DTensor]) -> None:
        self._dtype = dtype
        self._wrap = wrap
        self._replaced: list[tuple[torch.Tensor, torch.Tensor]] = []

    def show(
        self,
        parameters: Sequence[torch.Tensor],
        shown: Sequence[torch.Tensor | None],
        faces: Sequence[torch.Tensor],
        buffer: DBuffer,
    ) -> None:
        """Replace ``.grad`` where it has another dtype: those of ``buffer`` by one cast, the user's own one by one."""
        cast: DBuffer | None = None
        for index, (parameter, gradient, face) in enumerate(zip(parameters, shown, faces, strict=True)):
            if gradient is None or gradient.dtype is self._dtype:
                continue
            if gradient is face:
                cast = cast or buffer.cast(self._dtype)
                parameter.grad = self._wrap(index, cast.get_dtensor(index))
            else:
                parameter.grad = gradient.to(self._dtype)
            self._replaced.append((parameter, gradient))

    def take_back(self) -> None:
        """Show what was replaced again, but where the step dropped it."""
        replaced, self._replaced = self._replaced, []
        for parameter, gradient in replaced:
            parameter.grad = gradient if parameter.grad is not None else None


class SmallGradients:
    """Gradients of few elements that wait for each other, to be copied in one call, and one launch.

    Args:
        views: where the gradient of each parameter belongs.
    """

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views = views
        self._is_small = [view.numel() <= _SMALL_NUMEL for view in views]
        self._targets: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []

    def copy(self, index: int, gradient: torch.Tensor) -> None:
        """Copy a gradient into its view, at once or at the next ``pack``."""
        if not self._is_small[index]:
            self._views[index].copy_(gradient)
            return
        self._targets.append(self._views[index])
        self._gradients.append(gradient)
        if len(self._gradients) == _MAX_WAITING:
            self.pack()

    def pack(self) -> None:
        """Copy what waits."""
        if self._gradients:
            torch._foreach_copy_(self._targets, self._gradients)
            self.drop()

    def drop(self) -> None:
        """Forget what waits."""
        self._targets.clear()
        self._gradients.clear()
