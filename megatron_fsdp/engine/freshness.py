"""Freshness: whether compute weights are as new as main weights, and how anybody learns that these have changed.

Fused and foreach optimizers change a DTensor's memory without touching any version counter, so every step of any
torch.optim.Optimizer in the process counts as a change (docs/design/freshness.md). Optimizers are heard of from the
first ``fully_shard`` on, and asked before each step whether they would step copies.
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

__all__ = ["CHECKS", "MOMENTS", "Freshness", "hear_of_first_steps", "hear_of_steps", "refreshes_itself"]


MOMENTS = [0]
"""How many beginnings and ends of optimizer steps there were: where it is the same twice, nothing stepped between."""
CHECKS: list[Callable[[Optimizer], None]] = []
"""What is called before each step of an optimizer while there is anything that it may not step."""
_FIRST_CHECKS: list[Callable[[Optimizer], None]] = []
_num_steps = [0]
_REFRESHING: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_CHECKED: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


class Freshness:
    """How old the compute weights of one parameter group are.

    Weights at rest are of a generation, which ends when main weights change; gathered ones are of that of their gather.

    Args:
        tensors: a list of those whose versions grow with every change of main weights that PyTorch counts.

    Attributes:
        generation: of the weights at rest. gathered: of those that were gathered last.
        changed_at: what ``MOMENTS`` was when a look found that ``version`` had moved.
        has_changed: main weights are known to have changed since the last refresh. is_suspect: they may have, in a way
            that shows nowhere.
    """

    __slots__ = ("_seen", "_steps", "_tensors", "changed_at", "gathered", "generation", "has_changed", "is_suspect")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._seen = self._steps = -1
        self.changed_at = 0
        self.has_changed, self.is_suspect = True, False
        self.generation = self.gathered = 0

    def lose(self) -> None:
        """Gathered weights were changed: nobody may use them, or what was kept of them, again."""
        self.is_suspect = True
        self.generation += 1

    def is_changed(self) -> bool:
        """Look whether main weights have changed since the last refresh."""
        version = sum(map(version_of, self._tensors))
        if version != self._seen:
            self.has_changed = True
            self._seen, self.changed_at = version, MOMENTS[0]
        if self._steps != _num_steps[0]:
            self.has_changed = True
            self._steps = _num_steps[0]
        return self.has_changed

    def refreshed(self) -> None:
        """Weights at rest are those of main weights: told last, so that a refresh that raised is made again."""
        self.generation += 1
        self.has_changed = self.is_suspect = False

    def look_again(self) -> None:
        """The memory of main weights was written with the values that it had, which is no change of theirs."""
        self._seen, self._steps = sum(map(version_of, self._tensors)), _num_steps[0]

    def is_stale(self) -> bool:
        """Whether gathered weights are older than main weights."""
        return self.is_changed() or self.gathered != self.generation


def _count_step(optimizer: Optimizer) -> None:
    MOMENTS[0] += 1
    if optimizer not in _REFRESHING:
        _num_steps[0] += 1


@functools.cache
def hear_of_steps(check: Callable[[Optimizer], None]) -> None:
    """Hear of all steps from now on; ``check`` is called before an optimizer's first one, and when it has got more."""

    def before(optimizer: Optimizer, *_: object) -> None:
        num_params = sum(len(group["params"]) for group in optimizer.param_groups)
        is_known = _CHECKED.get(optimizer) == num_params
        if not is_known:
            check(optimizer)
        for each in CHECKS[:]:
            each(optimizer)
        if not is_known:
            for each in _FIRST_CHECKS:
                each(optimizer)
            _CHECKED[optimizer] = num_params
        # As after the step: one that raises has changed some of the weights, and no hook is called then.
        _count_step(optimizer)

    def after(optimizer: Optimizer, *_: object) -> None:
        _count_step(optimizer)
        if optimizer.defaults.get("fused"):
            # The one kind of step that DTensors do not count.
            stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            torch.autograd.graph.increment_version(p._local_tensor for p in stepped if isinstance(p, DTensor))

    # A compiled step calls them as they are: traced, the count would be a constant of the compiled code.
    register_optimizer_step_post_hook(_disable_dynamo(after))
    register_optimizer_step_pre_hook(_disable_dynamo(before))


def hear_of_first_steps(check: Callable[[Optimizer], None]) -> None:
    """Call ``check`` too before an optimizer's first step, and when it has got more parameters."""
    if check not in _FIRST_CHECKS:
        _FIRST_CHECKS.append(check)


def refreshes_itself(optimizer: Optimizer) -> None:
    """Say that ``optimizer`` tells its groups of each step, so that it needs no other notice.

    It calls ``announce_step`` before it changes anything.
    """
    _REFRESHING.add(optimizer)
