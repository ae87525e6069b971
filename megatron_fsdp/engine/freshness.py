"""Freshness: are the gathered weights and the resting weights of a group as new as its main weights?

A change of main weights that PyTorch counts increases a version counter. A fused step of an optimizer increases none,
so every step counts as a change of the main weights that it steps (``optimizer_steps.py``; docs/design/freshness.md).
"""

from __future__ import annotations

import torch

from megatron_fsdp.engine.param_loops import version_of

__all__ = ["Freshness"]


class Freshness:
    """How old the resting weights and the gathered weights of one parameter group are.

    Every refresh of the resting weights begins a generation. Gathered weights have the generation of their gather.

    Args:
        tensors: the main weights. Their version counters grow with every change that PyTorch counts.
        num_changes: how many changes were found in the memory that the main weights had before.

    Attributes:
        generation: of the resting weights. gathered_generation: of the weights that were gathered last.
        num_changes: how many times the version counters were found changed.
        has_changed: True if main weights have changed since the last refresh.
        may_have_changed: True if main weights may have changed although no version counter shows it.
    """

    __slots__ = (
        "_seen",
        "_tensors",
        "gathered_generation",
        "generation",
        "has_changed",
        "may_have_changed",
        "num_changes",
    )

    def __init__(self, tensors: list[torch.Tensor], num_changes: int = 0) -> None:
        self._tensors = tensors
        self._seen = -1
        self.num_changes = num_changes
        self.has_changed, self.may_have_changed = True, False
        self.generation = self.gathered_generation = 0

    def mark_gathered_changed(self) -> None:
        """Mark the gathered weights, and the parts kept of them, as old, so that no forward uses them again."""
        self.may_have_changed = True
        self.generation += 1

    def notice_changes(self) -> bool:
        """Count changes of the version counters; return whether main weights have changed since the last refresh."""
        version = sum(map(version_of, self._tensors))
        if version != self._seen:
            self.has_changed = True
            self._seen = version
            self.num_changes += 1
        return self.has_changed

    def mark_refreshed(self) -> None:
        """Mark the resting weights as fresh; called last, so that a refresh that raised is made again."""
        self.generation += 1
        self.has_changed = False
        # An evaluation may come between the backward and the step. The training forward after the step refreshes again.
        if torch.is_grad_enabled():
            self.may_have_changed = False

    def resynchronize(self) -> None:
        """Resynchronize the version counters after a write that did not change the main weights."""
        self._seen = sum(map(version_of, self._tensors))

    def gathered_are_old(self) -> bool:
        """Return whether gathered weights are older than main weights."""
        return self.notice_changes() or self.gathered_generation != self.generation
