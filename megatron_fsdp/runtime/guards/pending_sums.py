"""PendingSums: what ``.grad`` of sharded parameters is while their gradients are sums under way.

Between microbatches that keep gradients on this rank, and after a backward that raised, there is nothing that a reader
of ``.grad`` could be shown. None would hide what users do meanwhile: who sets ``.grad`` to None or zeroes it throws the
sum away, and who steps an optimizer would step without it. So ``.grad`` is a tensor that may be dropped and zeroed,
that takes what autograd adds to it, and that no operator reads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dbuffer.dtensor.flat_dtensor import FlatDTensor
from megatron_fsdp.runtime.guards.pending_sum import PendingRows, PendingSum
from megatron_fsdp.runtime.step.freshness import CHECKS

__all__ = ["PendingSums"]

_GRAD: Any = torch._C.TensorBase.grad
_set = _GRAD.__set__


class PendingSums:
    """The pending gradients of one group, made when the first one has to be shown or added to.

    Args:
        parameters: the sharded ones. gradients: final gradients to stand in for, one each.
        describe: returns the words of the error for who reads that of parameter ``index``.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], gradients: Iterable[DTensor], describe: Callable[[int], str]
    ) -> None:
        self._parameters = parameters
        self._sums: list[PendingSum] = []
        self._gradients: list[FlatDTensor] = []
        self._touched = [False]
        for index, gradient in enumerate(gradients):
            assert isinstance(gradient, FlatDTensor)
            pending = PendingSum(
                lambda index=index: describe(index),  # type: ignore[misc]  # the default binds the number
                gradient._local_tensor,
                self._touched,
            )
            self._sums.append(pending)
            self._gradients.append(gradient.with_local(PendingRows(gradient._local_tensor, pending)))
        self._is_shown = False
        # What ``.grad`` of each parameter is unless somebody but this object sets it.
        self._expected: list[DTensor | None] = [None] * len(self._sums)

    def show(self, wanted: Sequence[int]) -> None:
        """Set ``.grad`` of the parameters whose sum is under way (nonzero)."""
        if not self._is_shown:
            CHECKS.append(_refuse_pending)
        self._is_shown = True
        with torch._C.DisableTorchFunctionSubclass():
            for index, is_wanted in enumerate(wanted):
                if is_wanted:
                    self._expected[index] = self._gradients[index]
                    _set(self._parameters[index], self._gradients[index])

    def follow(self, parameters: Sequence[torch.Tensor]) -> None:
        """Show pending gradients on other objects from now on; what their ``.grad`` is stays."""
        self._parameters = parameters

    def end(self) -> None:
        """Say that the sum is under way no more, and forget what happened to it; whoever calls this sets ``.grad``."""
        if self._is_shown:
            CHECKS.remove(_refuse_pending)
        self._is_shown = False
        self._expected = [None] * len(self._sums)
        if self._touched[0]:
            for pending in self._sums:
                pending.forget()
            self._touched[0] = False

    def is_untouched(self, shown: Sequence[torch.Tensor | None]) -> bool:
        """Whether every ``.grad`` is what was set here, and nothing was added to any."""
        return not self._touched[0] and all(map(operator.is_, shown, self._expected))

    def sum_of(self, index: int, shown: torch.Tensor | None) -> PendingSum | None:
        """Return what happened to the ``.grad`` of a parameter, None where that is not pending."""
        return self._sums[index] if shown is self._gradients[index] else None

    def __getitem__(self, index: int) -> PendingSum:
        return self._sums[index]


def _refuse_pending(optimizer: Optimizer) -> None:
    """Refuse to step parameters whose gradients are sums under way, before anything is changed.

    Raises:
        StateError: there is one; it names the first.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        rows = getattr(parameter.grad, "_local_tensor", None)
        if isinstance(rows, PendingRows):
            rows.pending.values()
