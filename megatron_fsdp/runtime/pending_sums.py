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

from dbuffer.dtensor.flat_dtensor import FlatDTensor
from megatron_fsdp.errors import StateError

__all__ = ["PendingSum", "PendingSums", "refuse_pending"]

_ATEN = torch.ops.aten
_GRAD: Any = torch._C.TensorBase.grad
_set = _GRAD.__set__
# How many groups of the process have sums under way: optimizers look at gradients only where there are any.
_num_under_way = [0]


class PendingSum:
    """What happened to the ``.grad`` of one parameter while its sum was under way.

    Attributes:
        is_zeroed: somebody zeroed it, so that it reads as zeros. added: what was added to it, None for nothing.
        is_added: whether anything was.
    """

    __slots__ = ("_describe", "_like", "_touched", "added", "is_added", "is_zeroed")

    def __init__(self, describe: Callable[[], str], like: torch.Tensor, touched: list[bool]) -> None:
        self._describe = describe
        self._touched = touched
        self._like = (like.shape, like.dtype, like.device)
        self.is_zeroed = self.is_added = False
        self.added: torch.Tensor | None = None

    def forget(self) -> None:
        """Forget what happened."""
        self.is_zeroed, self.is_added, self.added = False, False, None

    def zero(self) -> None:
        """Take notice of ``zero_``."""
        self._touched[0] = True
        self.is_zeroed, self.is_added, self.added = True, False, None

    def add(self, value: torch.Tensor, alpha: float = 1) -> None:
        """Take notice of ``add_``: what autograd accumulates for a loss that uses a sharded parameter itself."""
        self._touched[0] = self.is_added = True
        added = self._own()
        if value.numel() == added.numel():
            added, value = added.view(-1), value.reshape(-1)
        added.add_(value, alpha=alpha)

    def values(self) -> torch.Tensor:
        """Return what a reader sees.

        Raises:
            StateError: a sum under way.
        """
        if not self.is_zeroed:
            raise StateError(self._describe())
        return self._own()

    def _own(self) -> torch.Tensor:
        if self.added is None:
            shape, dtype, device = self._like
            self.added = torch.zeros(shape, dtype=dtype, device=device)
        return self.added


class _PendingRows(torch.Tensor):
    """This rank's part of a pending gradient: a tensor without memory."""

    pending: PendingSum
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, like: torch.Tensor, pending: PendingSum) -> _PendingRows:
        """Make one of the shape, dtype and device of a tensor."""
        make: Any = torch.Tensor._make_wrapper_subclass
        rows: _PendingRows = make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)
        rows.pending = pending
        return rows

    def __init__(self, *_: object) -> None:
        """Do nothing."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves it untyped
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Take notice of what may be done to a pending gradient; refuse the rest; after ``zero_`` run it on zeros."""
        target = args[0] if args and isinstance(args[0], cls) else None
        if func is _ATEN._foreach_zero_.default:
            for tensor in args[0]:
                tensor.zero_()
            return None
        if target is not None and func is _ATEN.detach.default:
            return target
        if target is not None and func is _ATEN.zero_.default:
            target.pending.zero()
            return target
        if target is not None and func is _ATEN.add_.Tensor and not isinstance(args[1], cls):
            target.pending.add(args[1], **(kwargs or {}))
            return target
        result = func(*_readable(args), **{name: _readable(value) for name, value in (kwargs or {}).items()})
        if target is not None and result is target.pending.added:
            target.pending.is_added = True
            return target
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        return "zeros" if self.pending.is_zeroed else "a sum under way"


def _readable(value: Any) -> Any:
    if isinstance(value, _PendingRows):
        return value.pending.values()
    return type(value)(map(_readable, value)) if type(value) in (list, tuple) else value


class PendingSums:
    """The pending gradients of one group, and which parameters show theirs.

    Args:
        parameters: the sharded ones. gradients: final gradients to stand in for, one each.
        describe: returns the words of the error for who reads that of parameter ``index``.

    Attributes:
        is_under_way: whether there is a sum. wanted: whose (nonzero).
        is_void: whether the sum is none any more, because a backward raised.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], gradients: Iterable[DTensor], describe: Callable[[int], str]
    ) -> None:
        self._parameters = parameters
        self._sums: list[PendingSum] = []
        self._gradients: list[FlatDTensor] = []
        self._touched = [False]
        # What ``.grad`` of each parameter is unless somebody but this object sets it.
        self._expected: list[DTensor | None] = []
        for index, gradient in enumerate(gradients):
            assert isinstance(gradient, FlatDTensor)
            pending = PendingSum(
                lambda index=index: describe(index),  # type: ignore[misc]  # the default binds the number
                gradient._local_tensor,
                self._touched,
            )
            self._sums.append(pending)
            self._gradients.append(gradient.with_local(_PendingRows(gradient._local_tensor, pending)))
        self.wanted = bytearray()
        self.is_under_way = self.is_void = False

    def begin(self, wanted: bytearray) -> None:
        """Say that sums of some parameters are under way; ``.grad`` shows it when ``show`` says."""
        self.wanted, self._expected = wanted, [None] * len(wanted)
        _num_under_way[0] += 1
        self.is_under_way = True

    def show(self) -> None:
        """Set ``.grad`` of all parameters concerned."""
        with torch._C.DisableTorchFunctionSubclass():
            for index, is_wanted in enumerate(self.wanted):
                if is_wanted:
                    self._expected[index] = self._gradients[index]
                    _set(self._parameters[index], self._gradients[index])

    def follow(self, parameters: Sequence[torch.Tensor]) -> None:
        """Show pending gradients on other objects from now on; what their ``.grad`` is stays."""
        self._parameters = parameters

    def end(self) -> None:
        """Say that sums are under way no more; whoever calls this sets ``.grad``."""
        self.is_under_way = self.is_void = False
        _num_under_way[0] -= 1

    def forget(self) -> None:
        """Forget what happened to the pending gradients."""
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


def refuse_pending(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse to step parameters whose gradients are sums under way, before anything is changed.

    Raises:
        StateError: there is one; it names the first.
    """
    if not _num_under_way[0]:
        return
    for parameter in parameters:
        rows = getattr(parameter.grad, "_local_tensor", None)
        if isinstance(rows, _PendingRows):
            rows.pending.values()
