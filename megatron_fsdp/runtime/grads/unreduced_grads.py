"""PendingGradient: what ``.grad`` of sharded parameters is while their gradients are sums under way.

Between microbatches that keep gradients on this rank, and after a backward that raised, there is nothing that a reader
of ``.grad`` could be shown. None would hide what users do meanwhile: who sets ``.grad`` to None throws the sum away,
and who steps an optimizer would step without it. So ``.grad`` is something that may be dropped, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from megatron_fsdp.errors import StateError

__all__ = ["PendingGradient", "refuse_pending"]


class PendingGradient(torch.Tensor):
    """A gradient whose sum is under way: every use of it is refused.

    Attributes:
        describe: returns the words of the error.
    """

    describe: Callable[[], str]

    @staticmethod
    def of(describe: Callable[[], str]) -> PendingGradient:
        """Make one."""
        made = torch.empty(0).as_subclass(PendingGradient)
        made.describe = describe
        return made

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
        StateError: there is one; it names the first.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if isinstance(parameter.grad, PendingGradient):
            raise StateError(parameter.grad.describe())
