"""Schedule: when the units of one root are gathered and released, and how forward passes through them.

Nobody else unshards or reshards a parameter group, so that all of it is told (``dbuffer.events``) and every rank's
order of collectives is decided here and in ``backward.py`` (docs/design/order.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler

from dbuffer.events import listeners, tell
from megatron_fsdp.runtime.guards.agreement import FirstUse
from megatron_fsdp.runtime.guards.refusals import note_reads
from megatron_fsdp.runtime.step.lanes import forget_unused_streams, wait_for_event
from megatron_fsdp.runtime.step.outputs import Attributes, watch_given, watch_inputs, watch_made, watch_output
from megatron_fsdp.runtime.step.unit import Call, Unit, WeightState, alive, is_in_backward
from megatron_fsdp.runtime.weights.memory_slots import BufferPools

__all__ = ["Schedule"]

_NOBODY: weakref.ref[Any] = weakref.ref(set())
"""A reference to no unit."""


_MAX_LENGTH = 65_536


class ForwardOrder:
    """Records each forward pass and replays the last one as a prediction.

    A pass that takes another way than the last one is met by gathers on demand, and becomes the next prediction.
    """

    def __init__(self) -> None:
        self._recorded: list[weakref.ref[Unit]] = []
        self._expected: list[weakref.ref[Unit]] = []
        self._cursor = 0

    def start_pass(self) -> None:
        """A pass begins; what was recorded since the last one is the prediction now."""
        self._expected, self._recorded, self._cursor = self._recorded or self._expected, [], 0

    def visit(self, unit: Unit) -> None:
        """Record that a unit runs, and find it in the prediction."""
        if len(self._recorded) < _MAX_LENGTH:
            self._recorded.append(unit.reference)
        # A unit that is not where it was last time moves the cursor to the end.
        while self._cursor < len(self._expected) and self._expected[self._cursor]() is not unit:
            self._cursor += 1
        self._cursor += 1

    def following(self) -> Unit | None:
        """Return the unit with parameters that is expected after the one last visited, None where it is not known."""
        for reference in self._expected[self._cursor : self._cursor + 2]:
            unit = reference()
            if unit is not None and unit.groups:
                return unit
        return None


class Schedule:
    """Drives the units below one root.

    Attributes:
        step_event: recorded after an optimizer step, awaited by the next forward; None for none.
        pools: of memory slots.
        trail: the units of this forward pass that were left, in order, for each call that backward may come to.
        armed: units whose inner modules' outputs are watched.
        first_use: the moment when the ranks agree on what the units are.
    """

    def __init__(self) -> None:
        self.step_event: Any = None
        self.pools = BufferPools()
        self.trail: list[weakref.ref[Unit]] = []
        self.armed: list[weakref.ref[Unit]] = []
        # Weak: a circle would keep slots until the garbage collector comes.
        self.first_use = FirstUse(weakref.WeakMethod(self._served))
        self._units: list[weakref.ref[Unit]] = []
        self._root: weakref.ref[Unit] = _NOBODY
        self._clock = 0
        self._order = ForwardOrder()
        # By the identity of units' modules, which are never replaced.
        self._kept: dict[int, Attributes] = {}
        # The unit that forward left last, whose weights stay until the next one is needed: backward may be next.
        self._lingering: weakref.ref[Unit] = _NOBODY
        self._ahead: weakref.ref[Unit] = _NOBODY

    def adopt(self, root: Unit, units: Iterable[Unit]) -> None:
        """Serve ``units``, of which ``root`` is the outermost."""
        self._root = root.reference
        for unit in units:
            unit.schedule = self
            self._units.append(unit.reference)
        self.arm()

    def arm(self) -> None:
        """Watch what modules inside of the units return, until that is seen to be of no use."""
        self.armed = [unit.reference for unit in self.units() if unit.inner_outputs.arm()]

    @property
    def root(self) -> Unit | None:
        """The outermost unit."""
        return self._root()

    def units(self) -> list[Unit]:
        """Return the units served, in the order in which the root's modules are registered."""
        return [unit for reference in self._units if (unit := reference()) is not None]

    def _served(self) -> tuple[Unit | None, Iterable[Unit]]:
        return self.root, self.units()

    def _disarm(self) -> None:
        left = [unit.reference for unit in alive(self.armed) if not unit.inner_outputs.disarm()]
        root = self._root()
        for tree in root.trees.values() if root is not None and len(left) < len(self.armed) else ():
            tree.count_hooks()
        self.armed = left

    def reshards_after_forward(self, unit: Unit) -> bool:
        """Whether a unit gives its gathered weights back between forward and backward.

        One that was not told to does so when the next unit runs, so the last one of a forward keeps its weights.
        """
        if unit.reshard_after_forward is None:
            return unit is not self._root()
        return unit.reshard_after_forward is not False

    # ------------------------------------------------------------------ weights

    def start_gather(self, unit: Unit | None, *, check: bool) -> None:
        """Issue the gather of a unit's weights, unless they are there or on their way.

        Args:
            check: look whether main weights changed since the last gather; backward need not, as nothing steps between.
        """
        if unit is None or unit.weight_state is not WeightState.SHARDED or not unit.groups:
            return
        if not self.first_use.is_over:
            self.first_use.before_gather(unit)
        if listeners:
            tell("gather", unit)
        for group in unit.groups if check else ():
            # No counter shows a change through .data or by a foreach operator (clipped or averaged weights), so before
            # a forward a refresh that needs no communication is always done, and in evaluation every one.
            if group.weights.has_copy and (group.refreshes_locally or not torch.is_grad_enabled()):
                group.freshness.suspect()
        unit.start_gather(check=check)

    def gather_ahead(self, unit: Unit | None, *, check: bool) -> None:
        """Start a predicted gather, unless the last one predicted is still unused: memory is for one unit ahead."""
        ahead = self._ahead()
        if unit is not None and (ahead is None or ahead.weight_state is not WeightState.GATHERING):
            self.start_gather(unit, check=check)
            self._ahead = unit.reference

    def gather_afresh(self, unit: Unit) -> None:
        """Issue a gather of the main weights as they are now, unless what is gathered is that and was asked for."""
        if unit.weight_state is not WeightState.SHARDED and (
            unit.is_stale() or not all(group.fsdp_params.module_infos.shows_gathered for group in unit.groups)
        ):
            self.reshard(unit)
        for group in unit.groups:
            group.freshness.suspect()
        self.start_gather(unit, check=True)

    def unshard(self, unit: Unit, *, check: bool) -> None:
        """Gather a unit's weights, if need be, and show them in its modules; compute issued afterwards may use them."""
        self.start_gather(unit, check=check)
        self.finish_gather(unit)

    def finish_gather(self, unit: Unit) -> None:
        """Make compute wait for a gather that was started, and show the weights."""
        if unit.weight_state is WeightState.GATHERING:
            if listeners:
                tell("use", unit)
            unit.finish_gather()
            if listeners:
                tell("unsharded", unit)
        elif unit.weight_state is WeightState.UNSHARDED:
            for group in unit.groups:
                group.show_unsharded()

    def reshard(self, unit: Unit, *, keep_part: bool = False) -> None:
        """Release a unit's gathered weights; see ``Unit.reshard``."""
        unit.entered = None
        if unit.weight_state is not WeightState.SHARDED:
            if listeners:
                tell("reshard", unit)
            unit.reshard(keep_part=keep_part)

    # ------------------------------------------------------------------ forward

    def before_forward(self, unit: Unit, module: nn.Module, given: Any) -> None:
        """Gather the unit for its forward, and start the gather of the unit that followed it last time.

        Args:
            given: to the module, tensors in any structure.
        """
        if unit is self._root() and not unit.awaits(module):
            if unit.backward.awaited is not None:
                unit.backward.awaited("forward")
            self._start_pass()
        if not self.open_call(unit, module):
            return
        # First, since to release weights is to restore what replaced parameters lent to the call.
        if unit.weight_state is not WeightState.SHARDED and unit.is_stale():
            self.reshard(unit)
        unit.admit_replaced_params()
        self._release_lingering(unit)
        unit.follow_requires_grad()
        self.unshard(unit, check=True)
        self._order.visit(unit)
        if not self.trail and unit.open_call is not None and torch.is_grad_enabled():
            # No other unit's outputs tell when backward is through with this one.
            watch_inputs(unit.open_call, given)
        if unit.forward_prefetch:
            for reference in unit.forward_prefetch:
                self.start_gather(reference(), check=True)
        else:
            self.gather_ahead(self._order.following(), check=True)

    def after_forward(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Watch what forward left behind for backward, and reshard."""
        call = unit.open_call
        if call is None:
            return
        if torch.is_grad_enabled():
            watch_output(call, output)
            if not unit.unshards_in_backward:
                note_reads(call, output)
            if unit.releases_weights:
                kept = self._kept.get(id(module))
                if kept is None:
                    kept = self._kept[id(module)] = Attributes(unit.inner_outputs.attributed(module))
                kept.watch(call)
                watch_given(call, args)
        if unit.pending_modules:
            return
        if is_in_backward():
            self._end_call(unit, call)
            return
        self._close_call(unit, call)
        if output is None:
            self.reshard(unit)
        if unit is self._root():
            self._end_pass()

    def watch(self, unit: Unit, output: Any) -> None:
        """Gather the unit before backward goes through ``output``, which a module inside of it has just made."""
        call = unit.open_call
        if call is not None and torch.is_grad_enabled():
            watch_made(call, output)

    def open_call(self, unit: Unit, module: nn.Module) -> bool:
        """Note that a module of the unit runs; tell whether that begins a call of the unit."""
        if unit.awaits(module):
            unit.pending_modules.discard(id(module))
            return False
        self._clock += 1
        unit.open_call = Call(unit, self._clock)
        unit.pending_modules = {id(other()) for other in unit.modules} - {id(module)}
        return True

    def _end_call(self, unit: Unit, call: Call) -> None:
        unit.open_call = None
        self._clock += 1
        call.end = self._clock

    def _close_call(self, unit: Unit, call: Call) -> None:
        self._end_call(unit, call)
        for group in unit.groups:
            group.fsdp_params.module_infos.restore()
        if unit.calls and unit.calls[-1]() is call:
            if unit.trail is not self.trail:
                unit.trail, unit.first_begin = self.trail, call.begin
            call.first_begin = unit.first_begin
            call.trail, call.position = self.trail, len(self.trail)
            self.trail.append(unit.reference)
        root = self._root()
        if unit.reshard_after_forward is None and root is not None and root.open_call is not None:
            # A call below the root: whoever runs next takes its place, and the end of the pass settles the last one.
            self._release_lingering(unit)
            self._lingering = unit.reference
        elif self.reshards_after_forward(unit) or not (torch.is_grad_enabled() or unit.reshard_after_forward is False):
            self.reshard(unit, keep_part=torch.is_grad_enabled())

    def _release_lingering(self, unit: Unit) -> None:
        lingering, self._lingering = self._lingering(), _NOBODY
        if lingering is not None and lingering is not unit and lingering.open_call is None:
            self.reshard(lingering)

    def _start_pass(self) -> None:
        if self.step_event is not None:
            for device in {group.spec.device for unit in self.units() for group in unit.groups}:
                wait_for_event(self.step_event, device)
            self.step_event = None
        forget_unused_streams()
        for unit in self.units():
            unit.open_call = None
        self._order.start_pass()
        self.trail = []
        if self.armed:
            self._disarm()
        if profiler._is_profiler_enabled:
            from megatron_fsdp.runtime.lifecycle.profiler_ranges import emit_ranges

            emit_ranges(self.units())

    def _end_pass(self) -> None:
        for unit in self.units():
            if unit.open_call is not None:
                self._close_call(unit, unit.open_call)
        # Reshard what a wrong prediction or an exception left gathered, and without a backward the last one too.
        last = self._lingering() if torch.is_grad_enabled() else None
        awaited = last if last is not None and last.trail is self.trail else None
        for unit in self.units():
            is_left = unit is not awaited and unit.weight_state is not WeightState.SHARDED
            if is_left and self.reshards_after_forward(unit):
                self.reshard(unit, keep_part=torch.is_grad_enabled())
        if awaited is not None:
            # Whoever asks for parameters between forward and backward gets those that can be trained and changed.
            awaited.show_sharded()

    def end_backward(self) -> None:
        """Release what backward has gathered, and what it need not have kept."""
        self._lingering = _NOBODY
        root = self.root
        if root is None or root.open_call is None:
            # Where units are called and their root is not, nothing else begins a pass.
            self.trail = []
        for unit in self.units():
            if unit.reshard_after_backward or unit.weight_state is WeightState.GATHERING:
                self.reshard(unit)
            else:
                unit.entered = None
                # Kept for the next forward; whoever zeroes or changes parameters meanwhile means the sharded ones.
                unit.show_sharded()
