"""What a step of one root tells the objects that were attached to it (StepHooks), and asks them (SharedOrder).

Checks and variants derive from ``StepHooks`` and override what they need; ``checks/attached.py`` makes them. A step
without any of them computes the same. Units and calls are type parameters because ``unit.py``, which defines them,
holds the hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import nn

from megatron_fsdp.engine.param_group import ParameterGroup

__all__ = ["SharedOrder", "StepHooks", "sees_collectives"]

UnitT = TypeVar("UnitT")
CallT = TypeVar("CallT")
CallT_contra = TypeVar("CallT_contra", contravariant=True)


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

    def on_stale_hold(self, unit: UnitT) -> None:
        """A unit runs inside ``unsharded()``, and its main weights or its gathered weights changed in the block."""

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


class SharedOrder(Protocol[UnitT, CallT_contra]):
    """An order of collectives that does not depend on what this rank runs (``variants/forward_order.py``).

    ``Root.order`` holds it. Where that is None, each rank issues collectives in the order in which its units run.
    """

    @property
    def drains(self) -> bool:
        """Whether compute may wait for reductions in backward: no rank waits there for a gather."""

    def units(self) -> list[UnitT]:
        """Return its units, in this order."""

    def place_of(self, unit: UnitT) -> int | None:
        """Return the place of a unit; None for the root."""

    # ------------------------------------------------------------------ forward

    def begin_pass(self) -> None:
        """Begin with ``Root.forward_pass``, a new one, as the root's forward begins."""

    def before_call(self, unit: UnitT) -> None:
        """Gather the units before this one that this rank has skipped."""

    def following(self, limit: int) -> list[UnitT]:
        """Return at most ``limit`` units to gather ahead of their use."""

    def after_call(self, unit: UnitT) -> None:
        """Refuse a call through which backward will come, although no rank gathers its unit for it."""

    def stays(self, unit: UnitT) -> bool:
        """Whether the unit keeps its weights from forward to backward because backward begins with it."""

    def lead_backward(self, call: CallT_contra, output: Any) -> Any:
        """Return outputs of the root that lead backward into it, where this rank used no trained parameter."""

    def end_pass(self) -> UnitT | None:
        """Take part in the rest, unless forward raised; return the unit that stays gathered for backward."""

    # ------------------------------------------------------------------ backward

    def enter(self, unit: UnitT, call: CallT_contra) -> None:
        """Take part in what comes before this unit in backward, and reduce what backward has passed."""

    def gather(self, entered: UnitT, call: CallT_contra) -> None:
        """Issue the gather of the unit that backward has entered, and of the one that comes next."""

    def before_recomputation(self, unit: UnitT) -> None:
        """Issue the gathers of all units whose turn in backward is before this one's, which is computed again."""

    def refuse_late(self, unit: UnitT) -> None:
        """Refuse a gradient of a unit whose gradients are reduced already."""

    def finish(self) -> None:
        """Take part in what is left of the pass that backward is in."""

    def forget(self) -> None:
        """Forget a backward that raised."""
