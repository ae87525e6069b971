"""Hooks on the steps of all optimizers: checks before a step, and marks on the main weights that a step changes.

The first ``fully_shard`` registers the hooks (``register_step_hooks``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = [
    "STEP_CHECKS",
    "ParamsSeen",
    "add_first_step_check",
    "register_step_hooks",
    "repeat_first_step_checks",
    "skip_announcing",
]


STEP_CHECKS: list[Callable[[Optimizer], None]] = []
"""Functions that are called before each step of an optimizer, and raise if it must not step now.

Each is in the list while it applies: ``refuse_pending``, for example, once for each group whose ``.grad``
is not final.
"""

_FIRST_STEP_CHECKS: list[Callable[[Optimizer], None]] = []


@functools.cache
def register_step_hooks(check: Callable[[Optimizer], None], announce: Callable[[Optimizer], None]) -> None:
    """Register hooks on the steps of all optimizers.

    Args:
        check: called before an optimizer's first step, and again when the optimizer has other parameters.
        announce: called before and after each step; marks the main weights of the optimizer's parameters as changed.
    """

    def before(optimizer: Optimizer, *_: object) -> None:
        known = _CHECKED.get(optimizer)
        is_known = known is not None and known.are_those_of(optimizer)
        if not is_known:
            check(optimizer)
        for each in STEP_CHECKS[:]:
            each(optimizer)
        if not is_known:
            for each in _FIRST_STEP_CHECKS:
                each(optimizer)
            _CHECKED[optimizer] = ParamsSeen(optimizer)
        # Before the step too: a step that raises has changed some weights, and PyTorch calls no hook after it.
        if optimizer not in _NOT_ANNOUNCED:
            announce(optimizer)

    def after(optimizer: Optimizer, *_: object) -> None:
        if optimizer not in _NOT_ANNOUNCED:
            announce(optimizer)
        _count_fused_step(optimizer)

    # Not traced into a compiled step, where the count would be a constant.
    register_optimizer_step_post_hook(_disable_dynamo(after))
    register_optimizer_step_pre_hook(_disable_dynamo(before))


def add_first_step_check(check: Callable[[Optimizer], None]) -> None:
    """Add a check before an optimizer's first step, and before a step in which the optimizer has other parameters."""
    if check not in _FIRST_STEP_CHECKS:
        _FIRST_STEP_CHECKS.append(check)


def repeat_first_step_checks() -> None:
    """Check every optimizer before its next step as before its first one; a parameter of it may be replaced now."""
    _CHECKED.clear()


def skip_announcing(optimizer: Optimizer) -> None:
    """Do not call ``announce`` at the steps of ``optimizer``, which calls ``announce_step`` itself."""
    _NOT_ANNOUNCED.add(optimizer)


class ParamsSeen:
    """The parameters that an optimizer had when it was last looked at.

    The references are weak, because hooks of a parameter may refer to the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._seen = [weakref.ref(param) for group in optimizer.param_groups for param in group["params"]]

    def are_those_of(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer has the same parameters in the same order."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return len(params) == len(self._seen) and all(
            ref() is param for ref, param in zip(self._seen, params, strict=True)
        )


_CHECKED: weakref.WeakKeyDictionary[Optimizer, ParamsSeen] = weakref.WeakKeyDictionary()
_NOT_ANNOUNCED: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _count_fused_step(optimizer: Optimizer) -> None:
    """Increase the version counters of the parameters that a fused kernel of PyTorch has stepped.

    The kernel increases none for DTensors. This library's kernels increase theirs themselves, and a second increase
    would make split main weights drop their low halves.
    """
    if getattr(optimizer, "steps_split_weights", False):
        return
    for group in optimizer.param_groups:
        if group.get("fused"):
            stepped = [param for param in group["params"] if param.grad is not None and isinstance(param, DTensor)]
            torch.autograd.graph.increment_version(param._local_tensor for param in stepped)
