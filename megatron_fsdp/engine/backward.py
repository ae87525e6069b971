"""Backward: how a backward passes through the units of one root, from the first hook that it calls to final gradients.

Autograd says when it reaches an output of a unit's call (``before_backward``) and when gradients begin to come
(``begin_gradients``). From that follows which units it has left: they are closed, which is where their gradients are
reduced, and released (docs/design/order.md).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from dbuffer.dtensor.placed_tensor import NUM_FLAGS_SET
from dbuffer.events import listeners, tell
from megatron_fsdp.engine.accumulation import GradState
from megatron_fsdp.engine.freshness import MOMENTS
from megatron_fsdp.engine.grads import GradientBuffer, LateGradients
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.reduce import Reduction, complete_last, start_last
from megatron_fsdp.engine.root import Schedule
from megatron_fsdp.engine.streams import Ticket, join_lanes, lane, settle_host_writes, turns, wait_on_host
from megatron_fsdp.engine.unit import Call, Unit, WeightState, alive, is_in_backward, task_id
from megatron_fsdp.errors import AgreementError

__all__ = ["Backward", "is_run"]

_RESTS_FINAL = operator.attrgetter("rests_final")


class Backward:
    """Drives backwards through the units below one root, one at a time.

    Attributes:
        is_last: whether the next backward ends an optimizer step's gradient accumulation.
        number: how many backwards there were so far. is_under_way: whether the last one of them has not ended.
        max_packed_buffers: how many units' packed gradients may live at once.
        is_manual: whether a backward leaves it to a ``finish`` outside of it to complete the gradients.
        is_unfinished: whether that is still to come. awaited: identity of the handle to be waited for.
        active: units that this backward is in, or whose weights it has gathered once more. Weak, so that a model whose
            backward raised is freed when it is deleted. entered: the oldest call of each unit that it has come to.
            repeated: the last one of each unit that it has computed again. All by identity.
        lenders: whose gradients a lane still reads, oldest first, weakly.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.is_last = True
        self.number = 0
        self.is_under_way = False
        devices = {group.spec.compute_device for unit in schedule.units() for group in unit.groups}
        self._has_streams = any(turns(device) is not None for device in devices)
        self.max_packed_buffers = 2 if self._has_streams else 1
        self.is_manual = self.is_unfinished = False
        self.awaited = 0
        self.active: dict[int, weakref.ref[Unit]] = {}
        self.entered: dict[int, Call] = {}
        self.repeated: dict[int, Call] = {}
        # Units whose gradients it has done with; those that were closed when nothing had a gradient yet.
        self._closed: set[int] = set()
        self._deferred: list[weakref.ref[Unit]] = []
        # Whether anything has a gradient, or will have; autograd's number of the graph that it began in.
        self._has_gradients = False
        self._task = -1
        # What autograd calls at the end; dead when the backward has raised, None where none is under way.
        self._ending: weakref.ref[functools.partial[None]] | None = None
        self.lenders: list[weakref.ref[LateGradients]] = []
        self._schedule = schedule
        self._has_sums = False
        # ``NUM_FLAGS_SET`` when the last backward began.
        self._num_flags_set = -1
        # Units whose gradients are being reduced, in the order of issue.
        self._reducing: list[weakref.ref[Unit]] = []
        self._guards = schedule.guards
        self._last, self._missing = LastReductions(), self._guards.missing
        for unit in schedule.units():
            unit.backward = self

    def _buffers(self) -> list[GradientBuffer]:
        return [buffer for unit in self._schedule.units() for buffer in unit.gradients]

    def share_reductions(self, other: Backward) -> None:
        """Count packed gradient buffers together with another root's."""
        self._reducing = other._reducing

    # ------------------------------------------------------------------ begin, raise

    def begin(self) -> None:
        """Note that a backward is under way."""
        if self._ending is None or self._ending() is None:
            self.recover()
            self.number += 1
            self.is_under_way = True
            self._task = task_id()
            self._ending = self._follow_task()
            self._settle()
            if self._num_flags_set != NUM_FLAGS_SET[0]:
                self._num_flags_set = NUM_FLAGS_SET[0]
                self._guards.follow_flags(self._schedule.units())

    def _follow_task(self) -> weakref.ref[functools.partial[None]]:
        """Have autograd call ``finish`` at the end of its task; what is returned dies with a task that raises.

        No frame may refer to what is called, as a traceback would keep it: a partial has none of its own.
        """
        ending = functools.partial(Backward.finish, self)
        torch.autograd.Variable._execution_engine.queue_callback(ending)
        return weakref.ref(ending, functools.partial(_raised, weakref.ref(self)))

    def _settle(self) -> None:
        """Take notice of sums under way that users threw away."""
        if self._has_sums:
            for buffer in self._buffers():
                buffer.settle()
            self._has_sums = False

    def void(self, ending: weakref.ref[functools.partial[None]]) -> None:
        """Let ``.grad`` refuse to be read, as the backward of that ending has raised.

        Before whoever called backward hears of it. No more than that, as ranks that wait for this one may hold it up:
        ``recover`` gives memory back.
        """
        if self._ending is ending:
            for buffer in self._buffers():
                buffer.void(self.number)
            self._has_sums = True

    def recover(self) -> None:
        """Forget a backward that raised: its graph task never ran the final callback.

        Outside of any backward it is over, whether or not a device's thread has let go of the task by then.
        """
        if self._ending is not None and (self._ending() is None or not is_in_backward()):
            self._abandon()

    def reset(self) -> None:
        """Forget a forward or backward that raised, and the gradients that are incomplete or not finished."""
        self._abandon()
        for buffer in self._buffers():
            if buffer.binding.is_void or self.is_unfinished:
                buffer.discard()
        self.is_unfinished, self.awaited = False, 0

    def _abandon(self) -> None:
        for unit in self._schedule.units():
            unit.open_call = None
            for buffer in unit.gradients if self._ending is not None else ():
                buffer.abandon(self.number)
                self._has_sums = self._has_sums or buffer.binding.is_under_way
            self._schedule.reshard(unit)
        self._end()

    def _end(self) -> None:
        for buffer in self._buffers():
            buffer.end_backward()
        self._schedule.end_backward()
        for each in (self.active, self.entered, self.repeated, self._closed, self._deferred):
            each.clear()
        self._has_gradients = self.is_under_way = False
        self._ending = None

    # ------------------------------------------------------------------ enter

    def before_backward(self, unit: Unit, call: Call) -> None:
        """Gather the unit again for its backward, end the units that backward has left, start the next gather.

        Raises:
            StateError: the backward is itself recorded (``create_graph=True``), or weights were stepped since forward.
        """
        if torch.is_grad_enabled() or call.moment != MOMENTS[0]:
            self._guards.refuse_backward(call)
        self.begin()
        task = task_id()
        if task != self._task:
            self._has_gradients = True
        if call.entered == self.number:
            if unit.unshards_in_backward and unit.groups and unit.weight_state is not WeightState.UNSHARDED:
                # Left, or even closed: whoever ends the backward releases it once more.
                self.active[id(unit)] = unit.reference
                self._schedule.unshard(unit, check=False)
            return
        if listeners:
            tell("enter", call)
        call.entered, call.task = self.number, task
        if not call.is_expected:
            unit.expect(call)
        # First: whatever this unit awaits, this call may bring.
        if call.begin < self.entered.setdefault(id(unit), call).begin:
            self.entered[id(unit)] = call
        left = self._release_passed(call.end, entering=unit)
        self._enter(unit)
        self._gather(call, unit)
        # Later than gathers, for which compute waits first, and before the host waits for one.
        for each in left:
            self._close(each)
        if unit.unshards_in_backward:
            self._schedule.unshard(unit, check=False)

    def before_recomputation(self, unit: Unit, module: nn.Module) -> None:
        """Gather a unit for a forward inside of backward."""
        # Reentrant checkpointing runs the first forward without a graph, so no output is watched, and this is where
        # backward is seen to move on. Units whose outputs are watched are left by the watch.
        self.begin()
        for other in self.latest_first():
            if other is not unit and not _is_watched(self, other) and unit.reference not in other.inner:
                self.leave_unit(other)
        if unit.open_call is not None or not _is_watched(self, unit):
            self._schedule.open_call(unit, module)
            if unit.open_call is not None:
                self.repeated[id(unit)] = unit.open_call
                # Not reentrant, the call in the graph is the first one.
                unit.open_call.is_due = not unit.calls_not_entered(self.number)
            self._schedule.refuse_replaced_params(unit)
        self.active[id(unit)] = unit.reference
        self._schedule.unshard(unit, check=False)

    def awaits_call(self, unit: Unit, end: float = math.inf) -> bool:
        """Whether the graph that autograd is going through leads to a call of the unit that it has not entered yet."""
        repeated = self.repeated.get(id(unit)) if self.repeated else None
        if repeated is not None and repeated.is_due and not repeated.entered and repeated.begin <= end:
            return True
        calls = unit.calls_not_entered(self.number, end)
        return bool(calls) and _is_to_come(calls, unit, end, self.entered, self._schedule.units())

    def _gather(self, call: Call, entered: Unit) -> None:
        """Start the gather of the unit entered, if need be, and of those to gather ahead."""
        units = [entered] if entered.unshards_in_backward else []
        if entered.backward_prefetch:
            for unit in units:
                self._schedule.start_gather(unit, check=False)
            for reference in entered.backward_prefetch:
                self._schedule.start_gather(reference(), check=False)
            return
        if self._schedule.prefetch_bytes is not None:
            earlier = alive(reversed(call.trail[: call.position]))
            units += self._schedule.within_budget(
                unit for unit in earlier if unit is not entered and unit.unshards_in_backward
            )
            self._schedule.gather_ahead(units, check=False)
            return
        for position in range(call.position - 1, -1, -1):
            before = call.trail[position]()
            if before is not None and before.groups and before is not entered and before.unshards_in_backward:
                units.append(before)
                break
        self._schedule.gather_ahead(units, check=False)

    # ------------------------------------------------------------------ leave, close, reduce

    def after_call(self, call: Call) -> None:
        """Leave what a call made, as backward has reached what the call was given."""
        if self._ending is not None:
            for unit in self._release_passed(call.begin - 1):
                self._close(unit)

    def latest_first(self) -> list[Unit]:
        """Return the units that backward is in, inner ones before those around them, in one order on every rank."""
        return sorted(alive(self.active.values()), key=self._begin_of, reverse=True)

    def _begin_of(self, unit: Unit) -> int:
        first = self.entered.get(id(unit))
        return 0 if first is None else first.begin

    def _enter(self, unit: Unit) -> None:
        """Be in a unit, which may get gradients once more."""
        self.active[id(unit)] = unit.reference
        self._closed.discard(id(unit))

    def _release_passed(self, end: int, *, entering: Unit | None = None) -> list[Unit]:
        """Give back the weights of the units all of whose calls in this backward began after a tick of the clock.

        Returns:
            Those that are to be closed.
        """
        left = []
        for unit in self.latest_first():
            if unit is entering:
                continue
            first = self.entered.get(id(unit))
            if first is not None and first.begin <= end:
                continue
            if (first is None or first.first_begin > end) and not self.awaits_call(unit, end):
                self._release(unit)
                left.append(unit)
            elif first is not None:
                # An earlier call of the unit has its backward still to come: weights are gathered again then.
                self._schedule.reshard(unit)
        return left

    def begin_gradients(self, unit: Unit, *, packs: bool, has_come: bool) -> None:
        """Take notice that gradients of a parameter group of a unit begin to come, or that zeros stand for them.

        Args:
            packs: they are about to be packed; make room for one more buffer, oldest first.
            has_come: the first one is there.
        """
        self.begin()
        if packs:
            self.drain(self.max_packed_buffers - 1)
        if has_come:
            self._has_gradients = True
            if id(unit) not in self.active or id(unit) in self._closed:
                self._enter(unit)

    def leave_unit(self, unit: Unit) -> None:
        """Give back a unit's weights and reduce its gradients, once per backward."""
        self._release(unit)
        self._close(unit)

    def _release(self, unit: Unit) -> None:
        self.active.pop(id(unit), None)
        unit.forget(self.number)
        if unit.reshard_after_backward:
            self._schedule.reshard(unit)

    def _close(self, unit: Unit) -> None:
        if id(unit) in self._closed or not unit.num_gradients:
            return
        self._closed.add(id(unit))
        # Without a gradient so far, either this rank used none of these parameters, and others may have; or this is a
        # backward that asks for no parameter's gradient at all. Only the latter waits: the others reduce it now. It has
        # no graph of a checkpoint inside, which PyTorch refuses there.
        if not self._has_gradients and (self._deferred or not _brings_gradients(self._schedule.units())):
            self._deferred.append(unit.reference)
            return
        if self._deferred:
            deferred, self._deferred = self._deferred, []
            for each in dict.fromkeys(alive(deferred)):
                if each is not unit:
                    self._reduce(each)
        self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        if not self._guards.first_use.is_over:
            self._guards.first_use.before_reduction(unit)
        complete = self._closed_buffers(unit)
        # Without streams one lane waits for no other.
        after = self._schedule.gathers_ahead() if self._has_streams else ()
        GradientBuffer.reduce(complete, owner=id(unit), after=after)
        for buffer in unit.gradients:
            if buffer.tickets:
                if listeners:
                    tell("reduce", unit)
                self._reducing.append(unit.reference)
                break
        if not unit.rests_final and self.is_last and not self.is_manual and unit.requires_all_reduce and complete:
            self._last.close(unit, self.number)
        if listeners:
            tell("closed", unit)

    def _closed_buffers(self, unit: Unit) -> list[GradientBuffer]:
        """Close a unit's gradient buffers, and return those that are to be reduced, packed or on their lane to be."""
        complete = [buffer for buffer in unit.gradients if buffer.close(reduce=unit.requires_gradient_sync)]
        for buffer in complete:
            if buffer.is_to_pack:
                LateGradients.pack(complete)
                break
        for buffer in complete:
            if 1 in buffer.binding.missing:
                self._missing.say(unit.groups)
                break
        return complete

    # ------------------------------------------------------------------ finish

    def finish(self) -> None:
        """End the backward: close what is open, complete the reductions, hand the gradients to the parameters.

        Outside of any, finish what earlier ones left under way.
        """
        if listeners:
            tell("finish", self)
        is_inside = is_in_backward()
        if not is_inside:
            self.recover()
            self._settle()
        units = self._schedule.units()
        is_for_others = is_inside and not self._has_gradients
        for unit in self.latest_first():
            self.leave_unit(unit)
        is_left = is_inside and self.is_manual
        if not is_left:
            self._reduce_filled(units)
            self.drain(0)
            settle_host_writes()
            self._finalize(units)
        for buffer in self._buffers():
            if buffer.binding.is_under_way:
                # ``.grad`` shows which sums are still to be completed.
                buffer.binding.show_pending()
                self._has_sums = True
        self._end()
        for pool in self._schedule.pools.planned:
            pool.settle()
        self.is_unfinished = is_left
        if is_for_others:
            self._guards.refuse_gathered(group for unit in units for group in unit.groups)
        if listeners and (self.is_last or self.is_manual) and not is_left:
            tell("backward", self)

    def drain(self, num_kept: int) -> None:
        """Make compute wait for all reductions but the newest ``num_kept``, and release their packed buffers."""
        while len(self._reducing) > num_kept:
            unit = self._reducing[0]()
            for buffer in unit.gradients if unit is not None else ():
                if buffer.tickets:
                    if listeners:
                        tell("fold", unit)
                    try:
                        buffer.wait()
                    except RuntimeError as error:
                        AgreementError.raise_for(buffer.unit, "the reduction of its gradients", error)
            del self._reducing[0]

    def start_reductions(self) -> None:
        """Issue, outside of a backward, the reductions that ``finish`` completes."""
        self.recover()
        self._settle()
        self._reduce_filled(self._schedule.units())

    def _reduce_filled(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit.requires_gradient_sync:
                for buffer in unit.gradients:
                    if buffer.is_filled:
                        self._reduce(unit)
                        break

    def _finalize(self, units: list[Unit]) -> None:
        is_last = self.is_last or self.is_manual
        finals = [found for unit in units if unit.requires_gradient_sync and (found := _final(unit, is_last))]
        final = list(itertools.chain.from_iterable(finals))
        is_missing = 1 in b"".join([group.gradients.binding.missing for group in final if group.gradients is not None])
        if is_missing:
            self._missing.say(final)
        is_left = not all(map(_RESTS_FINAL, units))
        if is_left:
            self._last.finish(finals)
        # Hooks waited on the streams that autograd gave them. The caller's follows all of it from here on, also in a
        # graph that ends with the backward (docs/design/order.md, "Streams"). Not before: compute would wait for the
        # gather of the unit that comes next.
        join_lanes()
        if is_left:
            self._last.finish_here(finals)
        for group in final:
            assert group.gradients is not None
            if listeners and group.gradients.rests_final:
                tell("final", group)
            group.gradients.binding.complete()
            if listeners:
                tell("completed", group)
        if is_missing or self._missing.has_question:
            self._missing.settle(final, units)
        self._missing.number += bool(final)
        for group in final:
            assert group.gradients is not None
            group.gradients.binding.show()
            if is_last:
                group.freshness.is_suspect = True


def _final(unit: Unit, is_last: bool) -> list[ParameterGroup]:
    """Return the groups whose sums are complete when this backward ends."""
    found = []
    for group in unit.groups:
        buffer = group.gradients
        is_summed = buffer is not None and buffer.binding.state is GradState.PARTIAL
        if is_summed and (buffer.rests_final or (is_last and unit.requires_all_reduce)):  # type: ignore[union-attr]
            found.append(group)
    return found


def _raised(backward: weakref.ref[Backward], ending: weakref.ref[functools.partial[None]]) -> None:
    found = backward()
    if found is not None:
        found.void(ending)


class LastReductions:
    """Issues last reductions for the units below one root."""

    # Of the reduction issued last whose wire has memory until the host has waited.
    _wired: Ticket | None = None

    def close(self, unit: Unit, backward: int) -> None:
        """Issue what is left to reduce of a unit that the last backward of a step, of this number, has closed.

        Where it is the host that has to wait for the reduction before, that is for ``finish``.
        """
        for buffer in unit.gradients:
            # From here on ``main_grad`` is no sum of this rank's that another backward could go on with.
            buffer.backward = backward
        if all(not buffer.tickets or turns(buffer.packed.device) is not None for buffer in unit.gradients):
            self._issue(unit.groups)

    def finish(self, units: Sequence[Sequence[ParameterGroup]]) -> None:
        """Issue what is left to reduce of these groups, by units, and make compute wait for that and what was issued.

        What a lane cannot do is left for ``finish_here``.
        """
        for groups in units:
            self._issue(groups)
        for buffer in (group.gradients for group in itertools.chain(*units)):
            for ticket in buffer.last_tickets if buffer is not None else ():
                ticket.wait()
            if buffer is not None:
                buffer.last_tickets.clear()

    def _issue(self, groups: Sequence[ParameterGroup]) -> None:
        """Issue what is left to reduce of groups of one unit, unless it is issued already, on the lane."""
        reductions, buffers = _left_of(groups, on_lane=True)
        if not buffers:
            return
        if self._wired is not None:
            # Memory is for one unit on the wire.
            self._wired.wait()
            self._wired = None
        device = buffers[0].packed.device
        ticket = lane("last", device).submit(
            functools.partial(start_last, reductions),
            functools.partial(complete_last, reductions),
            owner=groups[0].unit,
            tickets=[buffer.last_tickets for buffer in buffers],
            after=[ticket for buffer in buffers for ticket in buffer.tickets],
        )
        if turns(device) is None and any(each.wire is not None for each in reductions):
            self._wired = ticket

    @staticmethod
    def finish_here(units: Sequence[Sequence[ParameterGroup]]) -> None:
        """Reduce, on compute, what is left to reduce that no lane can: it lies in CPU memory, so the host waits."""
        devices = set()
        for groups in units:
            reductions, buffers = _left_of(groups, on_lane=False)
            start_last(reductions, None)
            complete_last(reductions)
            devices |= {buffer.packed.device for buffer in buffers}
        for device in devices:
            wait_on_host(device)


def _left_of(groups: Sequence[ParameterGroup], *, on_lane: bool) -> tuple[list[Reduction], list[GradientBuffer]]:
    """Return what is left to reduce of groups of a unit, on a lane or not, and is not issued yet; and tell of it."""
    reductions, buffers = [], []
    for group in groups:
        buffer = group.gradients
        if buffer is None or buffer.rests_final or buffer.last_tickets or buffer.binding.state is not GradState.PARTIAL:
            continue
        if buffer.reduction.finishes_on_lane is on_lane:
            reductions.append(buffer.reduction)
            buffers.append(buffer)
            if listeners:
                tell("final", group)
    return reductions, buffers


def _is_to_come(
    calls: Sequence[Call], unit: Unit, end: float, entered: Mapping[int, Call], units: Iterable[Unit]
) -> bool:
    """Whether the graph that autograd is going through leads to calls of a unit that it has not entered yet.

    That a call is alive does not say so: what keeps it (a log, a cycle, a traceback) is a rank's own affair. A
    gradient still to come does, the unit's or, as this rank may have used none of its parameters there, that of
    a unit which backward has passed already, if of all calls of that one the latest still to be entered ran in the same
    pass (docs/design/order.md).

    Args:
        calls: at least one. end: when the latest of them began. entered: by units, the oldest call that backward has
            come to. units: of the same root.
    """
    if _awaits_gradients(unit):
        return True
    passes = {id(call.trail) for call in calls}
    return any(
        _awaits_gradients(other)
        for other in units
        if id(other) in entered
        and entered[id(other)].first_begin > end
        and any(id(call.trail) in passes for call in other.calls_not_entered(other.backward.number)[-1:])
    )


def _brings_gradients(units: Iterable[Unit]) -> bool:
    """Whether the graph that autograd is going through brings, or may bring, a gradient that has not come yet."""
    return any(map(_awaits_gradients, units)) or _leads_to_checkpoint()


def _leads_to_checkpoint() -> bool:
    """Whether a reentrant checkpoint is still to come, PyTorch's or Megatron's; nobody knows what it brings."""
    to_see: list[torch.autograd.graph.Node | None] = [torch._C._current_autograd_node()]
    seen: set[torch.autograd.graph.Node] = set()
    while to_see:
        node = to_see.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        to_see += [following for following, _ in node.next_functions]
    return False


def _awaits_gradients(unit: Unit) -> bool:
    """Whether the graph that autograd is going through brings gradients that have not come yet."""
    return any(
        not came and param.requires_grad and is_run(param) is True
        for group in unit.groups
        if group.gradients is not None
        for param, came in zip(group.fsdp_params.unsharded_params, group.fsdp_params.came, strict=True)
    )


def is_run(leaf: torch.Tensor) -> bool | None:
    """Whether the graph that autograd is going through accumulates a gradient of a leaf.

    None where it returns it: ``torch.autograd.grad`` was asked for it.
    """
    # The node is found by a view that is never read, so whether the leaf has memory now does not matter.
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def _is_watched(backward: Backward, unit: Unit) -> bool:
    """Whether a hook on outputs says, or will say, that backward is in a call of the unit."""
    return _is_inside(backward, unit) or backward.awaits_call(unit)


def _is_inside(backward: Backward, unit: Unit) -> bool:
    """Whether backward is in a call that it has come to in the graph under way, or comes to one computed again."""
    repeated = backward.repeated.get(id(unit))
    if repeated is not None and not repeated.entered:
        return True
    first = backward.entered.get(id(unit))
    return first is not None and id(unit) in backward.active and first.task <= torch._C._current_graph_task_id()
