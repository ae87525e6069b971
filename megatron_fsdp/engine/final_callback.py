"""The beginning and the end of a backward: begin_backward, final_callback, and recovery from a backward that raised.

Autograd calls ``final_callback`` when its graph is done. A backward that raises never gets there: a weak reference
tells of it (``_raised``), and the engine's next call gives the memory back (``recover``). FSDP2's function is
``FSDPState._root_post_backward_final_callback``.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable

import torch

from dbuffer.dtensor.placed_tensor import NUM_FLAGS_SET
from dbuffer.events import listeners, tell
from megatron_fsdp.engine.grads import GradientBuffer
from megatron_fsdp.engine.last_reduction import finish_last, finish_last_on_compute
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.post_backward import active_units, drain, post_backward, reduce, release
from megatron_fsdp.engine.streams import HOST_READS, join_lanes, settle_host, settle_host_writes
from megatron_fsdp.engine.unit import Root, Unit, WeightState, is_in_backward, task_id

__all__ = ["begin_backward", "final_callback", "recover", "reset", "start_pending_reductions"]


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
    _drop_discarded_sums(root)
    if state.num_flags_set != NUM_FLAGS_SET[0]:
        state.num_flags_set = NUM_FLAGS_SET[0]
        _update_requires_grad(root)


def _queue_final_callback(root: Root) -> weakref.ref[functools.partial[None]]:
    """Make autograd call ``final_callback`` at the end of its graph task.

    Returns:
        A weak reference to the callback, which dies with a task that raises.
    """
    # A partial, because it has no frame: a traceback would keep a frame and the callback with it.
    ending = functools.partial(final_callback, root)
    torch.autograd.Variable._execution_engine.queue_callback(ending)
    return weakref.ref(ending, functools.partial(_raised, weakref.ref(root)))


def _drop_discarded_sums(root: Root) -> None:
    """Drop the sums of earlier microbatches whose ``.grad`` the user has set to None."""
    if root.backward.has_sums:
        for buffer in _buffers(root):
            buffer.settle()
        root.backward.has_sums = False


def _update_requires_grad(root: Root) -> None:
    """Tell the hooks which parameters were frozen or unfrozen since their unit's forward.

    Autograd reads a leaf's flag when a gradient arrives, not when forward uses the leaf. The flag at the backward
    counts: peft freezes adapters for a reference model's forward, and unfreezes them before the backward.
    """
    for unit in root.units():
        for group in unit.groups:
            changed = group.fsdp_params.changed_requires_grad()
            for hook in root.hooks if changed else ():
                hook.on_changed(unit, group, changed)


# ---------------------------------------------------------------- backward ends


def final_callback(root: Root) -> None:  # noqa: C901  # in order of time
    """Reduce the remaining units, wait for all reductions, and show the gradients in ``.grad``.

    Called outside of any backward, it completes the gradients that earlier backwards left unreduced.
    """
    state = root.backward
    if listeners:
        tell("finish", root)
    is_inside = is_in_backward()
    if not is_inside:
        recover(root)
        _drop_discarded_sums(root)
    units = root.units()
    is_for_others = is_inside and not state.has_gradients
    # 1. Close the units that backward has not left yet, in the order of calls.
    _leave_all(root, is_inside=is_inside)
    # 2. Complete the gradients, unless ``finalize_backward`` does that later.
    is_left = is_inside and state.is_manual
    if not is_left:
        _reduce_kept(units)
        drain(root, 0)
        settle_host_writes()
        try:
            _finalize(root, units)
        except BaseException:
            if not is_inside:
                _void_sums(root)
            raise
    # 3. Sums that are not final refuse to be read: ``.grad`` shows a ``PendingGradient``.
    for buffer in _buffers(root):
        if buffer.binding.sum is not None:
            buffer.binding.show_pending(buffer.binding.sum)
            state.has_sums = True
    # 4. Release the weights, and forget this backward.
    _end(root)
    for hook in root.hooks:
        hook.after_backward()
    state.is_unfinished = is_left
    for hook in root.hooks if is_for_others else ():
        hook.on_no_gradients(units)
    if listeners and (state.is_last or state.is_manual) and not is_left:
        tell("backward", root)


def _leave_all(root: Root, *, is_inside: bool) -> None:
    """Release and reduce all units that backward is in."""
    if is_inside and root.order is not None:
        root.order.finish()
    for unit in active_units(root):
        release(unit)
        post_backward(unit)


def _reduce_kept(units: Iterable[Unit]) -> None:
    """Reduce the gradients that earlier backwards kept unreduced on this rank."""
    for unit in units:
        if unit.requires_gradient_sync:
            for buffer in unit.gradients:
                if buffer.is_filled:
                    reduce(unit)
                    break


def _finalize(root: Root, units: list[Unit]) -> None:
    """Complete the last reductions, and show the final gradients in ``.grad``."""
    is_last = root.backward.is_last or root.backward.is_manual
    finals = [found for unit in units if unit.requires_gradient_sync and (found := _final(unit, is_last))]
    final = list(itertools.chain.from_iterable(finals))
    sums = [group.gradients.binding.sum for group in final if group.gradients is not None]
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
    """Release the gathered weights, and reset the state that belongs to one backward."""
    state = root.backward
    for buffer in _buffers(root):
        buffer.end_backward()
    root.lingering = None
    if HOST_READS:
        settle_host()
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
    for each in (state.active, state.entered, state.repeated, state.closed, state.deferred):
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
            buffer.void(found.backward.number)
        found.backward.has_sums = True


def _void_sums(root: Root) -> None:
    """Make ``.grad`` of units whose gradients are not shown refuse to be read: a hook of another parameter raised.

    Outside of any backward, where ``finalize_backward`` completes gradients: ``_raised`` does so for a backward.
    """
    for buffer in _buffers(root):
        if buffer.binding.sum is not None:
            buffer.binding.void()
    root.backward.has_sums, root.backward.is_unfinished = True, False


def recover(root: Root) -> None:
    """Clean up after a backward that raised: autograd never called its ``final_callback``.

    Outside of any backward the last one is over, even if a device's thread still holds its graph task.
    """
    ending = root.backward.ending
    if ending is not None and (ending() is None or not is_in_backward()):
        _abandon(root)


def reset(root: Root) -> None:
    """Drop a forward or backward that raised, and all gradients that are incomplete or not finalized."""
    _abandon(root)
    for buffer in _buffers(root):
        under_way = buffer.binding.sum
        if root.backward.is_unfinished or (under_way is not None and under_way.is_void):
            buffer.discard()
    root.backward.is_unfinished, root.backward.awaited = False, 0


def _abandon(root: Root) -> None:
    """Drop the gradients of a backward that raised, and reshard all units."""
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
    """Issue outside of a backward the reductions of gradients kept on this rank; ``final_callback`` completes them."""
    recover(root)
    _drop_discarded_sums(root)
    _reduce_kept(root.units())


def _buffers(root: Root) -> list[GradientBuffer]:
    """Return the gradient buffers of all units."""
    return [buffer for unit in root.units() for buffer in unit.gradients]
