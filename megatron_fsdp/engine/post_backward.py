"""post_backward: backward has left a unit; its weights are released and its gradients reduced.

FSDP2 has a function of this name in ``FSDPParamGroup``. ``pre_backward`` and ``final_callback`` call it for the units
that backward has left, in the same order on every rank (docs/design/order.md).
"""

from __future__ import annotations

from dbuffer.events import listeners, tell
from megatron_fsdp.engine.grads import GradientBuffer, pack_on_lane
from megatron_fsdp.engine.graph_queries import brings_gradients
from megatron_fsdp.engine.last_reduction import reduce_last
from megatron_fsdp.engine.unit import Root, Unit, alive
from megatron_fsdp.errors import AgreementError

__all__ = [
    "active_units",
    "close_and_reduce",
    "drain",
    "drain_completed",
    "leave_unit",
    "post_backward",
    "share_reductions",
]


def active_units(root: Root) -> list[Unit]:
    """Return the units that backward is in, the latest call first, in the same order on every rank.

    A unit inside of another unit began later and comes first.
    """
    oldest_calls = root.backward.oldest_calls

    def begin_of(unit: Unit) -> int:
        oldest = oldest_calls.get(unit.reference)
        return 0 if oldest is None else oldest.begin

    return sorted(alive(root.backward.active), key=begin_of, reverse=True)


def leave_unit(unit: Unit) -> None:
    """Mark a unit as left by backward, and release its weights unless ``reshard_after_backward`` is False."""
    state = unit.root.backward
    state.active.pop(unit.reference, None)
    unit.drop_entered()
    if unit.reshard_after_backward:
        unit.reshard()


def post_backward(unit: Unit) -> None:
    """Reduce the gradients of a unit that backward has left, once per backward; ``leave_unit`` comes before."""
    state = unit.root.backward
    if unit.reference in state.closed or not unit.num_trained:
        return
    state.closed.add(unit.reference)
    # Without a gradient so far there are two cases. This rank used none of these parameters, but other ranks may have
    # used them and reduce now, so this rank must. Or the backward computes no parameter's gradient at all
    # (``torch.autograd.grad`` for inputs) and must not reduce zeros, so the unit is deferred. A graph that leads to a
    # reentrant checkpoint is not of the second kind, because PyTorch refuses that.
    if not state.has_gradients and (state.deferred or not brings_gradients(unit.root.units())):
        state.deferred.append(unit.reference)
        return
    if state.deferred:
        deferred, state.deferred = state.deferred, []
        for each in dict.fromkeys(alive(deferred)):
            if each is not unit:
                close_and_reduce(each)
    close_and_reduce(unit)


def close_and_reduce(unit: Unit) -> None:  # noqa: C901  # in order of time
    """Close the gradient buffers of a unit, and issue their reductions."""
    root, state = unit.root, unit.root.backward
    for hook in root.collective_hooks:
        hook.before_reduce(unit)
    # 1. Close the buffers. Gradients to be reduced are packed now, or a lane packs them.
    complete = [buffer for buffer in unit.gradient_buffers if buffer.close(reduce=unit.requires_gradient_sync)]
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
    for buffer in unit.gradient_buffers if complete else ():
        # This backward changes ``main_grad``, also where its gradients came from other ranks or microbatches alone. If
        # it raises, ``mark_incomplete`` compares the number.
        buffer.last_backward = state.number
    # 2. Issue one reduction of all of them. On streams it follows the gathers that were issued ahead.
    GradientBuffer.reduce(complete, owner=id(unit), after=root.prefetch_tickets() if root.device is not None else ())
    for buffer in unit.gradient_buffers:
        if buffer.tickets:
            if listeners:
                tell("reduce", unit)
            state.reducing.append(unit.reference)
            break
    # 3. In the last backward of a step, reduce over the axes that still hold partial sums. With manual finalization no
    # backward is known to be the last, and ``finalize_backward`` does this.
    if not unit.rests_final and state.is_last and not state.is_manual and unit.requires_all_reduce and complete:
        reduce_last(unit)
    if listeners:
        tell("closed", unit)


# ---------------------------------------------------------------- reductions end


def drain(root: Root, num_kept: int) -> None:
    """Make compute wait for all reductions but the newest ``num_kept``, and release their packed buffers."""
    reducing = root.backward.reducing
    while len(reducing) > num_kept:
        unit = reducing[0]()
        for buffer in unit.gradient_buffers if unit is not None else ():
            if buffer.tickets:
                if listeners:
                    tell("fold", unit)
                try:
                    buffer.wait()
                except RuntimeError as error:
                    AgreementError.raise_for(buffer.unit_name, "the reduction of its gradients", error)
        del reducing[0]


def drain_completed(root: Root) -> None:
    """Release the packed buffers of completed reductions, oldest first, without waiting for any."""
    reducing = root.backward.reducing
    while reducing:
        unit = reducing[0]()
        buffers = () if unit is None else unit.gradient_buffers
        if not all(ticket.is_completed() for buffer in buffers for ticket in buffer.tickets):
            return
        drain(root, len(reducing) - 1)


def share_reductions(root: Root, other: Root) -> None:
    """Count the packed gradient buffers of two roots together, for one limit."""
    root.backward.reducing = other.backward.reducing
