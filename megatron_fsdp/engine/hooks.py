"""StepHooks, the events of a step that checks and variants receive; SharedOrder, an order that all ranks share.

Checks and variants derive from ``StepHooks`` and override some methods; ``checks/attach.py`` makes them. A step
without hooks computes the same. ``unit.py`` imports this file, so units and calls are type parameters here.
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

    An error raised in a method reaches the user from forward or backward.
    """

    # ------------------------------------------------------------------ per unit, only on hooks that override them

    def before_gather(self, unit: UnitT) -> None:
        """A unit's weights are about to be gathered."""

    def before_reduce(self, unit: UnitT) -> None:
        """A unit's gradients are about to be reduced, or kept for the next backward."""

    # ------------------------------------------------------------------ forward

    def on_root_forward(self, unit: UnitT, module: nn.Module) -> None:
        """A module of the root unit is called, or recomputed in a backward; nothing is gathered yet."""

    def on_replaced(self, group: ParameterGroup) -> None:
        """A module has another tensor registered under the name of one of the group's parameters."""

    def on_requires_grad_changed(self, unit: UnitT, group: ParameterGroup, changed: Sequence[int]) -> None:
        """The parameters of a group with these indices were frozen or unfrozen."""

    def on_main_grad_held(self, unit: UnitT, group: ParameterGroup) -> None:
        """The user keeps a tensor that lies in the group's ``main_grad``, as the next forward or backward begins."""

    def on_stale_hold(self, unit: UnitT) -> None:
        """A unit runs inside ``unsharded()``, and its main weights or its gathered weights have changed there."""

    def on_opaque_output(self, call: CallT, objects: Sequence[Any]) -> None:
        """A call returned objects that may hold tensors where the engine does not look."""

    # ------------------------------------------------------------------ backward

    def on_recorded_backward(self, unit: UnitT) -> None:
        """Backward reaches a call of a unit with ``create_graph=True``."""

    def on_changed_weights(self, unit: UnitT) -> None:
        """Backward reaches a call of a unit, and main weights have changed since the call."""

    def on_missing(self, groups: Iterable[ParameterGroup]) -> None:
        """Gradients are about to be reduced, and some parameters of these groups got none on this rank."""

    def on_final(self, groups: Sequence[ParameterGroup], units: Sequence[UnitT], *, is_missing: bool) -> None:
        """Gradients are reduced, and not shown in ``.grad`` yet.

        Args:
            groups: the groups with final gradients; empty unless the backward was the last of its step.
            units: all units of the root.
            is_missing: True if a parameter of ``groups`` got no gradient on this rank.
        """

    def on_no_gradients(self, units: Sequence[UnitT]) -> None:
        """A backward has ended in which no parameter of the root's units got a gradient."""

    def after_backward(self) -> None:
        """A backward has ended, and its gathered weights are released."""


def sees_collectives(hook: StepHooks[Any, Any]) -> bool:
    """Return whether a hook overrides one of the methods that are called for every unit."""
    kind = type(hook)
    return kind.before_gather is not StepHooks.before_gather or kind.before_reduce is not StepHooks.before_reduce


class SharedOrder(Protocol[UnitT, CallT_contra]):
    """An order of collectives that does not depend on the units that this rank runs (``variants/forward_order.py``).

    ``Root.order`` holds it. If ``Root.order`` is None, a rank issues collectives in the order in which its units run.

    Attributes:
        has_grad: gradients were enabled when the forward pass began.
    """

    has_grad: bool

    @property
    def drains(self) -> bool:
        """Return whether compute may wait for reductions in backward: no rank waits for a gather there."""

    def units(self) -> list[UnitT]:
        """Return the units in this order."""

    def place_of(self, unit: UnitT) -> int | None:
        """Return the place of a unit; None for the root."""

    # ------------------------------------------------------------------ forward

    def begin_pass(self) -> None:
        """Begin to follow ``Root.forward_pass``, which has just begun."""

    def before_call(self, unit: UnitT) -> None:
        """Gather the units before this one that this rank has skipped, and this one."""

    def prefetch(self, unit: UnitT) -> None:
        """Issue the gathers of the units that follow ``unit``, whose call begins."""

    def refuse_call(self, unit: UnitT) -> None:
        """Refuse a call through which backward will come, although no rank gathers its unit for it."""

    def stays(self, unit: UnitT) -> bool:
        """Return whether the unit keeps its weights from forward to backward because backward begins with it."""

    def lead_backward(self, call: CallT_contra, output: Any) -> Any:
        """Return outputs of the root that lead backward into it, where this rank used no trained parameter."""

    def end_pass(self) -> UnitT | None:
        """Gather the units that this rank has skipped, unless forward raised.

        Returns:
            The unit that stays gathered for backward.
        """

    # ------------------------------------------------------------------ backward

    def enter(self, unit: UnitT, call: CallT_contra) -> None:
        """Issue the collectives of the units before this one in backward that this rank has skipped."""

    def gather(self, entered: UnitT, call: CallT_contra) -> None:
        """Issue the gather of the unit that backward has entered, and of the one that comes next."""

    def before_recomputation(self, unit: UnitT) -> None:
        """Issue the gathers of all units before a recomputed unit in the order of backward."""

    def refuse_late(self, unit: UnitT) -> None:
        """Refuse a gradient that comes after the reduction of its unit."""

    def finish(self) -> None:
        """Issue the remaining collectives of the pass that backward is in."""

    def forget(self) -> None:
        """Forget a backward that raised."""
