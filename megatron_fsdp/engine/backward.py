"""pre_backward, post_backward, final_callback: how a backward passes through the units of one root, in order of time.

Autograd says when it reaches an output of a unit's call (``pre_backward``) and when gradients begin to come
(``GradientsOfUnit.begin_gradients``). From that follows which units it has left: their weights are released, and their
gradients reduced (``post_backward``; docs/design/order.md). FSDP2 has functions of these names in ``FSDPState`` and
``FSDPParamGroup``.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from dbuffer.dtensor.placed_tensor import NUM_FLAGS_SET
from dbuffer.events import listeners, tell
from megatron_fsdp.engine.freshness import MOMENTS
from megatron_fsdp.engine.grads import GradientBuffer, LanePacker, pack_on_lane
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.reduce import GradientReduction, complete_last, start_last
from megatron_fsdp.engine.streams import (
    HOST_READS,
    join_lanes,
    lane,
    settle_host,
    settle_host_writes,
    turns,
    wait_on_host,
)
from megatron_fsdp.engine.unit import Call, Root, Unit, WeightState, alive, is_in_backward, task_id
from megatron_fsdp.errors import AgreementError

__all__ = [
    "GradientsOfUnit", "after_call", "drain", "final_callback", "is_run", "post_backward", "pre_backward",
    "pre_recomputation", "recover", "release", "reset", "share_reductions", "start_pending_reductions",
]  # fmt: skip


# ---------------------------------------------------------------- backward reaches a call


def pre_backward(call: Call) -> None:  # noqa: C901  # in order of time
    """Gather a call's unit again for its backward, end the units that backward has left, start the next gather.

    Raises:
        StateError: the backward is itself recorded (``create_graph=True``), or weights were stepped since forward.
    """
    unit = call.unit
    root, state = unit.root, unit.root.backward
    if torch.is_grad_enabled() or call.moment != MOMENTS[0]:
        for hook in root.hooks:
            hook.on_late_backward(call)
    begin(root)
    task = task_id()
    if task != state.task:
        state.has_gradients = True
    if call.entered == state.number:
        if unit.unshards_in_backward and unit.groups and unit.weight_state is not WeightState.UNSHARDED:
            # Left, or even closed: whoever ends the backward releases it once more.
            state.active[id(unit)] = unit.reference
            unit.unshard(check=False)
            unit.wait_for_unshard()
        return
    if listeners:
        tell("enter", call)
    call.entered, call.task = state.number, task
    if not call.is_expected:
        unit.expect(call)
    order = root.order
    if order is not None:
        order.enter(unit, call)
    # First: whatever this unit awaits, this call may bring.
    if call.begin < state.entered.setdefault(id(unit), call).begin:
        state.entered[id(unit)] = call
    # 1. Release the weights of units that backward has left.
    left = _release_passed(root, call.end, entering=unit) if order is None else []
    state.active[id(unit)] = unit.reference
    state.closed.discard(id(unit))
    # 2. Issue this unit's gather, if need be, and those of the units that come next.
    if order is not None:
        order.gather(unit, call)
    elif unit.backward_prefetch:
        if unit.unshards_in_backward:
            unit.unshard(check=False)
        for reference in unit.backward_prefetch:
            other = reference()
            if other is not None:
                other.unshard(check=False)
    elif root.prefetch_bytes is not None:
        _prefetch_by_bytes(unit, call)
    else:
        units = [unit] if unit.unshards_in_backward else []
        for position in range(call.position - 1, -1, -1):
            before = call.trail[position]()
            if before is not None and before.groups and before is not unit and before.unshards_in_backward:
                units.append(before)
                break
        root.prefetch(units, check=False)
    # 3. Reduce the gradients of the units that were left. Later than gathers, for which compute waits first, and before
    # the host waits for one.
    for each in left:
        post_backward(each)
    # 4. Make compute wait for this unit's weights.
    if unit.unshards_in_backward:
        unit.unshard(check=False)
        unit.wait_for_unshard()


def _prefetch_by_bytes(unit: Unit, call: Call) -> None:
    root, units = unit.root, [unit] if unit.unshards_in_backward else []
    earlier = [each for each in alive(reversed(call.trail[: call.position])) if each.unshards_in_backward]
    units += root.within_budget(each for each in earlier if each is not unit)
    root.prefetch(units, check=False)


def begin(root: Root) -> None:
    """Note that a backward is under way."""
    state = root.backward
    if state.ending is not None and state.ending() is not None:
        return
    recover(root)
    state.number += 1
    state.is_under_way = True
    state.task = task_id()
    state.ending = _queue_final_callback(root)
    _settle(root)
    if state.num_flags_set != NUM_FLAGS_SET[0]:
        state.num_flags_set = NUM_FLAGS_SET[0]
        _follow_flags(root)


def _queue_final_callback(root: Root) -> weakref.ref[functools.partial[None]]:
    """Have autograd call ``final_callback`` at the end of its task; what is returned dies with a task that raises.

    No frame may refer to what is called, as a traceback would keep it: a partial has none of its own.
    """
    ending = functools.partial(final_callback, root)
    torch.autograd.Variable._execution_engine.queue_callback(ending)
    return weakref.ref(ending, functools.partial(_raised, weakref.ref(root)))


def _settle(root: Root) -> None:
    """Take notice of sums under way that users threw away."""
    if root.backward.has_sums:
        for buffer in _buffers(root):
            buffer.settle()
        root.backward.has_sums = False


def _follow_flags(root: Root) -> None:
    """Hand on which parameters were frozen or unfrozen since their unit's forward.

    Autograd asks a leaf for its flag when a gradient arrives, not when forward used it. So what counts is the flag
    at the backward, whatever it was in a forward between: peft freezes adapters for a reference model's forward.
    """
    for unit in root.units():
        for group in unit.groups:
            changed = group.fsdp_params.changed_requires_grad()
            for hook in root.hooks if changed else ():
                hook.on_changed(unit, group, changed)


def _release_passed(root: Root, end: int, *, entering: Unit | None = None) -> list[Unit]:
    """Give back the weights of the units all of whose calls in this backward began after a tick of the clock.

    Returns:
        Those whose gradients are to be reduced.
    """
    left = []
    for unit in _latest_first(root):
        if unit is entering:
            continue
        first = root.backward.entered.get(id(unit))
        if first is not None and first.begin <= end:
            continue
        if (first is None or first.first_begin > end) and not _awaits_call(unit, end):
            release(unit)
            left.append(unit)
        elif first is not None:
            # An earlier call of the unit has its backward still to come: weights are gathered again then.
            unit.reshard()
    return left


def _latest_first(root: Root) -> list[Unit]:
    """Return the units that backward is in, inner ones before those around them, in one order on every rank."""
    entered = root.backward.entered

    def begin_of(unit: Unit) -> int:
        first = entered.get(id(unit))
        return 0 if first is None else first.begin

    return sorted(alive(root.backward.active.values()), key=begin_of, reverse=True)


def release(unit: Unit) -> None:
    """Note that backward has left a unit, and release its weights unless they are to stay."""
    state = unit.root.backward
    state.active.pop(id(unit), None)
    unit.forget(state.number)
    if unit.reshard_after_backward:
        unit.reshard()


def pre_recomputation(unit: Unit, module: nn.Module) -> None:
    """Gather a unit for a forward inside of backward."""
    # Reentrant checkpointing runs the first forward without a graph, so no output is watched, and this is where
    # backward is seen to move on. Units whose outputs are watched are left by the watch.
    root, state = unit.root, unit.root.backward
    begin(root)
    if root.order is not None:
        root.order.before_recomputation(unit)
    for other in _latest_first(root) if root.order is None else ():
        if other is not unit and not _is_watched(other) and unit.reference not in other.inner:
            release(other)
            post_backward(other)
    if unit.open_call is not None or not _is_watched(unit):
        unit.begin_call(module)
        if unit.open_call is not None:
            state.repeated[id(unit)] = unit.open_call
            # Not reentrant, the call in the graph is the first one.
            unit.open_call.is_due = not unit.calls_not_entered(state.number)
        unit.refuse_replaced_params()
    state.active[id(unit)] = unit.reference
    unit.unshard(check=False)
    unit.wait_for_unshard()


def after_call(call: Call) -> None:
    """Leave what ran inside of a call, as backward has reached what the call was given."""
    root = call.unit.root
    if root.backward.ending is not None and root.order is None:
        for unit in _release_passed(root, call.begin - 1):
            post_backward(unit)


# ---------------------------------------------------------------- gradients begin to come


class GradientsOfUnit:
    """What the gradient buffers of a unit tell the backward; it refers to the unit weakly.

    Attributes:
        owner: the identity of the unit.
    """

    def __init__(self, unit: Unit) -> None:
        self.owner = id(unit)
        self.unit = unit.reference

    def count_gradients(self) -> None:
        """Count the unit's gradients again: a parameter was frozen."""
        unit = self.unit()
        if unit is not None:
            unit.count_gradients()

    def begin_gradients(self, *, packs: bool, has_come: bool) -> int:
        """Note that gradients of a group of the unit begin to come, or that zeros stand for them.

        Args:
            packs: they are about to be packed; make room for one more buffer, oldest first.
            has_come: the first one is there.
        Returns:
            The number of the backward; 0 where the unit is gone.
        """
        unit = self.unit()
        if unit is None:
            return 0
        root, state = unit.root, unit.root.backward
        begin(root)
        if packs:
            if root.order is None or root.order.drains:
                drain(root, state.max_packed_buffers - 1)
            else:
                _drain_completed(root)
        if has_come:
            if root.order is not None and id(unit) in state.closed:
                root.order.refuse_late(unit)
            state.has_gradients = True
            if id(unit) not in state.active or id(unit) in state.closed:
                state.active[id(unit)] = unit.reference
                state.closed.discard(id(unit))
        return state.number

    def lend(self, packer: LanePacker) -> None:
        """Note that a lane reads gradients of autograd's that ``packer`` holds."""
        unit = self.unit()
        if unit is not None:
            unit.root.backward.lenders.append(weakref.ref(packer))

    def take_back_lent(self) -> None:
        """Make room for gradients that wait: one unit's and one wide buffer take what two narrow ones do."""
        unit = self.unit()
        if unit is None:
            return
        state = unit.root.backward
        while len(state.lenders) > max(state.max_packed_buffers - 2, 0):
            lender = state.lenders.pop(0)()
            if lender is not None:
                lender.take_back()


# ---------------------------------------------------------------- backward has left a unit


def post_backward(unit: Unit) -> None:
    """Reduce the gradients of a unit that backward has left, once per backward; its weights are released already."""
    state = unit.root.backward
    if id(unit) in state.closed or not unit.num_gradients:
        return
    state.closed.add(id(unit))
    # Without a gradient so far, either this rank used none of these parameters, and others may have; or this is a
    # backward that asks for no parameter's gradient at all. Only the latter waits: the others reduce it now. It has
    # no graph of a checkpoint inside, which PyTorch refuses there.
    if not state.has_gradients and (state.deferred or not _brings_gradients(unit.root.units())):
        state.deferred.append(unit.reference)
        return
    if state.deferred:
        deferred, state.deferred = state.deferred, []
        for each in dict.fromkeys(alive(deferred)):
            if each is not unit:
                _reduce(each)
    _reduce(unit)


def _reduce(unit: Unit) -> None:  # noqa: C901  # in order of time
    """Close a unit's gradient buffers, and issue their reductions."""
    root, state = unit.root, unit.root.backward
    for hook in root.collective_hooks:
        hook.before_reduce(unit)
    # 1. Close the buffers: those that are to be reduced are packed, or on their lane to be.
    complete = [buffer for buffer in unit.gradients if buffer.close(reduce=unit.requires_gradient_sync)]
    for buffer in complete:
        if buffer.packer is not None and buffer.packer.is_due:
            pack_on_lane(complete)
            break
    for buffer in complete:
        under_way = buffer.binding.sum
        if under_way is not None and 1 in under_way.missing:
            for hook in root.hooks:
                hook.on_missing(unit.groups)
            break
    # 2. Issue one reduction of all of them. Without streams one lane waits for no other.
    GradientBuffer.reduce(complete, owner=id(unit), after=root.prefetched() if state.has_streams else ())
    for buffer in unit.gradients:
        if buffer.tickets:
            if listeners:
                tell("reduce", unit)
            state.reducing.append(unit.reference)
            break
    # 3. In the last backward of a step, over the axes that still hold partial sums.
    if not unit.rests_final and state.is_last and not state.is_manual and unit.requires_all_reduce and complete:
        _reduce_last(unit)
    if listeners:
        tell("closed", unit)


def drain(root: Root, num_kept: int) -> None:
    """Make compute wait for all reductions but the newest ``num_kept``, and release their packed buffers."""
    reducing = root.backward.reducing
    while len(reducing) > num_kept:
        unit = reducing[0]()
        for buffer in unit.gradients if unit is not None else ():
            if buffer.tickets:
                if listeners:
                    tell("fold", unit)
                try:
                    buffer.wait()
                except RuntimeError as error:
                    AgreementError.raise_for(buffer.unit, "the reduction of its gradients", error)
        del reducing[0]


def _drain_completed(root: Root) -> None:
    """Release the packed buffers of reductions that are over, without waiting for any."""
    reducing = root.backward.reducing
    while reducing:
        unit = reducing[0]()
        buffers = () if unit is None else unit.gradients
        if not all(ticket.is_completed() for buffer in buffers for ticket in buffer.tickets):
            return
        drain(root, len(reducing) - 1)


# ---------------------------------------------------------------- backward ends


def final_callback(root: Root) -> None:
    """End the backward: reduce what is left, complete the reductions, hand the gradients to the parameters.

    Outside of any, finish what earlier ones left under way.
    """
    state = root.backward
    if listeners:
        tell("finish", root)
    is_inside = is_in_backward()
    if not is_inside:
        recover(root)
        _settle(root)
    units = root.units()
    is_for_others = is_inside and not state.has_gradients
    _leave_all(root, is_inside=is_inside)
    is_left = is_inside and state.is_manual
    if not is_left:
        _reduce_filled(units)
        drain(root, 0)
        settle_host_writes()
        _finalize(root, units)
    for buffer in _buffers(root):
        if buffer.binding.sum is not None:
            # ``.grad`` shows which sums are still to be completed.
            buffer.binding.show_pending(buffer.binding.sum)
            state.has_sums = True
    _end(root)
    for hook in root.hooks:
        hook.after_backward()
    state.is_unfinished = is_left
    for hook in root.hooks if is_for_others else ():
        hook.on_no_gradients(units)
    if listeners and (state.is_last or state.is_manual) and not is_left:
        tell("backward", root)


def _leave_all(root: Root, *, is_inside: bool) -> None:
    if is_inside and root.order is not None:
        root.order.finish()
    for unit in _latest_first(root):
        release(unit)
        post_backward(unit)


def _reduce_filled(units: Iterable[Unit]) -> None:
    """Reduce what earlier backwards kept on this rank."""
    for unit in units:
        if unit.requires_gradient_sync:
            for buffer in unit.gradients:
                if buffer.is_filled:
                    _reduce(unit)
                    break


def _finalize(root: Root, units: list[Unit]) -> None:
    """Make final the gradients whose sums are complete, and show them in ``.grad``."""
    is_last = root.backward.is_last or root.backward.is_manual
    finals = [found for unit in units if unit.requires_gradient_sync and (found := _final(unit, is_last))]
    final = list(itertools.chain.from_iterable(finals))
    sums = [group.gradients.binding.sum for group in final if group.gradients is not None]
    is_missing = 1 in b"".join([each.missing for each in sums if each is not None])
    for hook in root.hooks if is_missing else ():
        hook.on_missing(final)
    is_left = False in [unit.rests_final for unit in units]
    if is_left:
        _finish_last(root, finals)
    # Hooks waited on the streams that autograd gave them. The caller's follows all of it from here on, also in a
    # graph that ends with the backward (docs/design/order.md, "Streams"). Not before: compute would wait for the
    # gather of the unit that comes next.
    join_lanes()
    if is_left:
        _finish_last_here(finals)
    for group in final:
        assert group.gradients is not None
        if listeners and group.gradients.rests_final:
            tell("final", group)
        group.gradients.binding.complete()
        if listeners:
            tell("completed", group)
    for hook in root.hooks:
        hook.on_final(final, units, is_missing=is_missing)
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
        under_way = None if buffer is None else buffer.binding.sum
        if buffer is None or under_way is None or not under_way.is_in_main_grad:
            continue
        if buffer.rests_final or (is_last and unit.requires_all_reduce):
            found.append(group)
    return found


def _end(root: Root) -> None:
    """Release what backward has gathered, and what it need not have kept; no backward is under way any more."""
    state = root.backward
    for buffer in _buffers(root):
        buffer.end_backward()
    root.lingering = None
    if HOST_READS:
        settle_host()
    outermost = root.outermost()
    if outermost is None or outermost.open_call is None:
        # Where units are called and their root is not, nothing else begins a pass.
        root.trail = []
    for unit in root.units():
        if unit.reshard_after_backward or unit.weight_state is not WeightState.UNSHARDED:
            if unit.weight_state is not WeightState.SHARDED:
                unit.reshard()
        else:
            # Kept for the next forward; whoever zeroes or changes parameters meanwhile means the sharded ones.
            unit.show_sharded()
    for each in (state.active, state.entered, state.repeated, state.closed, state.deferred):
        each.clear()
    state.has_gradients = state.is_under_way = False
    state.ending = None


# ---------------------------------------------------------------- a backward raises, or is to be finished by hand


def _raised(root: weakref.ref[Root], ending: weakref.ref[functools.partial[None]]) -> None:
    """Let ``.grad`` refuse to be read, as the backward of that ending has raised.

    Before whoever called backward hears of it. No more than that, as ranks that wait for this one may hold it up:
    ``recover`` gives memory back.
    """
    found = root()
    if found is not None and found.backward.ending is ending:
        for buffer in _buffers(found):
            buffer.void(found.backward.number)
        found.backward.has_sums = True


def recover(root: Root) -> None:
    """Forget a backward that raised: its graph task never ran the final callback.

    Outside of any backward it is over, whether or not a device's thread has let go of the task by then.
    """
    ending = root.backward.ending
    if ending is not None and (ending() is None or not is_in_backward()):
        _abandon(root)


def reset(root: Root) -> None:
    """Forget a forward or backward that raised, and the gradients that are incomplete or not finished."""
    _abandon(root)
    for buffer in _buffers(root):
        under_way = buffer.binding.sum
        if root.backward.is_unfinished or (under_way is not None and under_way.is_void):
            buffer.discard()
    root.backward.is_unfinished, root.backward.awaited = False, 0


def _abandon(root: Root) -> None:
    state = root.backward
    if root.order is not None:
        root.order.forget()
    for unit in root.units():
        unit.open_call = None
        for buffer in unit.gradients if state.ending is not None else ():
            buffer.abandon(state.number)
            state.has_sums = state.has_sums or buffer.binding.sum is not None
        unit.reshard()
    _end(root)


def start_pending_reductions(root: Root) -> None:
    """Issue, outside of a backward, the reductions that ``final_callback`` completes."""
    recover(root)
    _settle(root)
    _reduce_filled(root.units())


def share_reductions(root: Root, other: Root) -> None:
    """Count packed gradient buffers of one root together with another's."""
    root.backward.reducing = other.backward.reducing


def _buffers(root: Root) -> list[GradientBuffer]:
    return [buffer for unit in root.units() for buffer in unit.gradients]


# ---------------------------------------------------------------- what is left to reduce once a step


def _reduce_last(unit: Unit) -> None:
    """Issue what is left to reduce of a unit that the last backward of a step has closed.

    Where it is the host that has to wait for the reduction before, that is for ``_finish_last``.
    """
    for buffer in unit.gradients:
        # From here on ``main_grad`` is no sum of this rank's that another backward could go on with.
        buffer.backward = unit.root.backward.number
    if all(not buffer.tickets or turns(buffer.packed.device) is not None for buffer in unit.gradients):
        _issue_last(unit.root, unit.groups)


def _finish_last(root: Root, units: Sequence[Sequence[ParameterGroup]]) -> None:
    """Issue what is left to reduce of these groups, by units, and make compute wait for that and what was issued.

    What a lane cannot do is left for ``_finish_last_here``.
    """
    for groups in units:
        _issue_last(root, groups)
    for buffer in (group.gradients for group in itertools.chain(*units)):
        for ticket in buffer.last_tickets if buffer is not None else ():
            ticket.wait()
        if buffer is not None:
            buffer.last_tickets.clear()


def _issue_last(root: Root, groups: Sequence[ParameterGroup]) -> None:
    """Issue what is left to reduce of groups of one unit, unless it is issued already, on the lane."""
    reductions, buffers = _left_of(groups, on_lane=True)
    if not buffers:
        return
    state = root.backward
    if state.wired is not None:
        # Memory is for one unit on the wire.
        state.wired.wait()
        state.wired = None
    device = buffers[0].packed.device
    ticket = lane("last", device).submit(
        functools.partial(start_last, reductions),
        functools.partial(complete_last, reductions),
        owner=groups[0].unit,
        tickets=[buffer.last_tickets for buffer in buffers],
        after=[ticket for buffer in buffers for ticket in buffer.tickets],
    )
    if turns(device) is None and any(each.wire is not None for each in reductions):
        state.wired = ticket


def _finish_last_here(units: Sequence[Sequence[ParameterGroup]]) -> None:
    """Reduce, on compute, what is left to reduce that no lane can: it lies in CPU memory, so the host waits."""
    devices = set()
    for groups in units:
        reductions, buffers = _left_of(groups, on_lane=False)
        start_last(reductions, None)
        complete_last(reductions)
        devices |= {buffer.packed.device for buffer in buffers}
    for device in devices:
        wait_on_host(device)


def _left_of(
    groups: Sequence[ParameterGroup], *, on_lane: bool
) -> tuple[list[GradientReduction], list[GradientBuffer]]:
    """Return what is left to reduce of groups of a unit, on a lane or not, and is not issued yet; and tell of it."""
    reductions, buffers = [], []
    for group in groups:
        buffer = group.gradients
        under_way = None if buffer is None else buffer.binding.sum
        if buffer is None or under_way is None or not under_way.is_in_main_grad:
            continue
        if buffer.rests_final or buffer.last_tickets:
            continue
        if buffer.reduction.finishes_on_lane is on_lane:
            reductions.append(buffer.reduction)
            buffers.append(buffer)
            if listeners:
                tell("final", group)
    return reductions, buffers


# ---------------------------------------------------------------- does backward come to a unit once more?


def _awaits_call(unit: Unit, end: float = math.inf) -> bool:
    """Whether the graph that autograd is going through leads to a call of the unit that it has not entered yet."""
    state = unit.root.backward
    repeated = state.repeated.get(id(unit)) if state.repeated else None
    if repeated is not None and repeated.is_due and not repeated.entered and repeated.begin <= end:
        return True
    calls = unit.calls_not_entered(state.number, end)
    return bool(calls) and _is_to_come(calls, unit, end, state.entered, unit.root.units())


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
        and any(id(call.trail) in passes for call in other.calls_not_entered(other.root.backward.number)[-1:])
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


def _is_watched(unit: Unit) -> bool:
    """Whether a hook on outputs says, or will say, that backward is in a call of the unit."""
    return _is_inside(unit) or _awaits_call(unit)


def _is_inside(unit: Unit) -> bool:
    """Whether backward is in a call that it has come to in the graph under way, or comes to one computed again."""
    state = unit.root.backward
    repeated = state.repeated.get(id(unit))
    if repeated is not None and not repeated.entered:
        return True
    first = state.entered.get(id(unit))
    return first is not None and id(unit) in state.active and first.task <= task_id()
