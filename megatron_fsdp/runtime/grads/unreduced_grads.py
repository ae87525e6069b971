"""PendingRows: what ``.grad`` of sharded parameters is while their gradients are sums under way.

Between microbatches that keep gradients on this rank, and after a backward that raised, there is nothing that a reader
of ``.grad`` could be shown. None would hide what users do meanwhile: who sets ``.grad`` to None or zeroes it throws the
sum away, and who steps an optimizer would step without it. So ``.grad`` is a tensor that may be dropped and zeroed,
that takes what autograd adds to it, and that no operator reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from megatron_fsdp.errors import StateError

__all__ = ["PendingRows", "refuse_pending"]

_ATEN = torch.ops.aten


class PendingRows(torch.Tensor):
    """This rank's part of a gradient while its sum is under way: a tensor without memory.

    Attributes:
        is_zeroed: it was zeroed, and reads as zeros. added: what was added to it since. is_added: whether anything was.
    """

    describe: Callable[[], str]
    is_zeroed: bool
    is_added: bool
    added: torch.Tensor | None
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, like: torch.Tensor, describe: Callable[[], str]) -> PendingRows:
        """Make one like a tensor; ``describe`` returns the words of the error for who reads it."""
        make: Any = torch.Tensor._make_wrapper_subclass
        rows: PendingRows = make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)
        rows.describe = describe
        rows.forget()
        return rows

    def __init__(self, *_: object) -> None:
        """Do nothing."""

    def forget(self, *, is_zeroed: bool = False) -> None:
        """Forget what was added, and that it was zeroed, unless it is now."""
        self.is_zeroed, self.is_added, self.added = is_zeroed, False, None

    def receive(self, value: torch.Tensor, alpha: float = 1) -> None:
        """Take notice of ``add_``: what autograd accumulates for a loss that uses a sharded parameter itself."""
        self.is_added = True
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
            raise StateError(self.describe())
        return self._own()

    def _own(self) -> torch.Tensor:
        if self.added is None:
            self.added = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self.added

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
        if target is not None:
            if func is _ATEN.detach.default:
                return target
            if func is _ATEN.zero_.default:
                target.forget(is_zeroed=True)
                return target
            if func is _ATEN.add_.Tensor and not isinstance(args[1], cls):
                target.receive(args[1], **(kwargs or {}))
                return target
        result = func(*_readable(args), **{name: _readable(value) for name, value in (kwargs or {}).items()})
        if target is not None and result is target.added:
            target.is_added = True
            return target
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        return "zeros" if self.is_zeroed else "a sum under way"


def _readable(value: Any) -> Any:
    if isinstance(value, PendingRows):
        return value.values()
    return type(value)(map(_readable, value)) if type(value) in (list, tuple) else value


def refuse_pending(optimizer: Optimizer) -> None:
    """Refuse to step parameters whose gradients are sums under way, before anything is changed.

    Raises:
        StateError: there is one; it names the first.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        rows = getattr(parameter.grad, "_local_tensor", None)
        if isinstance(rows, PendingRows):
            rows.values()
