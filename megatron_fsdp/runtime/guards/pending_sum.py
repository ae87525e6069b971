"""PendingSum: what users do to one ``.grad`` while its sum is under way, and the tensor that notes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_fsdp.errors import StateError

__all__ = ["PendingRows", "PendingSum"]

_ATEN = torch.ops.aten


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


class PendingRows(torch.Tensor):
    """This rank's part of a pending gradient: a tensor without memory."""

    pending: PendingSum
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, like: torch.Tensor, pending: PendingSum) -> PendingRows:
        """Make one of the shape, dtype and device of a tensor."""
        make: Any = torch.Tensor._make_wrapper_subclass
        rows: PendingRows = make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)
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
    if isinstance(value, PendingRows):
        return value.pending.values()
    return type(value)(map(_readable, value)) if type(value) in (list, tuple) else value
