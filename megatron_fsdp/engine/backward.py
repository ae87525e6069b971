"""begin_backward and pre_backward: a backward begins, and reaches the calls of units one after the other.

Autograd calls ``pre_backward`` when it reaches an output of a unit's call. A gradient buffer calls
``UnitGradientListener.begin_gradients`` when its first gradient comes. From the order of calls follows which units
backward has left: their weights are released and their gradients reduced (``post_backward.py``; docs/design/order.md).
FSDP2 has a function ``pre_backward`` in ``FSDPState`` and in ``FSDPParamGroup``.
"""

from __future__ import annotations

import functools
import itertools
import weakref

import torch
from torch import nn

from dbuffer.dtensor.placed_tensor import REQUIRES_GRAD_WRITES
from dbuffer.events import listeners, tell
from megatron_fsdp.engine.final_callback import final_callback
from megatron_fsdp.engine.graph_queries import awaits_call, is_watched
from megatron_fsdp.engine.lane_packer import LanePacker
from megatron_fsdp.engine.post_backward import active_units, drain, drain_completed, leave_unit, post_backward
from megatron_fsdp.engine.recovery import discard_dropped_sums, mark_raised, recover
from megatron_fsdp.engine.unit import Call, Root, Unit, WeightState, alive, task_id

__all__ = ["UnitGradientListener", "leave_call", "pre_backward", "pre_recomputation", "update_requires_grad"]


# ---------------------------------------------------------------- backward begins


def begin_backward(root: Root) -> None:
    """Begin a backward of the root, unless one is running: queue ``final_callback``."""
    state = root.backward
    if state.ending is not None and state.ending() is not None:
        return
    recover(root)
    state.number += 1
    state.task = task_id()
    state.ending = _queue_final_callback(root)
    discard_dropped_sums(root)
    _replace_held_gradients(root)
    if state.num_requires_grad_writes != REQUIRES_GRAD_WRITES.number:
        update_requires_grad(root)


def _queue_final_callback(root: Root) -> weakref.ref[functools.partial[None]]:
    """Make autograd call ``final_callback`` at the end of its graph task.

    Returns:
        A weak reference to the callback, which dies with a task that raises.
    """
    # A partial, because it has no frame: a traceback would keep a frame and the callback with it.
    ending = functools.partial(final_callback, root)
    torch.autograd.Variable._execution_engine.queue_callback(ending)
    return weakref.ref(ending, functools.partial(mark_raised, weakref.ref(root)))


def _replace_held_gradients(root: Root) -> None:
    """Give groups new gradient buffers if the user holds earlier gradients: ``zero_grad`` came after forward."""
    for unit in root.units():
        for group in unit.groups:
            if group.gradient_buffer is not None and group.gradient_buffer.binding.memory.is_held:
                for hook in root.hooks:
                    hook.on_main_grad_held(unit, group)


def update_requires_grad(root: Root) -> None:
    """Tell the hooks which parameters were frozen or unfrozen since their unit's forward.

    Autograd reads a leaf's flag when a gradient arrives, not when forward uses the leaf. The flag at the backward
    counts: peft freezes adapters for a reference model's forward, and unfreezes them before the backward.
    """
    root.backward.num_requires_grad_writes = REQUIRES_GRAD_WRITES.number
    for unit in root.units():
        for group in unit.groups:
            changed = group.fsdp_params.changed_requires_grad()
            if changed:
                for hook in root.hooks:
                    hook.on_requires_grad_changed(unit, group, changed)


# ---------------------------------------------------------------- backward reaches a call


def pre_backward(call: Call) -> None:  # noqa: C901  # in order of time
    """Gather a unit for the backward of one of its calls; release and reduce the units that backward has left.

    Raises:
        StateError: the backward is itself recorded (``create_graph=True``), or weights were changed since forward.
    """
    unit = call.unit
    root, state = unit.root, unit.root.backward
    if torch.is_grad_enabled():
        for hook in root.hooks:
            hook.on_recorded_backward(unit)
    if call.num_changes != unit.count_changes():
        for hook in root.hooks:
            hook.on_changed_weights(unit)
    begin_backward(root)
    task = task_id()
    if task != state.task:
        # A reentrant checkpoint runs this graph, so the backward is one that brings gradients of parameters.
        state.has_gradients = True
    if call.entered_in == state.number:
        if unit.unshards_in_backward and unit.groups and unit.weight_state is not WeightState.UNSHARDED:
            # Backward comes to another output of a call that it has left. The end of the backward releases the unit.
            state.active[unit.reference] = None
            unit.unshard(check=False)
            unit.wait_for_unshard()
        return
    if listeners:
        tell("enter", call)
    # 1. Mark the call as entered, first of all: the steps below ask which calls are still to come.
    call.entered_in, call.task = state.number, task
    if not call.is_pending:
        unit.add_pending(call)
    order = root.order
    if order is not None:
        order.enter(unit, call)
    if call.begin < state.oldest_calls.setdefault(unit.reference, call).begin:
        state.oldest_calls[unit.reference] = call
    # 2. Release the weights of units that backward has left.
    left = _leave_passed(root, call.end, entering=unit) if order is None else []
    state.active[unit.reference] = None
    state.closed.discard(unit.reference)
    # 3. Issue the gather of this unit, unless its weights stayed, and the gathers of the units that come next.
    if order is not None:
        order.gather(unit, call)
    elif unit.backward_prefetch:
        _prefetch_as_asked(unit)
    else:
        _prefetch(unit, call)
    # 4. Reduce the gradients of the units that backward has left. After the gathers, because compute waits for those
    # first. Before the host waits for a gather.
    for each in left:
        post_backward(each)
    # 5. Make compute wait for this unit's weights.
    if unit.unshards_in_backward:
        unit.unshard(check=False)
        unit.wait_for_unshard()


def _prefetch_as_asked(unit: Unit) -> None:
    """Gather the unit, and the units that the user named (``set_modules_to_backward_prefetch``)."""
    if unit.unshards_in_backward:
        unit.unshard(check=False)
    for other in alive(unit.backward_prefetch):
        other.unshard(check=False)


def _prefetch(unit: Unit, call: Call) -> None:
    """Gather the unit, and ahead of use the unit before it, or the units that fit into ``Root.prefetch_bytes``."""
    root = unit.root
    units = [unit] if unit.unshards_in_backward else []
    before = (each for each in call.units_before() if each.groups and each is not unit and each.unshards_in_backward)
    units += itertools.islice(before, 1) if root.prefetch_bytes is None else root.within_budget(before)
    root.prefetch(units, check=False)


def _leave_passed(root: Root, end: int, *, entering: Unit | None = None) -> list[Unit]:
    """Release the weights of the units whose calls in this backward all began after ``end``, a time of the clock.

    Returns:
        The units whose gradients must be reduced now.
    """
    left = []
    for unit in active_units(root):
        if unit is entering:
            continue
        first = root.backward.oldest_calls.get(unit.reference)
        if first is not None and first.begin <= end:
            continue
        if (first is None or first.first_begin() > end) and not awaits_call(unit, end):
            leave_unit(unit)
            left.append(unit)
        elif first is not None:
            # Backward has still to come to an earlier call of the unit, and gathers the weights again then.
            unit.reshard()
    return left


def leave_call(call: Call) -> None:
    """Release and reduce the units that ran inside or after a call: backward has reached the call's inputs."""
    root = call.unit.root
    if root.backward.ending is not None and root.order is None:
        for unit in _leave_passed(root, call.begin - 1):
            post_backward(unit)


# ---------------------------------------------------------------- a checkpoint recomputes a call


def pre_recomputation(unit: Unit, module: nn.Module) -> None:
    """Gather a unit for a forward that runs inside of a backward, of main weights as they are now."""
    root, state = unit.root, unit.root.backward
    num_changes = unit.count_changes()
    has_changed = any(group.freshness.has_changed for group in unit.groups)
    begin_backward(root)
    if root.order is not None:
        root.order.before_recomputation(unit)
    else:
        # A reentrant checkpoint ran the first forward without a graph, so no output was watched. The recomputation
        # shows that backward has left the other units, except units with watched outputs and units around this one.
        for other in active_units(root):
            if other is not unit and not is_watched(other) and unit.reference not in other.inner:
                leave_unit(other)
                post_backward(other)
    if unit.open_call is not None or not is_watched(unit):
        unit.begin_call(module)
        if unit.open_call is not None:
            unit.open_call.num_changes = num_changes
            state.repeated[unit.reference] = unit.open_call
            # After a checkpoint that is not reentrant, the first call is the one in the graph.
            unit.open_call.is_expected = not unit.calls_to_come()
        unit.check_replaced_params()
    state.active[unit.reference] = None
    if has_changed:
        unit.reshard()
    unit.unshard(check=has_changed)
    unit.wait_for_unshard()


# ---------------------------------------------------------------- gradients begin to come


class UnitGradientListener:
    """Passes events of a unit's gradient buffers to the backward; it refers to the unit weakly.

    Attributes:
        owner: ``id`` of the unit.
    """

    def __init__(self, unit: Unit) -> None:
        self.owner = id(unit)
        self._unit = unit.reference

    def count_trained(self) -> None:
        """Count the unit's gradients again, because a parameter was frozen."""
        unit = self._unit()
        if unit is not None:
            unit.count_trained()

    def begin_gradients(self, *, allocates: bool, has_come: bool) -> int:
        """Prepare for the gradients of one of the unit's groups.

        Args:
            allocates: the group is about to allocate its packed buffer. The oldest reductions are completed
                until there is room for one more packed buffer.
            has_come: whether the first gradient has come.
        Returns:
            The number of the backward; 0 if the unit was deleted.
        """
        unit = self._unit()
        if unit is None:
            return 0
        root, state = unit.root, unit.root.backward
        begin_backward(root)
        if allocates:
            if root.order is None or root.order.drains:
                drain(root, state.max_packed_buffers - 1)
            else:
                drain_completed(root)
        if has_come:
            if root.order is not None and unit.reference in state.closed:
                root.order.refuse_late(unit)
            state.has_gradients = True
            if unit.reference not in state.active or unit.reference in state.closed:
                # The unit was closed before these gradients came, and is closed again.
                state.active[unit.reference] = None
                state.closed.discard(unit.reference)
        return state.number

    def lend(self, packer: LanePacker) -> None:
        """Record that a lane reads gradients that ``packer`` holds."""
        unit = self._unit()
        if unit is not None:
            unit.root.backward.lenders.append(weakref.ref(packer))

    def take_back_lent(self) -> None:
        """Make compute wait until a lane has packed the gradients of earlier units, before more are kept for a lane.

        Memory then holds the gradients of one unit and a packed buffer of the unit before it. In bf16 and FP32 that is
        less than the two packed buffers of a backward without a packer.
        """
        unit = self._unit()
        if unit is None:
            return
        state = unit.root.backward
        while len(state.lenders) > max(state.max_packed_buffers - 2, 0):
            lender = state.lenders.pop(0)()
            if lender is not None:
                lender.take_back()
