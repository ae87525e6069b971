"""PendingGradient: the ``.grad`` of a sharded parameter while its gradient is not final."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from megatron_fsdp.errors import StateError

__all__ = ["PendingGradient", "refuse_pending"]


class PendingGradient(torch.Tensor):
    """The ``.grad`` of a sharded parameter while its gradient is a sum under way: every use of it raises.

    ``.grad`` is a pending gradient between microbatches that keep gradients on this rank, and after a backward that
    raised. With None, a user could not drop the sum by setting ``.grad`` to None, and an optimizer would step without
    an error.
    """

    _fsdp_describe: functools.partial[str]

    @staticmethod
    def of(describe: functools.partial[str]) -> PendingGradient:
        """Make a pending gradient; ``describe`` returns the message of the error, and must not keep the model alive."""
        made = torch.empty(0).as_subclass(PendingGradient)
        made._fsdp_describe = describe
        return made

    def describe(self) -> str:
        """Return the message of the error."""
        return self._fsdp_describe()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise a StateError."""
        raise StateError(next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)).describe())

    def __getattr__(self, name: str) -> Any:
        raise StateError(self.describe())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        return "a sum under way"


def refuse_pending(optimizer: Optimizer) -> None:
    """Refuse to step parameters whose gradients are sums under way, before anything is changed.

    Raises:
        StateError: names the first such parameter.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if isinstance(parameter.grad, PendingGradient):
            raise StateError(parameter.grad.describe())
