"""The order in which forward ran through the units, and what it says about the next one to be needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.agreement import FirstUse
from megatron_fsdp.runtime.asked_gradients import refuse_gathered
from megatron_fsdp.runtime.gradients import GradientBuffer
from megatron_fsdp.runtime.lanes import join_lanes, trace, wait_for_event
from megatron_fsdp.runtime.memory_slots import BufferPools
from megatron_fsdp.runtime.missing_gradients import MissingGradients
from megatron_fsdp.runtime.outputs import Attributes, watch_given, watch_made, watch_output
from megatron_fsdp.runtime.parameter_group import ParameterGroup, WeightState
from megatron_fsdp.runtime.pending_sums import open_backwards
from megatron_fsdp.runtime.unit import Call, InFlight, Unit, alive, is_in_backward

__all__ = [
    "ForwardOrder",
    "Schedule",
]


class _Ending:
    """Ends a backward when called; lives as long as autograd's task."""

    __slots__ = ("__weakref__", "_finish")

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def __call__(self) -> None:
        self._finish()


class Schedule:
    """Drives the units below one root.

    Attributes:
        is_last_backward: whether the next backward ends an optimizer step's gradient accumulation.
        max_packed_buffers: how many units' packed gradients may live at once.
        step_event: recorded after an optimizer step, awaited by the next forward; None for none. pools: of slots.
        num_backwards: so far. after_backward: called, in order, when the one that ends an accumulation is done.
    """

    def __init__(self) -> None:
        self.is_last_backward = True
        self.max_packed_buffers = 1
        self.step_event: Any = None
        self.pools = BufferPools()
        self.after_backward: list[Callable[[], None]] = []
        self._units: list[weakref.ref[Unit]] = []
        self._root: weakref.ref[Unit] | None = None
        self._clock = 0
        self._order = ForwardOrder()
        # By the identity of units' modules, which are never replaced.
        self._kept: dict[int, Attributes] = {}
        # The unit that forward left last, whose weights stay until the next one is needed: backward may be next.
        self._lingering: weakref.ref[Unit] | None = None
        self._trail: list[weakref.ref[Unit]] = []
        self._is_backward_open = False
        # What autograd calls at the end; dead when the backward has ended or raised.
        self._ending: weakref.ref[_Ending] | None = None
        self._has_sums = False
        self.num_backwards = 0
        self._any_gradient = False
        # Weak, so that a model whose backward raised is freed when it is deleted.
        self._active: dict[int, weakref.ref[Unit]] = {}
        self._closed: set[int] = set()
        self._deferred: list[weakref.ref[Unit]] = []
        self._reducing = InFlight()
        self._ahead: weakref.ref[Unit] | None = None
        # Weak: a circle would keep slots until the garbage collector comes.
        self._first_use = FirstUse(weakref.WeakMethod(self._served))
        self._missing = MissingGradients(self._first_use.tokens)

    def adopt(self, root: Unit, units: Iterable[Unit]) -> None:
        """Serve ``units``, of which ``root`` is the outermost."""
        self._root = weakref.ref(root)
        for unit in units:
            unit.schedule = self
            self._units.append(weakref.ref(unit))

    def share_reductions(self, other: Schedule) -> None:
        """Count packed gradient buffers together with another schedule."""
        self._reducing = other._reducing

    @property
    def root(self) -> Unit | None:
        """The outermost unit."""
        return self._root() if self._root is not None else None

    def units(self) -> Iterator[Unit]:
        """Yield the units served, in the order in which the root's modules are registered."""
        for reference in self._units:
            unit = reference()
            if unit is not None:
                yield unit

    def reshards_after_forward(self, unit: Unit) -> bool:
        """Whether a unit gives its gathered weights back between forward and backward.

        One that was not told to does so when the next unit runs, so the last one of a forward keeps its weights.
        """
        if unit.reshard_after_forward is None:
            return unit is not self.root
        return unit.reshard_after_forward is not False

    # ------------------------------------------------------------------ forward

    def before_forward(self, unit: Unit, module: nn.Module) -> None:
        """Gather the unit for its forward, and start the gather of the unit that followed it last time."""
        if is_in_backward():
            self._before_recomputation(unit, module)
            return
        if self._is_backward_open:
            self.recover()
        if unit is self.root and not unit.awaits(module):
            self._start_pass()
        if self._open_call(unit, module):
            # First, since to release weights is to take back what strangers lend to the call.
            self._release_stale(unit)
            unit.meet_strangers()
            self._release_lingering(unit)
            unit.follow_requires_grad()
            self._unshard(unit, check=True)
            self._prefetch_forward(unit)

    def after_forward(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Watch what forward left behind for backward, and reshard."""
        call = unit.open_call
        if call is None:
            return
        if torch.is_grad_enabled():
            watch_output(call, output)
            if unit.releases_weights:
                self._kept.setdefault(id(module), Attributes()).watch(call, module)
                watch_given(call, args)
        if unit.pending_modules:
            return
        if is_in_backward():
            self._end_call(unit, call)
            return
        self._close_call(unit, call)
        if output is None:
            self._reshard(unit)
        if unit is self.root:
            self._end_pass()

    def _open_call(self, unit: Unit, module: nn.Module) -> bool:
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
        unit.end_call()
        if unit.calls and unit.calls[-1]() is call:
            call.trail, call.position = self._trail, len(self._trail)
            self._trail.append(weakref.ref(unit))
        root = self.root
        if unit.reshard_after_forward is None and root is not None and root.open_call is not None:
            # A call below the root: whoever runs next takes its place, and the end of the pass settles the last one.
            self._release_lingering(unit)
            self._lingering = unit.reference
        elif self.reshards_after_forward(unit) or not (torch.is_grad_enabled() or unit.reshard_after_forward is False):
            self._reshard(unit, keep_part=torch.is_grad_enabled())

    def _release_lingering(self, unit: Unit) -> None:
        lingering, self._lingering = self._lingering() if self._lingering is not None else None, None
        if lingering is not None and lingering is not unit and lingering.open_call is None:
            self._reshard(lingering)

    def _start_pass(self) -> None:
        if self.step_event is not None:
            wait_for_event(self.step_event)
            self.step_event = None
        for unit in self.units():
            unit.open_call = None
        self._order.start_pass()
        self._trail = []

    def reset(self) -> None:
        """Forget a forward or backward that raised, and the gradients that it left incomplete."""
        self._abandon()
        for unit in self.units():
            for buffer in unit.gradients:
                if buffer.is_void:
                    buffer.discard()

    def recover(self) -> None:
        """Forget a backward that raised: its graph task is gone, but never ran the final callback."""
        if self._is_backward_open and (self._ending is None or self._ending() is None):
            self._abandon()

    def _abandon(self) -> None:
        for unit in self.units():
            unit.open_call = None
            if self._is_backward_open:
                for buffer in unit.gradients:
                    buffer.abandon(self.num_backwards)
                    self._has_sums = self._has_sums or buffer.has_sum_under_way
            self._reshard(unit)
        self._reset_backward()

    def _end_pass(self) -> None:
        for unit in self.units():
            if unit.open_call is not None:
                self._close_call(unit, unit.open_call)
        # Reshard what a wrong prediction or an exception left gathered, and without a backward the last one too.
        last = self._lingering() if self._lingering is not None and torch.is_grad_enabled() else None
        awaited = last if last is not None and any(last.outstanding_calls()) else None
        for unit in self.units():
            unit.open_call = None
            if unit is not awaited and not unit.is_sharded and self.reshards_after_forward(unit):
                self._reshard(unit, keep_part=torch.is_grad_enabled())
        if awaited is not None:
            # Whoever asks for parameters between forward and backward gets those that can be trained and changed.
            awaited.conceal()

    def watch(self, unit: Unit, output: Any) -> None:
        """Gather the unit before backward goes through ``output``, which a module inside of it has just made."""
        call = unit.open_call
        if call is not None and torch.is_grad_enabled():
            watch_made(call, output)

    def _release_stale(self, unit: Unit) -> None:
        for group in unit.groups:
            if group.weight_state is not WeightState.SHARDED and group.is_stale():
                group.reshard()

    def _prefetch_forward(self, unit: Unit) -> None:
        self._order.visit(unit)
        if unit.forward_prefetch:
            for reference in unit.forward_prefetch:
                self._start_gather(reference(), check=True)
            return
        self._gather_ahead(self._order.following(), check=True)

    # ------------------------------------------------------------------ backward

    def before_backward(self, call: Call) -> None:
        """Gather the unit again for its backward, end the units that backward has left, start the next gather.

        Raises:
            StateError: the backward is itself recorded (``create_graph=True``).
        """
        if torch.is_grad_enabled():
            raise StateError(
                f"unit {call.unit.name!r}: backward with create_graph=True is not supported: the recorded graph would "
                "use released weights. Keep the module whose second derivatives are wanted unsharded."
            )
        self._open_backward()
        unit = call.unit
        if call.entered == self.num_backwards:
            self._unshard_again(unit)
            return
        call.entered = self.num_backwards
        unit.enter(call)
        self._leave_passed(call)
        self._active[id(unit)] = unit.reference
        self._closed.discard(id(unit))
        if unit.unshards_in_backward:
            self._unshard(unit, check=False)
        self._prefetch_backward(call)

    def before_reading(self, unit: Unit, call: Call | None) -> None:
        """Gather the unit again, if need be, for the backward of an operator that reads its weights.

        Args:
            call: in which the operator ran; None where it ran outside of any, between ``unshard`` and ``reshard``.
        """
        if call is not None:
            self.before_backward(call)
            return
        self._open_backward()
        self._unshard_again(unit)

    def _unshard_again(self, unit: Unit) -> None:
        if unit.unshards_in_backward and not unit.is_unsharded:
            # Left, or even closed: whoever ends the backward releases it once more.
            self._active[id(unit)] = unit.reference
            self._unshard(unit, check=False)

    def gradient_arrived(self, unit: Unit) -> None:
        """Note one gradient of a unit; reduce when it was the last."""
        self._any_gradient = True
        if id(unit) not in self._active:
            self._open_backward()
            self._active[id(unit)] = unit.reference
            self._closed.discard(id(unit))
        if unit.num_arrived == unit.num_gradients and not unit.awaits_inner(self._closed):
            self._close(unit)

    def gradients_missing(self, unit: Unit) -> None:
        """Note that a unit's gradients are reduced without some of them."""
        self._missing.say(unit.groups)

    def _served(self) -> tuple[Unit | None, Iterable[Unit]]:
        return self.root, self.units()

    def make_room(self) -> None:
        """Release packed buffers, oldest first, until there may be one more."""
        self._reducing.drain(self.max_packed_buffers - 1)

    def begin_backward(self) -> int:
        """Note that a backward is under way, and return its number, which counts from 1."""
        self._open_backward()
        return self.num_backwards

    def _open_backward(self) -> None:
        if self._is_backward_open:
            self.recover()
        if not self._is_backward_open:
            self._is_backward_open = True
            self.num_backwards += 1
            ending = _Ending(self.finish)
            self._ending = weakref.ref(ending)
            open_backwards[id(self)] = weakref.ref(self)
            torch.autograd.Variable._execution_engine.queue_callback(ending)
            self._settle()

    def _settle(self) -> None:
        """Take notice of sums under way that users threw away."""
        if self._has_sums:
            for unit in self.units():
                for buffer in unit.gradients:
                    buffer.settle()
            self._has_sums = False

    def _latest_first(self) -> list[Unit]:
        """Return the units that backward is in, inner ones before those around them, in one order on every rank."""
        return sorted(alive(self._active.values()), key=Unit.first_begin, reverse=True)

    def _leave_passed(self, call: Call) -> None:
        for unit in self._latest_first():
            if unit is call.unit:
                continue
            outstanding = list(unit.outstanding_calls())
            if not outstanding or outstanding[0].begin > call.end:
                self._close(unit)
                self._leave(unit)
                continue
            entered = [other.begin for other in outstanding if other.entered == self.num_backwards]
            if entered and min(entered) > call.end:
                # An earlier call of the unit has its backward still to come: weights are gathered again then.
                self._reshard(unit)

    def _before_recomputation(self, unit: Unit, module: nn.Module) -> None:
        # Reentrant checkpointing runs the first forward without a graph, so no output is watched, and this is where
        # backward is seen to move on. Units whose outputs are watched are left by the watch.
        for other in self._latest_first():
            if other is not unit and not any(other.outstanding_calls()) and not other.encloses(unit):
                self._close(other)
                self._leave(other)
        self._open_backward()
        if unit.open_call is not None or not any(unit.outstanding_calls()):
            self._open_call(unit, module)
            unit.meet_strangers()
        self._active[id(unit)] = unit.reference
        self._unshard(unit, check=False)

    def _prefetch_backward(self, call: Call) -> None:
        if call.unit.backward_prefetch:
            for reference in call.unit.backward_prefetch:
                self._start_gather(reference(), check=False)
            return
        for position in range(call.position - 1, -1, -1):
            unit = call.trail[position]()
            if unit is not None and unit.groups and unit is not call.unit and unit.unshards_in_backward:
                self._gather_ahead(unit, check=False)
                return

    def _close(self, unit: Unit) -> None:
        """Give back a unit's trainable weights and reduce its gradients, once per backward."""
        if id(unit) in self._closed or not unit.num_gradients:
            return
        if not self._any_gradient:
            # Nothing has a gradient so far. Either this rank used none of these parameters, and others may have; or
            # this is a backward that asks for no parameter's gradient at all.
            self._leave(unit)
            self._deferred.append(unit.reference)
            self._closed.add(id(unit))
            return
        self._closed.add(id(unit))
        if all(group.is_all_trained for group in unit.groups):
            self._leave(unit)
        deferred, self._deferred = self._deferred, []
        for earlier in (*alive(deferred), unit):
            self._reduce(earlier)

    def _reduce(self, unit: Unit) -> None:
        self._first_use.before_reduction(unit)
        for buffer in unit.gradients:
            buffer.close(reduce=unit.requires_gradient_sync)
        if any(buffer.is_reducing for buffer in unit.gradients):
            trace("reduce", unit.name)
            self._reducing.add(unit)

    def _leave(self, unit: Unit) -> None:
        self._active.pop(id(unit), None)
        unit.forget(self.num_backwards)
        if unit.reshard_after_backward:
            self._reshard(unit)

    def finish(self) -> None:
        """End the backward: close what is open, complete the reductions, hand the gradients to the parameters.

        Outside of any, finish what earlier ones left under way.
        """
        is_for_others = is_in_backward() and not self._any_gradient
        if not is_in_backward():
            self.recover()
            self._settle()
        for unit in self._latest_first():
            self._close(unit)
            self._leave(unit)
        for unit in self.units():
            if unit.requires_gradient_sync and any(buffer.is_filled for buffer in unit.gradients):
                self._reduce(unit)
        self._reducing.drain(0)
        # Hooks waited on the streams that autograd gave them. The caller's follows all of it from here on, also in a
        # graph that ends with the backward (docs/design/order.md, "Streams"). Not before: compute would wait for the
        # gather of the unit that comes next.
        join_lanes()
        self._finalize()
        for unit in self.units():
            for buffer in unit.gradients:
                if buffer.has_sum_under_way:
                    buffer.show_pending()
                    self._has_sums = True
        self._reset_backward()
        if is_for_others:
            refuse_gathered(group for unit in self.units() for group in unit.groups)
        for listener in tuple(self.after_backward) if self.is_last_backward else ():
            listener()

    def _finalize(self) -> None:
        final = [pair for unit in self.units() for pair in self._final(unit)]
        groups = [group for group, _ in final]
        self._missing.say(groups)
        for group, buffer in final:
            trace("final", group.name)
            buffer.complete()
        self._missing.settle(groups, self.units())
        for group, buffer in final:
            buffer.show()
            if self.is_last_backward:
                group.suspect_change()

    def _final(self, unit: Unit) -> Iterator[tuple[ParameterGroup, GradientBuffer]]:
        """Yield the groups whose sums are complete when this backward ends, and their gradients."""
        is_last = self.is_last_backward and unit.requires_all_reduce
        for group in unit.groups if unit.requires_gradient_sync else ():
            buffer = group.gradients
            if buffer is not None and buffer.is_partial and (buffer.rests_final or is_last):
                yield group, buffer

    def _reset_backward(self) -> None:
        self._is_backward_open = False
        open_backwards.pop(id(self), None)
        self._any_gradient = False
        self._lingering = None
        self._active.clear()
        self._closed.clear()
        self._deferred.clear()
        for unit in self.units():
            if unit.reshard_after_backward or unit.has_state(WeightState.GATHERING):
                self._reshard(unit)
            else:
                # Kept for the next forward; whoever zeroes or changes parameters meanwhile means the sharded ones.
                unit.conceal()

    # ------------------------------------------------------------------ weights

    def _start_gather(self, unit: Unit | None, *, check: bool) -> None:
        if unit is None or not unit.has_state(WeightState.SHARDED):
            return
        self._first_use.before_gather(unit)
        trace("gather", unit.name)
        for group in unit.groups:
            # No counter shows a change through .data or by a foreach operator (clipped or averaged weights), so before
            # a forward a refresh that needs no communication is always done, and in evaluation every one.
            if check and (group.refreshes_locally or not torch.is_grad_enabled()):
                group.suspect_change()
            group.start_gather(check=check)

    def _gather_ahead(self, unit: Unit | None, *, check: bool) -> None:
        """Start a predicted gather, unless the last one predicted is still unused: memory is for one unit ahead."""
        ahead = self._ahead() if self._ahead is not None else None
        if unit is not None and (ahead is None or not ahead.has_state(WeightState.GATHERING)):
            self._start_gather(unit, check=check)
            self._ahead = unit.reference

    def _unshard(self, unit: Unit, *, check: bool) -> None:
        self._start_gather(unit, check=check)
        if unit.has_state(WeightState.GATHERING):
            trace("use", unit.name)
        for group in unit.groups:
            if group.weight_state is WeightState.GATHERING:
                group.finish_gather()
            else:
                group.reveal()

    def _reshard(self, unit: Unit, *, keep_part: bool = False) -> None:
        if not unit.is_sharded:
            trace("reshard", unit.name)
            for group in unit.groups:
                group.reshard(keep_part=keep_part)


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
