"""Freshness: are compute weights as new as main weights?

A fused step changes a DTensor's memory without a change of any version counter. So every step of a
``torch.optim.Optimizer`` counts as a change of the main weights of its parameters (docs/design/freshness.md). The first
``fully_shard`` registers hooks on all optimizers, which also check before a step that the optimizer steps no copies.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatron_fsdp.engine.passes import version_of

__all__ = [
    "CHECKS", "Freshness", "ParamsSeen", "check_optimizers_again", "hear_of_first_steps", "hear_of_steps",
    "refreshes_itself",
]  # fmt: skip


CHECKS: list[Callable[[Optimizer], None]] = []
"""Functions that are called before each step of an optimizer, and raise if it must not step now."""
_FIRST_CHECKS: list[Callable[[Optimizer], None]] = []
_REFRESHING: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class ParamsSeen:
    """The parameters that an optimizer had when it was last looked at; weak references, because hooks of a parameter
    may refer to the optimizer.
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


class Freshness:
    """How old the compute weights of one parameter group are.

    Every refresh of the weights at rest begins a generation. Gathered weights have the generation of their gather.

    Args:
        tensors: the main weights. Their version counters grow with every change that PyTorch counts.
        num_changes: how many changes were found in the memory that the main weights had before.

    Attributes:
        generation: of the weights at rest. gathered_generation: of the weights that were gathered last.
        num_changes: how many times the version counters were found changed.
        has_changed: True if main weights have changed since the last refresh.
        is_suspect: True if main weights may have changed without a trace.
    """

    __slots__ = (
        "_seen",
        "_tensors",
        "gathered_generation",
        "generation",
        "has_changed",
        "is_suspect",
        "num_changes",
    )

    def __init__(self, tensors: list[torch.Tensor], num_changes: int = 0) -> None:
        self._tensors = tensors
        self._seen = -1
        self.num_changes = num_changes
        self.has_changed, self.is_suspect = True, False
        self.generation = self.gathered_generation = 0

    def mark_gathered_changed(self) -> None:
        """Mark the gathered weights, and the parts kept of them, as old, so that no forward uses them again."""
        self.is_suspect = True
        self.generation += 1

    def notice_changes(self) -> bool:
        """Count changes of the version counters; return whether main weights have changed since the last refresh."""
        version = sum(map(version_of, self._tensors))
        if version != self._seen:
            self.has_changed = True
            self._seen = version
            self.num_changes += 1
        return self.has_changed

    def refreshed(self) -> None:
        """Mark the weights at rest as fresh; called last, so that a refresh that raised is made again."""
        self.generation += 1
        self.has_changed = False
        # An evaluation may come between the backward and the step. The training forward after the step refreshes again.
        if torch.is_grad_enabled():
            self.is_suspect = False

    def look_again(self) -> None:
        """Resynchronize the version counters after a write that did not change the main weights."""
        self._seen = sum(map(version_of, self._tensors))

    def gathered_are_old(self) -> bool:
        """Return whether gathered weights are older than main weights."""
        return self.notice_changes() or self.gathered_generation != self.generation


def _count_fused_step(optimizer: Optimizer) -> None:
    """Change the version counters of what PyTorch's fused kernels stepped, which do not do so for DTensors.

    This library's kernels count by themselves. A second count would make split main weights drop their low halves.
    """
    if getattr(optimizer, "steps_split_weights", False):
        return
    for group in optimizer.param_groups:
        if group.get("fused"):
            stepped = [param for param in group["params"] if param.grad is not None and isinstance(param, DTensor)]
            torch.autograd.graph.increment_version(param._local_tensor for param in stepped)


@functools.cache
def hear_of_steps(check: Callable[[Optimizer], None], announce: Callable[[Optimizer], None]) -> None:
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
        for each in CHECKS[:]:
            each(optimizer)
        if not is_known:
            for each in _FIRST_CHECKS:
                each(optimizer)
            _CHECKED[optimizer] = ParamsSeen(optimizer)
        # Before the step too: a step that raises has changed some weights, and PyTorch calls no hook after it.
        if optimizer not in _REFRESHING:
            announce(optimizer)

    def after(optimizer: Optimizer, *_: object) -> None:
        if optimizer not in _REFRESHING:
            announce(optimizer)
        _count_fused_step(optimizer)

    # Not traced into a compiled step, where the count would be a constant.
    register_optimizer_step_post_hook(_disable_dynamo(after))
    register_optimizer_step_pre_hook(_disable_dynamo(before))


def hear_of_first_steps(check: Callable[[Optimizer], None]) -> None:
    """Add a check before an optimizer's first step, and before a step in which the optimizer has other parameters."""
    if check not in _FIRST_CHECKS:
        _FIRST_CHECKS.append(check)


def check_optimizers_again() -> None:
    """Check every optimizer before its next step as before its first one; a parameter of it may be replaced now."""
    _CHECKED.clear()


def refreshes_itself(optimizer: Optimizer) -> None:
    """Do not call ``announce`` at the steps of ``optimizer``, which calls ``announce_step`` itself."""
    _REFRESHING.add(optimizer)
