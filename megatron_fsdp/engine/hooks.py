"""StepHooks: what a step of one root tells the objects that were attached to it, and asks them.

Checks and variants derive from ``StepHooks`` and override what they need; ``checks/attached.py`` makes them. A step
without any of them computes the same. Units and calls are type parameters because ``unit.py``, which defines them,
holds the hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from torch import nn

from megatron_fsdp.engine.param_group import ParameterGroup

__all__ = ["StepHooks", "sees_collectives"]

UnitT = TypeVar("UnitT")
CallT = TypeVar("CallT")


class StepHooks(Generic[UnitT, CallT]):
    """Receives the events of one root's steps; every method of this class does nothing.

    A method may raise, which the user's forward or backward then does.
    """

    # ------------------------------------------------------------------ per unit: of hooks that override them alone

    def before_gather(self, unit: UnitT) -> None:
        """A unit's weights are about to be gathered."""

    def before_reduce(self, unit: UnitT) -> None:
        """A unit's gradients are about to be reduced, or kept for the next backward."""

    # ------------------------------------------------------------------ forward

    def on_root_forward(self, unit: UnitT, module: nn.Module) -> None:
        """A module of the root unit is called, before anything is gathered; also where backward computes it again."""

    def on_replaced(self, group: ParameterGroup) -> None:
        """A module has another tensor in the place of a parameter of the group."""

    def on_changed(self, unit: UnitT, group: ParameterGroup, changed: Sequence[int]) -> None:
        """Parameters of a group were frozen or unfrozen, or a user keeps a tensor that lies in ``main_grad``.

        Args:
            changed: the parameters whose ``requires_grad`` is another; none for a kept gradient.
        """

    def on_opaque_output(self, call: CallT, objects: Sequence[Any]) -> None:
        """A call returned objects that may hold tensors where the engine does not look."""

    # ------------------------------------------------------------------ backward

    def on_late_backward(self, call: CallT) -> None:
        """Backward reaches a call while it is recorded itself, or after an optimizer has stepped since forward."""

    def on_missing(self, groups: Iterable[ParameterGroup]) -> None:
        """Gradients are about to be reduced, and some parameters of these groups got none on this rank."""

    def on_final(self, groups: Sequence[ParameterGroup], units: Sequence[UnitT], *, is_missing: bool) -> None:
        """Gradients are reduced, and not in ``.grad`` yet.

        Args:
            groups: whose gradients are; none where the backward was not the last one. units: all of the root's.
            is_missing: whether some parameters of ``groups`` got no gradient on this rank.
        """

    def on_no_gradients(self, units: Sequence[UnitT]) -> None:
        """A backward ended in which no parameter of these units, all of the root's, got a gradient."""

    def after_backward(self) -> None:
        """A backward has ended, and what it gathered is released."""


def sees_collectives(hook: StepHooks[Any, Any]) -> bool:
    """Whether a hook overrides one of the methods that are called for every unit."""
    kind = type(hook)
    return kind.before_gather is not StepHooks.before_gather or kind.before_reduce is not StepHooks.before_reduce
