"""The reduction that happens once per optimizer step, over the axes that still hold partial sums.

In ZeRO-0 and ZeRO-1 that is the whole reduction, in HSDP and HFSDP the outer axis. The last backward issues it on the
lane "last" when it closes a unit, or at its end.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from dbuffer.events import listeners, tell
from megatron_fsdp.engine.grads import GradientBuffer
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.reduce import GradientReduction, complete_last, start_last
from megatron_fsdp.engine.streams import lane, turns, wait_on_host
from megatron_fsdp.engine.unit import Root, Unit

__all__ = ["finish_last", "finish_last_on_compute", "reduce_last"]


def reduce_last(unit: Unit) -> None:
    """Issue the last reduction of a unit that the last backward of a step has closed.

    Without streams the host would have to wait here for the unit's reduce-scatter; ``finish_last`` issues it then.
    """
    if all(not buffer.tickets or turns(buffer.packed.device) is not None for buffer in unit.gradient_buffers):
        _issue(unit.root, unit.groups)


def finish_last(root: Root, units: Sequence[Sequence[ParameterGroup]]) -> None:
    """Issue the last reductions that are not issued yet, and make compute wait for all of them.

    Args:
        units: for each unit, the groups whose sums are complete.
    """
    for groups in units:
        _issue(root, groups)
    for buffer in (group.gradient_buffer for group in itertools.chain(*units)):
        for ticket in buffer.last_tickets if buffer is not None else ():
            ticket.wait()
        if buffer is not None:
            buffer.last_tickets.clear()


def _issue(root: Root, groups: Sequence[ParameterGroup]) -> None:
    """Issue on the lane the last reductions of one unit's groups that are not issued yet."""
    reductions, buffers = _partial_sums(groups, on_lane=True)
    if not buffers:
        return
    state = root.backward
    if state.wire_ticket is not None:
        # One unit at a time has memory for sums in the reduce dtype.
        state.wire_ticket.wait()
        state.wire_ticket = None
    device = buffers[0].packed.device
    ticket = lane("last", device).submit(
        functools.partial(start_last, reductions),
        functools.partial(complete_last, reductions),
        owner=groups[0].unit_id,
        tickets=[buffer.last_tickets for buffer in buffers],
        after=[ticket for buffer in buffers for ticket in buffer.tickets],
    )
    if turns(device) is None and any(each.wire is not None for each in reductions):
        state.wire_ticket = ticket


def finish_last_on_compute(units: Sequence[Sequence[ParameterGroup]]) -> None:
    """Reduce on compute the sums in CPU memory, which no lane can reduce, and make the host wait for them.

    Args:
        units: for each unit, the groups whose sums are complete.
    """
    devices = set()
    for groups in units:
        reductions, buffers = _partial_sums(groups, on_lane=False)
        start_last(reductions, None)
        complete_last(reductions)
        devices |= {buffer.packed.device for buffer in buffers}
    for device in devices:
        wait_on_host(device)


def _partial_sums(
    groups: Sequence[ParameterGroup], *, on_lane: bool
) -> tuple[list[GradientReduction], list[GradientBuffer]]:
    """Return the reductions, and their buffers, of one unit's groups that hold partial sums; and announce them.

    Args:
        on_lane: True for the reductions that a lane can issue, False for the others.
    """
    reductions, buffers = [], []
    for group in groups:
        buffer = group.gradient_buffer
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
