"""The beginning and the end of a backward: begin_backward, final_callback, and recovery from a backward that raised.

Autograd calls ``final_callback`` when its graph is done. A backward that raises never gets there: a weak reference
tells of it (``_raised``), and the engine's next call gives the memory back (``recover``). FSDP2's function is
``FSDPState._root_post_backward_final_callback``.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable

import torch

from dbuffer.dtensor.placed_tensor import FLAGS_SET
from dbuffer.events import listeners, tell
from megatron_fsdp.engine.grads import GradientBuffer
from megatron_fsdp.engine.last_reduction import finish_last, finish_last_on_compute
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.post_backward import active_units, close_and_reduce, drain, leave_unit, post_backward
from megatron_fsdp.engine.streams import HOST_READS, join_lanes, wait_for_host_reads, wait_for_host_writes
from megatron_fsdp.engine.unit import Root, Unit, WeightState, is_in_backward, task_id
from megatron_fsdp.errors import StateError

__all__ = [
    "begin_backward", "complete_gradients", "final_callback", "recover", "refuse_in_backward", "reset", "settle",
    "start_pending_reductions", "update_requires_grad",
]  # fmt: skip


# ---------------------------------------------------------------- backward begins


def begin_backward(root: Root) -> None:
    """Begin a backward of the root, unless one is running: queue ``final_callback``."""
    state = root.backward
    if state.ending is not None and state.ending() is not None:
        return
    recover(root)
    state.number += 1
    state.is_under_way = True
    state.task = task_id()
    state.ending = _queue_final_callback(root)
    _discard_dropped_sums(root)
    _leave_taken_gradients(root)
    if state.num_flags_set != FLAGS_SET.number:
        update_requires_grad(root)


def _queue_final_callback(root: Root) -> weakref.ref[functools.partial[None]]:
    """Make autograd call ``final_callback`` at the end of its graph task.

    Returns:
        A weak reference to the callback, which dies with a task that raises.
    """
    # A partial, because it has no frame: a traceback would keep a frame and the callback with it.
    ending = functools.partial(final_callback, root)
    torch.autograd.Variable._execution_engine.queue_callback(ending)
    return weakref.ref(ending, functools.partial(_raised, weakref.ref(root)))


def _discard_dropped_sums(root: Root) -> None:
    """Drop the sums of earlier microbatches whose ``.grad`` the user has set to None."""
    if root.backward.has_sums:
        for buffer in _buffers(root):
            buffer.discard_if_dropped()
        root.backward.has_sums = False


def _leave_taken_gradients(root: Root) -> None:
    """Let groups take other memory for gradients if the user keeps earlier ones: ``zero_grad`` came after forward."""
    for unit in root.units():
        for group in unit.groups:
            if group.gradient_buffer is not None and group.gradient_buffer.binding.memory.is_taken:
                for hook in root.hooks:
                    hook.on_gradients_taken(unit, group)


def update_requires_grad(root: Root) -> None:
    """Tell the hooks which parameters were frozen or unfrozen since their unit's forward.

    Autograd reads a leaf's flag when a gradient arrives, not when forward uses the leaf. The flag at the backward
    counts: peft freezes adapters for a reference model's forward, and unfreezes them before the backward.
    """
    root.backward.num_flags_set = FLAGS_SET.number
    for unit in root.units():
        for group in unit.groups:
            changed = group.fsdp_params.changed_requires_grad()
            for hook in root.hooks if changed else ():
                hook.on_requires_grad_changed(unit, group, changed)


# ---------------------------------------------------------------- backward ends


def final_callback(root: Root) -> None:
    """Reduce the remaining units, wait for all reductions, and show the gradients in ``.grad``."""
    state = root.backward
    if listeners:
        tell("finish", root)
    units = root.units()
    is_for_others = not state.has_gradients
    # 1. Close the units that backward has not left yet, in the order of calls.
    if root.order is not None:
        root.order.finish()
    for unit in active_units(root):
        leave_unit(unit)
        post_backward(unit)
    # 2. Complete the gradients, unless ``finalize_backward`` does that later.
    if not state.is_manual:
        _complete(root, units)
    # 3. Release the weights, and forget this backward.
    _show_pending(root)
    _end(root)
    for hook in root.hooks:
        hook.after_backward()
    state.is_unfinished = state.is_manual
    for hook in root.hooks if is_for_others else ():
        hook.on_no_gradients(units)
    if listeners and state.is_last and not state.is_manual:
        tell("backward", root)


def refuse_in_backward(root: Root) -> None:
    """Raise ``StateError`` in a backward, in which gradients cannot be completed."""
    if is_in_backward():
        outermost = root.outermost()
        raise StateError(
            f"unit {'' if outermost is None else outermost.name!r}: gradients cannot be completed in a backward. "
            "fix: call finalize_backward(), wait() or finish_grad_sync() after loss.backward() has returned"
        )


def complete_gradients(root: Root) -> None:
    """Complete, outside of any backward, the gradients that earlier backwards left unreduced or unfinished.

    Raises:
        StateError: called in a backward, from a hook for example.
    """
    refuse_in_backward(root)
    state = root.backward
    if listeners:
        tell("finish", root)
    settle(root)
    try:
        _complete(root, root.units())
    except BaseException:
        _mark_incomplete(root)
        raise
    _show_pending(root)
    _end(root)
    for hook in root.hooks:
        hook.after_backward()
    state.is_unfinished = False
    if listeners and (state.is_last or state.is_manual):
        tell("backward", root)


def _complete(root: Root, units: list[Unit]) -> None:
    """Reduce what is left, wait for all reductions, and show the gradients that are final."""
    _reduce_kept(units)
    drain(root, 0)
    wait_for_host_writes()
    _finalize(root, units)


def _show_pending(root: Root) -> None:
    """Let sums that are not final refuse to be read: ``.grad`` shows a ``PendingGradient``."""
    for buffer in _buffers(root):
        if buffer.binding.sum is not None:
            buffer.binding.show_pending(buffer.binding.sum)
            root.backward.has_sums = True


def _reduce_kept(units: Iterable[Unit]) -> None:
    """Reduce the gradients that earlier backwards kept unreduced on this rank."""
    for unit in units:
        if unit.requires_gradient_sync:
            for buffer in unit.gradient_buffers:
                if buffer.is_filled:
                    close_and_reduce(unit)
                    break


def _finalize(root: Root, units: list[Unit]) -> None:  # noqa: C901  # in order of time
    """Complete the last reductions, show the final gradients in ``.grad``, and call their hooks."""
    is_last = root.backward.is_last or root.backward.is_manual
    finals = [found for unit in units if unit.requires_gradient_sync and (found := _complete_groups(unit, is_last))]
    final = list(itertools.chain.from_iterable(finals))
    buffers = [group.gradient_buffer for group in final if group.gradient_buffer is not None]
    for buffer in buffers:
        # What follows changes ``main_grad``. If it raises, ``mark_incomplete`` compares the number.
        buffer.last_backward = root.backward.number
    sums = [buffer.binding.sum for buffer in buffers]
    is_missing = 1 in b"".join([each.missing for each in sums if each is not None])
    for hook in root.hooks if is_missing else ():
        hook.on_missing(final)
    has_last = False in [unit.rests_final for unit in units]
    if has_last:
        finish_last(root, finals)
    # Autograd ran the hooks on streams of its own. The caller's stream follows all lanes now, also in a graph capture
    # that ends with the backward (docs/design/order.md, "Streams"). Not earlier in backward, because compute would
    # wait for the gather of the next unit.
    join_lanes()
    if has_last:
        finish_last_on_compute(finals)
    for group, buffer in zip(final, buffers, strict=True):
        if listeners and buffer.rests_final:
            tell("final", group)
        buffer.binding.complete()
        if listeners:
            tell("completed", group)
    for hook in root.hooks:
        hook.on_final(final, units, is_missing=is_missing)
    hook_calls: list[Callable[[], object]] = []
    for group, buffer in zip(final, buffers, strict=True):
        # Before those of earlier units.
        hook_calls[:0] = buffer.binding.show()
        if is_last:
            # A step follows, which may change main weights without a trace.
            group.freshness.mark_gathered_changed()
    # A plain model's backward accumulates the first layer's gradients last. A hook there may read all gradients, and
    # step all weights.
    for call_hook in hook_calls:
        call_hook()


def _complete_groups(unit: Unit, is_last: bool) -> list[ParameterGroup]:
    """Return the groups whose sums are complete when this backward ends."""
    found = []
    for group in unit.groups:
        buffer = group.gradient_buffer
        under_way = None if buffer is None else buffer.binding.sum
        if buffer is None or under_way is None or not under_way.is_in_main_grad:
            continue
        if buffer.rests_final or (is_last and unit.requires_all_reduce):
            found.append(group)
    return found


def _end(root: Root) -> None:
    """Release the gathered weights, and reset the state that belongs to one backward."""
    state = root.backward
    for buffer in _buffers(root):
        buffer.end_backward()
    root.lingering = None
    if HOST_READS:
        wait_for_host_reads()
    outermost = root.outermost()
    if outermost is None or outermost.open_call is None:
        # A unit that runs outside of its root's forward begins no pass, so the end of a backward does.
        root.forward_pass = root.forward_pass.after_backward()
    for unit in root.units():
        if unit.reshard_after_backward or unit.weight_state is not WeightState.UNSHARDED:
            if unit.weight_state is not WeightState.SHARDED:
                unit.reshard()
        else:
            # The gathered weights stay for the next forward. Until then modules show the sharded parameters, which
            # users zero and change.
            unit.show_sharded()
    for each in (state.active, state.oldest_calls, state.repeated, state.closed, state.deferred):
        each.clear()
    state.has_gradients = state.is_under_way = False
    state.ending = None


# ---------------------------------------------------------------- a backward raises


def _raised(root: weakref.ref[Root], ending: weakref.ref[functools.partial[None]]) -> None:
    """Make ``.grad`` refuse to be read, because the backward of this callback has raised.

    Runs before the caller of backward sees the error. ``recover`` releases memory later, because a release may wait for
    collectives of other ranks, which wait for this one.
    """
    found = root()
    if found is not None and found.backward.ending is ending:
        for buffer in _buffers(found):
            buffer.mark_incomplete(found.backward.number)
        found.backward.has_sums = True


def _mark_incomplete(root: Root) -> None:
    """Make ``.grad`` of units whose gradients are not shown refuse to be read: ``complete_gradients`` has raised.

    For example in a post-accumulate-grad hook of another parameter. ``_raised`` does the same for a backward.
    """
    for buffer in _buffers(root):
        if buffer.binding.sum is not None:
            buffer.binding.mark_incomplete()
    root.backward.has_sums, root.backward.is_unfinished = True, False


def recover(root: Root) -> None:
    """Clean up after a backward that raised: autograd never called its ``final_callback``.

    Outside of any backward the last one is over, even if a device's thread still holds its graph task.
    """
    ending = root.backward.ending
    if ending is not None and (ending() is None or not is_in_backward()):
        _discard_backward(root)


def settle(root: Root) -> None:
    """End what earlier backwards have left: clean up after one that raised, and drop the sums that the user dropped.

    Raises:
        StateError: the user has dropped a part of a sum, or nothing of one that a backward has left incomplete.
    """
    recover(root)
    _discard_dropped_sums(root)


def reset(root: Root) -> None:
    """Drop a forward or backward that raised, and all gradients that are incomplete or not finalized."""
    _discard_backward(root)
    for buffer in _buffers(root):
        under_way = buffer.binding.sum
        if root.backward.is_unfinished or (under_way is not None and under_way.is_incomplete):
            buffer.discard_sum()
    root.backward.is_unfinished, root.backward.awaited = False, 0


def _discard_backward(root: Root) -> None:
    """Drop the gradients of a backward that raised, and reshard all units."""
    state = root.backward
    if root.order is not None:
        root.order.forget()
    for unit in root.units():
        unit.open_call = None
        for buffer in unit.gradient_buffers if state.ending is not None else ():
            buffer.discard_backward(state.number)
            state.has_sums = state.has_sums or buffer.binding.sum is not None
        unit.reshard()
    _end(root)


def start_pending_reductions(root: Root) -> None:
    """Issue outside of a backward the reductions of gradients kept on this rank; ``complete_gradients`` ends them."""
    settle(root)
    try:
        _reduce_kept(root.units())
    except BaseException:
        _mark_incomplete(root)
        raise


def _buffers(root: Root) -> list[GradientBuffer]:
    """Return the gradient buffers of all units."""
    return [buffer for unit in root.units() for buffer in unit.gradient_buffers]
