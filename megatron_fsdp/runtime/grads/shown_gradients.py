"""What ``.grad`` shows beside a buffer of gradients: a cast for an optimizer's step, and tensors of users."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer
from megatron_fsdp.errors import StateError
from megatron_fsdp.policy.precision import grad_dtype_of
from megatron_fsdp.runtime.step.fsdp_params import FSDPParams

__all__ = ["CastGradients", "allow_any", "refuse_late"]


class CastGradients:
    """Gradients shown in another dtype for the length of an optimizer's step.

    Args:
        dtype: which. wrap: returns the DTensor of a parameter, by its index, over another buffer.
    """

    def __init__(self, dtype: torch.dtype, wrap: Callable[[int, DTensor], DTensor]) -> None:
        self._dtype = dtype
        self._wrap = wrap
        self._replaced: list[tuple[torch.Tensor, torch.Tensor, torch.dtype | None]] = []

    def show(
        self,
        parameters: Sequence[torch.Tensor],
        shown: Sequence[torch.Tensor | None],
        params: Sequence[torch.Tensor],
        buffer: DBuffer,
    ) -> None:
        """Replace ``.grad`` where it has another dtype: those of ``buffer`` by one cast, the user's own one by one."""
        cast: DBuffer | None = None
        for index, (parameter, gradient, param) in enumerate(zip(parameters, shown, params, strict=True)):
            if gradient is None or gradient.dtype is self._dtype:
                continue
            allowed, parameter.grad_dtype = parameter.grad_dtype, None
            if gradient is param:
                cast = cast or buffer.cast(self._dtype)
                parameter.grad = self._wrap(index, cast.get_dtensor(index))
            else:
                parameter.grad = gradient.to(self._dtype)
            self._replaced.append((parameter, gradient, allowed))

    def take_back(self) -> None:
        """Show what was replaced again, but where the step dropped it."""
        replaced, self._replaced = self._replaced, []
        for parameter, gradient, allowed in replaced:
            parameter.grad = gradient if parameter.grad is not None else None
            parameter.grad_dtype = allowed


def allow_any(parameters: Iterable[torch.Tensor]) -> None:
    """Let a gradient of any dtype be assigned where the user did not say which."""
    for parameter in parameters:
        if grad_dtype_of(parameter) == "own":
            parameter.grad_dtype = None


def refuse_late(unit: str, fsdp_params: FSDPParams, dtype: torch.dtype, error: RuntimeError) -> NoReturn:
    """Name the parameter to which no gradient of ``dtype`` could be assigned, and take back what was set.

    Raises:
        StateError: its ``grad_dtype`` is another one. RuntimeError: ``error``, where that of none is.
    """
    for index, parameter in enumerate(fsdp_params.sharded_params):
        if parameter.grad_dtype not in (None, dtype):
            name, found, parameter.grad_dtype = fsdp_params.owned[index].name, parameter.grad_dtype, dtype
            raise StateError(
                f"{unit}: grad_dtype of parameter {name!r} was set to {found} after gradients of "
                f"{dtype} were laid out for it; set it before the first forward"
            ) from error
    raise error
