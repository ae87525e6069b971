"""ForwardOrder: one order of units on all ranks. A rank that skips a unit still joins the unit's collectives.

In forward, a rank that enters a unit first gathers the earlier units that it skipped. At the end of the root's forward
it gathers the remaining units. In backward, units are gathered in the reverse order of the ends of their calls and
reduced in the reverse order of their beginnings. A rank that skipped a unit contributes zeros to its reduction
(docs/design/order.md, "A forward order").
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from dbuffer.dtensor.placed_tensor import REQUIRES_GRAD_WRITES
from megatron_fsdp.engine.backward import pre_backward, update_requires_grad
from megatron_fsdp.engine.outputs import map_tensors, watch_output
from megatron_fsdp.engine.post_backward import leave_unit, post_backward
from megatron_fsdp.engine.unit import Call, ForwardPass, Root, Unit, WeightState, alive, units_below
from megatron_fsdp.errors import ConfigError, StateError

__all__ = ["ForwardOrder", "order_of", "share_forward_order"]


class Progress:
    """How far one forward pass and its backward have come in the order. A "place" is the index of a unit in it.

    Attributes:
        reached: how many units of the order have been gathered in forward.
        passed: places that backward has entered or skipped.
        issued: places whose gather in backward was issued or is not needed.
        closed: places whose gradients were reduced.
    """

    __slots__ = ("closed", "issued", "passed", "reached")

    def __init__(self) -> None:
        self.reached = 0
        self.passed: set[int] = set()
        self.issued: set[int] = set()
        self.closed: set[int] = set()


class ForwardOrder:
    """The order of the units below one root.

    Args:
        units: all units with parameters but the root, in the order in which forward enters them.

    Attributes:
        has_grad: gradients were enabled when the pass began. A rank may run a unit under ``no_grad`` that other ranks
            skip, so this decides on all ranks what a call's own mode decides without an order.
    Raises:
        ConfigError: a unit is missing, or comes twice, or does not belong to this root.
    """

    def __init__(self, root: Root, units: Sequence[Unit]) -> None:
        outermost = root.outermost()
        wanted = [unit for unit in root.units() if unit.groups and unit is not outermost]
        given = [unit for unit in units if unit.groups and unit is not outermost]
        missing = [unit.name for unit in wanted if unit not in given]
        others = [unit.name for unit in given if unit not in wanted]
        twice = [unit.name for place, unit in enumerate(given) if unit in given[:place]]
        for names, what in ((missing, "are missing"), (others, "belong to another root"), (twice, "come twice")):
            if names:
                raise ConfigError(
                    f"set_forward_order: units {', '.join(map(repr, names))} {what}. fix: name each unit with "
                    "parameters below the root once, in the order of their calls; or leave units out for the order in "
                    "which modules are registered"
                )
        # The root holds this order, so the reference back is weak.
        self._root_reference = weakref.ref(root)
        self._units = [unit.reference for unit in given]
        self._places = {unit.reference: place for place, unit in enumerate(given)}
        # Places of the units inside of each unit.
        self._inner = [
            {self._places[other.reference] for other in alive(unit.inner) if other.reference in self._places}
            for unit in given
        ]
        self._backward = self._ends()[::-1]
        self._turns = {place: turn for turn, place in enumerate(self._backward)}
        self._num_requires_grad_writes = -1
        self._is_gathered: list[bool] = []
        # One entry for each pass with a running call; ``_forward`` is the entry of the latest pass.
        self._progress: weakref.WeakKeyDictionary[ForwardPass, Progress] = weakref.WeakKeyDictionary()
        self._forward = Progress()
        self._is_open = self.has_grad = False
        # The unit that keeps its weights until backward, chosen when the pass begins.
        self._staying: weakref.ref[Unit] | None = None
        # The exception that was being handled when the pass began, because a user may retry inside of ``except``.
        self._handled: BaseException | None = None
        # The progress of the pass that backward is in; None outside of backward.
        self._entered: Progress | None = None

    def _ends(self) -> list[int]:
        """Return the places in the order in which the calls end: a unit ends after its inner units."""
        ended: list[int] = []
        opened: list[int] = []
        for place in range(len(self._units)):
            while opened and place not in self._inner[opened[-1]]:
                ended.append(opened.pop())
            opened.append(place)
        return ended + opened[::-1]

    @property
    def _root(self) -> Root:
        root = self._root_reference()
        assert root is not None
        return root

    def units(self) -> list[Unit]:
        """Return its units, in this order."""
        return alive(self._units)

    def place_of(self, unit: Unit) -> int | None:
        """Return the place of a unit; None for the root."""
        return self._places.get(unit.reference)

    def _unit(self, place: int) -> Unit:
        unit = self._units[place]()
        assert unit is not None
        return unit

    def _gathers_in_backward(self, place: int) -> bool:
        """Return whether all ranks gather this unit in backward: it is trained, or a unit before it is."""
        if self._num_requires_grad_writes != REQUIRES_GRAD_WRITES.number:
            self._num_requires_grad_writes, self._is_gathered = REQUIRES_GRAD_WRITES.number, []
            outermost = self._root.outermost()
            is_trained = outermost is not None and bool(outermost.num_trained)
            for unit in alive(self._units):
                is_trained = is_trained or bool(unit.num_trained)
                self._is_gathered.append(is_trained)
        return self._is_gathered[place] and self._unit(place).unshards_in_backward

    def stays(self, unit: Unit) -> bool:
        """Return whether the unit keeps its weights from forward to backward because backward begins with it."""
        return unit.reference is self._staying

    # ------------------------------------------------------------------ forward

    def begin_pass(self) -> None:
        """Begin to follow ``Root.forward_pass``, which has just begun.

        Raises:
            StateError: a unit was removed from the model.
        """
        if len(self.units()) < len(self._units):
            outermost = self._root.outermost()
            raise StateError(
                f"unit {'' if outermost is None else outermost.name!r}: a unit of its forward order was removed from "
                "the model. fix: call set_forward_order() of the root again"
            )
        self._forward = self._progress[self._root.forward_pass] = Progress()
        self.has_grad, self._staying = torch.is_grad_enabled(), None
        # Now, because a rank that skips a unit would not look before backward.
        update_requires_grad(self._root)
        if self.has_grad and self._backward:
            first = self._unit(self._backward[0])
            if first.reshard_after_forward is None and first.num_trained:
                self._staying = first.reference
        self._is_open, self._handled = True, sys.exc_info()[1]

    def before_call(self, unit: Unit) -> None:
        """Gather the units before this one that this rank has skipped, and this one.

        Raises:
            StateError: the unit was passed already, or the root is not running.
        """
        place = self.place_of(unit)
        if place is None or unit.num_holds:
            return
        if place < self._forward.reached or not self._is_open:
            if unit.weight_state is WeightState.UNSHARDED and not unit.has_old_weights():
                # It needs no collective.
                return
            self._refuse(unit)
        self._skip_to(place)
        self._forward.reached = place + 1
        self._gather(unit)

    def _refuse(self, unit: Unit) -> None:
        if not self._is_open:
            raise StateError(
                f"unit {unit.name!r} was called outside of the root's forward, where the other ranks cannot join its "
                "all-gather. fix: call it inside the root's forward, or inside another method of the root after "
                "megatron_fsdp.register_fsdp_forward_method(root, name); in evaluation, use `with "
                "megatron_fsdp.unsharded(model):`"
            )
        last = self._unit(self._forward.reached - 1)
        raise StateError(
            f"unit {unit.name!r} was called after unit {last.name!r}, but precedes it in the forward order, or it was "
            "called twice. fix: root.set_forward_order([...]) with the units in the order of their first calls; on a "
            "unit that is called several times, also set_reshard_after_forward(False)"
        )

    def _skip_to(self, place: int) -> None:
        for skipped in range(self._forward.reached, place):
            self._forward.reached = skipped + 1
            self._take_part(skipped)

    def _take_part(self, place: int) -> None:
        """Gather a unit that this rank skips, then reshard it if the other ranks do."""
        unit = self._unit(place)
        if unit.num_holds:
            return
        self._gather(unit)
        unit.wait_for_unshard()
        if unit.reshard_after_forward is not False and not self.stays(unit):
            unit.reshard(keep_part=self.has_grad)

    def _gather(self, unit: Unit) -> None:
        """Issue the gather of a unit in forward."""
        if unit.weight_state is not WeightState.SHARDED and unit.has_old_weights():
            unit.reshard()
        self._root.release_lingering(unit)
        # Under ``no_grad`` weights that rest whole are always refreshed, which is a collective.
        with torch.set_grad_enabled(self.has_grad):
            unit.unshard(check=True)

    def prefetch(self, unit: Unit) -> None:
        """Issue the gathers of the units that follow ``unit``, whose call begins."""
        if unit.num_holds:
            return
        limit = self._root.backward.max_packed_buffers if self.has_grad else 1
        ahead: list[Unit] = []
        for place in range(self._forward.reached, min(len(self._units), self._forward.reached + limit)):
            following = self._unit(place)
            if ahead and not following.is_trained:
                break
            ahead.append(following)
        with torch.set_grad_enabled(self.has_grad):
            self._root.prefetch(ahead, check=True)

    def end_pass(self) -> Unit | None:
        """Gather the units that this rank has skipped, unless forward raised.

        Returns:
            The unit that stays gathered for backward.
        """
        has_raised, self._handled = sys.exc_info()[1] is not self._handled, None
        is_open, self._is_open = self._is_open, False
        if has_raised or not is_open:
            return None
        self._skip_to(len(self._units))
        last = self._unit(self._backward[0]) if self._backward else None
        if last is None or not self.stays(last):
            return None
        self._root.lingering = last.reference
        return last

    def refuse_call(self, unit: Unit) -> None:
        """Refuse a call of a frozen unit whose backward needs weights that no rank will gather.

        Raises:
            StateError: the unit and all earlier ones are frozen, and the call's input requires a gradient.
        """
        place = self.place_of(unit)
        if place is None or self._gathers_in_backward(place) or not unit.unshards_in_backward:
            return
        if unit.reshards_after_forward():
            raise StateError(
                f"unit {unit.name!r} is frozen and precedes all trained units in the forward order, but its input "
                "requires a gradient, and the other ranks do not gather the unit again in backward. fix: call "
                "set_reshard_after_forward(False) on the unit, or detach its input"
            )

    def lead_backward(self, call: Call, output: Any) -> Any:
        """Return outputs of the root that lead backward into it, where this rank used no trained parameter."""
        if call.is_pending or not any(unit.num_trained for unit in self._root.units()):
            return output
        anchor = torch.zeros((), requires_grad=True)

        def attach(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            attached: torch.Tensor = _Attached.apply(tensor, anchor)  # type: ignore[no-untyped-call]  # of torch
            return attached

        output = map_tensors(attach, output)
        watch_output(call, output, pre_backward)
        return output

    # ------------------------------------------------------------------ backward

    def enter(self, unit: Unit, call: Call) -> None:
        """Issue the collectives of the units before this one in backward that this rank has skipped."""
        # Other ranks may have gradients, so that nothing waits for this one's first.
        self._root.backward.has_gradients = True
        progress = self._progress_of(call)
        if progress is None:
            return
        if self._entered is not progress:
            self.finish()
            self._entered = progress
        place = self.place_of(unit)
        if place is not None and not _is_further(unit, call):
            self._pass_by(progress, place)

    def _progress_of(self, call: Call) -> Progress | None:
        """Return the progress of the pass of a call; None for a call in a backward or outside of the root's forward."""
        return None if call.forward_pass is None else self._progress.get(call.forward_pass)

    def _pass_by(self, progress: Progress, place: int) -> None:
        """Issue the collectives of the units before ``place`` in backward, and reduce the units that it has left."""
        for earlier in self._backward[: self._turns[place]]:
            self._skip(progress, earlier)
        progress.passed.add(place)
        self._close_after(progress, place)

    def _skip(self, progress: Progress, place: int) -> None:
        """Issue the collectives of a rank that enters this unit, in its order, unless this rank has entered it."""
        if place in progress.passed:
            return
        progress.passed.add(place)
        self._close_after(progress, place)
        self._issue(progress, place)
        self._issue_next(progress, place)
        # Nothing of this rank's needs it, or backward would have come to it before.
        self._give_back(self._unit(place))

    def _close_after(self, progress: Progress, place: int) -> None:
        """Reduce the units that backward has left when it is at ``place``."""
        for later in range(len(self._units) - 1, place, -1):
            if later not in self._inner[place]:
                self._close(progress, later)

    def _issue(self, progress: Progress, place: int) -> None:
        """Issue the gather of a unit in its turn, unless its weights were kept."""
        if place not in progress.issued:
            progress.issued.add(place)
            if self._gathers_in_backward(place):
                self._unit(place).unshard(check=False)

    def _give_back(self, unit: Unit) -> None:
        """Reshard a unit that this rank does not use, unless all ranks keep its weights after backward."""
        if unit.reshard_after_backward:
            unit.reshard()
        else:
            unit.wait_for_unshard()
            unit.show_sharded()

    def _close(self, progress: Progress, place: int) -> None:
        if place not in progress.closed:
            progress.closed.add(place)
            unit = self._unit(place)
            leave_unit(unit)
            # All ranks reduce once for each pass in a backward, even if this rank ran the unit in one pass only.
            self._root.backward.closed.discard(unit.reference)
            post_backward(unit)

    def gather(self, entered: Unit, call: Call) -> None:
        """Issue the gather of the unit that backward has entered, and of the one that comes next."""
        progress, place = self._entered, self.place_of(entered)
        if _is_further(entered, call):
            return
        if place is None:
            if entered.unshards_in_backward:
                entered.unshard(check=False)
        elif progress is not None:
            self._issue(progress, place)
        if progress is not None:
            self._issue_next(progress, place)

    def _issue_next(self, progress: Progress, place: int | None) -> None:
        """Issue the gather of the unit whose turn follows that of ``place``; None is the root's."""
        following = -1 if place is None else self._turns[place]
        for earlier in self._backward[following + 1 :]:
            if self._gathers_in_backward(earlier):
                self._issue(progress, earlier)
                break
            progress.issued.add(earlier)

    def before_recomputation(self, unit: Unit) -> None:
        """Issue the gathers up to a unit that activation checkpointing computes again, in the order of backward.

        Raises:
            StateError: the recomputation is that of a reentrant checkpoint.
        """
        progress, place = self._entered, self.place_of(unit)
        if place is None:
            return
        if progress is None:
            raise StateError(
                f"unit {unit.name!r} is computed again before backward has reached an output of a unit, as in a "
                "reentrant checkpoint, so its gathers have no place in the forward order. fix: "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        for earlier in self._backward[: self._turns[place] + 1]:
            if earlier not in progress.issued:
                self._issue(progress, earlier)
                other = self._unit(earlier)
                calls = other.calls_to_come()
                if earlier != place and all(self._progress_of(call) is not progress for call in calls):
                    self._give_back(other)

    def finish(self) -> None:
        """Issue the remaining collectives of the pass that backward is in."""
        progress, self._entered = self._entered, None
        if progress is not None:
            for place in self._backward:
                self._skip(progress, place)
            for place in range(len(self._units) - 1, -1, -1):
                self._close(progress, place)

    def forget(self) -> None:
        """Forget a backward that raised."""
        self._entered = None

    @property
    def drains(self) -> bool:
        """Return whether compute may wait for reductions in backward: no rank waits for a gather there."""
        return all(group.weights.rests_whole for unit in alive(self._units) for group in unit.groups)

    def refuse_late(self, unit: Unit) -> None:
        """Refuse a gradient of a unit whose gradients are reduced already."""
        raise StateError(
            f"unit {unit.name!r}: a gradient arrived after backward had passed the unit's place in the forward order, "
            "through a tensor that the unit did not return. fix: return that tensor from the unit's forward"
        )


class _Attached(torch.autograd.Function):
    """An identity function whose backward gives no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        """Return a view of the tensor."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        """Return no gradients."""
        return None, None


def _is_further(unit: Unit, call: Call) -> bool:
    """Return whether the place of the unit in backward is an earlier call, because the unit stays gathered."""
    return call.begin > call.first_begin() and unit.weight_state is WeightState.UNSHARDED


def order_of(root: Root, units: Iterable[Unit] | None) -> ForwardOrder:
    """Return a forward order of ``units``; None: the order in which the root's modules are registered."""
    return ForwardOrder(root, root.units() if units is None else list(units))


def share_forward_order(module: nn.Module) -> None:
    """Set the forward order of each root in a module to the order in which modules are registered.

    Raises:
        StateError: the module holds no unit.
    """
    roots = {id(unit.root): unit.root for unit in units_below(module)}
    if not roots:
        raise StateError(
            f"{type(module).__name__} contains no unit, so it has no forward order. fix: call fully_shard on it first"
        )
    for root in roots.values():
        root.order = order_of(root, None)
