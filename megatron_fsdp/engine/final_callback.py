"""final_callback: autograd calls it at the end of a backward; the gradients become final and are shown in ``.grad``.

FSDP2's function is ``FSDPState._root_post_backward_final_callback``. Autograd does not call it after a backward that
raised (``recovery.py``). With manual finalization a part of it runs later (``manual_finalization.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from dbuffer.events import listeners, tell
from megatron_fsdp.engine.last_reduction import finish_last, finish_last_on_compute
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.post_backward import active_units, close_and_reduce, drain, leave_unit, post_backward
from megatron_fsdp.engine.streams import HOST_READS, join_lanes, wait_for_host_reads, wait_for_host_writes
from megatron_fsdp.engine.unit import Root, Unit, WeightState

__all__ = ["end_backward", "final_callback", "reduce_and_show", "reduce_kept", "show_pending_sums"]


def final_callback(root: Root) -> None:
    """Reduce the remaining units, wait for all reductions, and show the gradients in ``.grad``."""
    state = root.backward
    if listeners:
        tell("finish", root)
    units = root.units()
    had_gradients = state.has_gradients
    # 1. Close the units that backward has not left yet, in the order of calls.
    if root.order is not None:
        root.order.finish()
    for unit in active_units(root):
        leave_unit(unit)
        post_backward(unit)
    # 2. Complete the gradients, unless ``finalize_backward`` does that later.
    if not state.is_manual:
        reduce_and_show(root, units)
    # 3. Release the weights, and forget this backward.
    show_pending_sums(root)
    end_backward(root)
    for hook in root.hooks:
        hook.after_backward()
    state.is_unfinished = state.is_manual
    if not had_gradients:
        for hook in root.hooks:
            hook.on_no_gradients(units)
    if listeners and state.is_last and not state.is_manual:
        tell("backward", root)


def reduce_and_show(root: Root, units: list[Unit]) -> None:
    """Reduce what is left, wait for all reductions, and show the gradients that are final."""
    reduce_kept(units)
    drain(root, 0)
    wait_for_host_writes()
    _finalize(root, units)


def show_pending_sums(root: Root) -> None:
    """Show a ``PendingGradient``, which raises when it is read, in ``.grad`` of sums that are not final."""
    for buffer in root.gradient_buffers():
        if buffer.binding.sum is not None:
            buffer.binding.show_pending(buffer.binding.sum)
            root.backward.has_sums = True


def reduce_kept(units: Iterable[Unit]) -> None:
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
    is_missing = True in [1 in each.missing for each in sums if each is not None]
    if is_missing:
        for hook in root.hooks:
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


def end_backward(root: Root) -> None:
    """Release the gathered weights, and reset the state that belongs to one backward."""
    state = root.backward
    for buffer in root.gradient_buffers():
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
    state.has_gradients = False
    state.ending = None
