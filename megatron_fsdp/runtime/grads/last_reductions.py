"""LastReductions: what is left to reduce of a unit when the last backward has closed it, on a lane of its own.

Gradients that rest as partial sums over some axis (all of them in ZeRO-0 and 1, the outer one in HSDP and HFSDP) are
reduced over it once a step. That begins when a unit is closed, behind the backward of those before it, and a slow outer
link holds up no inner reduction: its communicator and its lane are others. The order is that in which units are closed,
which is one on every rank (docs/design/order.md).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from dbuffer.events import listeners, tell
from megatron_fsdp.errors import AgreementError
from megatron_fsdp.runtime.grads.last_reduction import LastReduction
from megatron_fsdp.runtime.grads.packed_gradients import PackedGradients
from megatron_fsdp.runtime.step.cuda_lane import lane, turns
from megatron_fsdp.runtime.step.grad_binding import GradState
from megatron_fsdp.runtime.step.lanes import Ticket

if TYPE_CHECKING:
    from megatron_fsdp.runtime.step.gradients import GradientBuffer
    from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
    from megatron_fsdp.runtime.step.unit import Unit

__all__ = ["LastReductions"]


class LastReductions:
    """Issues them for the units below one root.

    Attributes:
        closed: the unit that was closed last, whose reduction the host would have to wait for; None for none.
    """

    def __init__(self) -> None:
        self.closed: weakref.ref[Unit] | None = None
        # Of the reduction issued last whose wire has memory until the host has waited.
        self._wired: Ticket | None = None

    def close(self, unit: Unit, backward: int) -> None:
        """Issue what is left to reduce of a unit that the last backward of a step has closed.

        Where it is the host that has to wait for the reduction before, that is for ``flush``.

        Args:
            backward: its number.
        """
        self.closed = unit.reference
        for buffer in unit.gradients:
            # From here on ``main_grad`` is no sum of this rank's that another backward could go on with.
            buffer.backward = backward
        if all(not buffer.tickets or turns(buffer.packed.device) is not None for buffer in unit.gradients):
            self.flush()

    def flush(self) -> None:
        """Issue what is left to reduce of the unit closed last, after what was issued for it before."""
        unit, self.closed = None if self.closed is None else self.closed(), None
        for buffer in unit.gradients if unit is not None else ():
            if turns(buffer.packed.device) is None:
                _wait_for(buffer)
        self._issue(() if unit is None else unit.groups)

    def finish(self, units: Sequence[Sequence[ParameterGroup]]) -> None:
        """Issue what is left to reduce of these groups, by units, and make compute wait for that and what was issued.

        What a lane cannot do is left for ``finish_here``.
        """
        self.flush()
        for groups in units:
            self._issue(groups)
        for buffer in _buffers(itertools.chain(*units)):
            for ticket in buffer.last_tickets:
                ticket.wait()
            buffer.last_tickets.clear()

    def _issue(self, groups: Sequence[ParameterGroup]) -> None:
        """Issue what is left to reduce of groups of one unit, unless it is issued already, on the lane."""
        left = [
            (group, buffer)
            for group in groups
            if isinstance(buffer := group.gradients, PackedGradients)
            and buffer.binding.state is GradState.PARTIAL
            and buffer.reduction.finishes_on_lane
            and not (buffer.rests_final or buffer.last_tickets)
        ]
        if not left:
            return
        for group, _ in left if listeners else ():
            tell("final", group)
        reductions, device = [buffer.reduction for _, buffer in left], left[0][1].packed.device
        if self._wired is not None:
            # Memory is for one unit on the wire.
            self._wired.wait()
            self._wired = None
        ticket = lane("last", device).submit(
            functools.partial(LastReduction.issue_last, reductions),
            functools.partial(LastReduction.complete_last, reductions),
            owner=left[0][0].unit,
            tickets=[buffer.last_tickets for _, buffer in left],
            after=[ticket for _, buffer in left for ticket in buffer.tickets],
        )
        if turns(device) is None and any(each.wire is not None for each in reductions):
            self._wired = ticket

    @staticmethod
    def finish_here(units: Sequence[Sequence[ParameterGroup]]) -> None:
        """Reduce, on compute, what is left to reduce that no lane can."""
        for groups in units:
            left = [
                (group, buffer.reduction)
                for group in groups
                if isinstance(buffer := group.gradients, PackedGradients)
                and not (buffer.rests_final or buffer.reduction.finishes_on_lane)
            ]
            for group, _ in left if listeners else ():
                tell("final", group)
            LastReduction.finish([reduction for _, reduction in left])


def _buffers(groups: Iterable[ParameterGroup]) -> Iterator[GradientBuffer]:
    for group in groups:
        if group.gradients is not None:
            yield group.gradients


def _wait_for(buffer: GradientBuffer) -> None:
    """Make compute wait for the reduction of packed gradients.

    Raises:
        AgreementError: it did not end.
    """
    try:
        buffer.wait()
    except RuntimeError as error:
        AgreementError.raise_for(buffer.unit, "the reduction of its gradients", error)
