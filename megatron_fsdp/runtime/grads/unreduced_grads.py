"""PendingRows: what ``.grad`` of sharded parameters is while their gradients are sums under way.

Between microbatches that keep gradients on this rank, and after a backward that raised, there is nothing that a reader
of ``.grad`` could be shown. None would hide what users do meanwhile: who sets ``.grad`` to None throws the sum away,
and who steps an optimizer would step without it. So ``.grad`` is a tensor that may be dropped, that takes what autograd
adds to it, and that no other operator may use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from megatron_fsdp.errors import StateError

__all__ = ["PendingRows", "refuse_pending"]

_ATEN = torch.ops.aten


class PendingRows(torch.Tensor):
    """This rank's part of a gradient while its sum is under way: a tensor without memory.

    Attributes:
        describe: returns the words of the error for who uses it. added: what autograd added to it.
    """

    describe: Callable[[], str]
    added: torch.Tensor | None
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, like: torch.Tensor, describe: Callable[[], str]) -> PendingRows:
        """Make one like a tensor."""
        make: Any = torch.Tensor._make_wrapper_subclass
        rows: PendingRows = make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)
        rows.describe, rows.added = describe, None
        return rows

    def __init__(self, *_: object) -> None:
        """Do nothing."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves it untyped
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Keep what autograd accumulates, for a loss that uses a sharded parameter itself; refuse the rest."""
        rows = args[0]
        if func is _ATEN.detach.default:
            return rows
        if func is _ATEN.add_.Tensor and isinstance(rows, cls) and not isinstance(args[1], cls) and not kwargs:
            rows.added = args[1].clone() if rows.added is None else rows.added.add_(args[1])
            return rows
        raise StateError(next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)).describe())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        return "a sum under way"


def refuse_pending(optimizer: Optimizer) -> None:
    """Refuse to step parameters whose gradients are sums under way, before anything is changed.

    Raises:
        StateError: there is one; it names the first.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        rows = getattr(parameter.grad, "_local_tensor", None)
        if isinstance(rows, PendingRows):
            raise StateError(rows.describe())
