"""What is left to reduce of gradients at the end of a step, on a lane of its own.

Gradients that rest as partial sums over some axis (all of them in ZeRO-0 and 1, the outer one in HSDP and HFSDP) are
reduced over it once a step, in the order in which units are closed (docs/design/order.md, "Streams"). Microbatches are
added up in the dtype of ``main_grad``, and travel in that of the other reductions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dbuffer import DBuffer, PlacementError
from dbuffer.collectives import Part
from dbuffer.collectives_together import all_reduce_together, reduce_together
from dbuffer.events import listeners, tell
from dbuffer.layout import only_flat_axis
from dbuffer.route import Route
from dbuffer_kernels import accumulate
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.runtime.step.grad_binding import GradState
from megatron_fsdp.runtime.step.gradients import GradientBuffer, Hook, Reduction
from megatron_fsdp.runtime.step.lanes import HOST_WRITES, Ticket, lane
from megatron_fsdp.runtime.step.streams import turns, wait_on_host

if TYPE_CHECKING:
    from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
    from megatron_fsdp.runtime.step.unit import Unit

__all__ = ["LastReduction", "LastReductions", "OffloadedReduction", "Wire"]


class Wire:
    """Partial sums while they travel, in a dtype or on a device of their own; memory is there from ``load`` on.

    Args:
        main_grad: the sums. final: the slice of them that is wanted.

    Attributes:
        whole: what travels. part: the slice of it that becomes ``final``.
        scale: sums are multiplied by it on the wire, a power of two.
    """

    def __init__(self, main_grad: DBuffer, final: DBuffer, dtype: torch.dtype, device: torch.device) -> None:
        self.scale = 1.0
        plan, mesh, placements = main_grad.plan, main_grad.mesh, main_grad.placements
        self.whole = DBuffer.from_plan(plan, mesh, placements, dtype, device, name="gradients on the wire")
        self.part = self.whole.slice_view(final.placements)
        self._main_grad, self._final = main_grad, final
        self.whole.release_storage()

    def load(self) -> None:
        """Cast the sums."""
        self.whole.reallocate_storage()
        source, out = self._main_grad.local_buffer, self.whole.local_buffer
        if source.device == out.device:
            accumulate(source, out, scale=self.scale, overwrite=True)
        else:
            out.copy_(source if self.scale == 1.0 else source * self.scale)

    def unload(self, hook: Hook | None) -> None:
        """Write what came of them to ``final``, which a hook sees first, where it was reduced."""
        part, final = self.part.local_buffer, self._final.local_buffer
        averaged = final if part.device == final.device else torch.empty_like(part, dtype=final.dtype)
        accumulate(part, averaged, scale=1.0 / self.scale, overwrite=True)
        if hook is not None:
            hook(averaged)
        if averaged is not final:
            final.copy_(averaged)
        self.whole.release_storage()


class LastReduction(Reduction):
    """The way of one group's gradients, and what is left to do with them at the end of a step.

    Attributes:
        wire: what travels in the place of ``main_grad`` at the end of a step; None for nothing else.
        finishes_on_lane: whether what is left to reduce may be issued on a lane; the host's own memory is not.
    """

    finishes_on_lane = True

    def __init__(
        self, packed: DBuffer, reduced: DBuffer, main_grad: DBuffer, final: DBuffer, wire: Wire | None
    ) -> None:
        super().__init__(packed, reduced, main_grad, final)
        if reduced.dtype is not packed.dtype:
            self._wide = _wide_part(packed, reduced)
        self.wire = wire
        self._last = Route(main_grad, final) if wire is None else Route(wire.whole, wire.part)

    def keep(self, keeps: bool) -> None:
        """Have the memory of what is reduced into all the time, or while it is in use."""
        self.keeps = keeps
        if keeps and self._wide:
            self._reduced.reallocate_storage()
        self.release()

    def discard(self) -> None:
        """Release what the reductions left, that of sums on the wire included."""
        self.release()
        if self.wire is not None:
            self.wire.whole.release_storage()

    def start_last(self, on_all: list[Part], scattered: list[Part], works: list[dist.Work] | None) -> None:
        """Add what is left to reduce to one of the two lists; what is no single collective is issued."""
        part = self._last.part_on_all()
        if part is not None:
            on_all.append(part)
        else:
            scattered += self._last.parts(works)

    def complete_last(self) -> None:
        """Bring what is reduced to ``final``, and let the hook reduce it further."""
        if self.wire is not None:
            self.wire.unload(self.hook)
        elif self.hook is not None:
            self.hook(self._final.local_buffer)


class OffloadedReduction(LastReduction):
    """The way of gradients that are reduced where compute runs, and added up in CPU memory.

    Those of the first microbatch are scaled and cast on the device and copied to ``main_grad``; those of later ones are
    copied to a buffer beside it, from which the CPU adds them once the copy is over. Only for these the host waits unit
    by unit; for the first ones it waits once, at the end of the backward (``settle_host_writes``).
    """

    finishes_on_lane = False
    _staging: torch.Tensor | None = None

    def prepare(self, scale: float, *, overwrites: bool) -> None:
        """Get ready for the next ``start``, as ``Reduction.prepare`` does."""
        super().prepare(scale, overwrites=overwrites)
        self.adds_on_host = not overwrites
        if overwrites:
            HOST_WRITES.add(self._packed.device)

    def fold(self) -> None:
        """Copy what was reduced to CPU memory."""
        source, sums = self._averaged(), self._main_grad.local_buffer
        if self._overwrites:
            averaged = torch.empty_like(source, dtype=sums.dtype)
            accumulate(source, averaged, scale=self._scale, overwrite=True)
            sums.copy_(averaged, non_blocking=True)
            return
        if self._staging is None:
            # In pages that a GPU writes, as ``main_grad`` is.
            self._staging = torch.empty(source.numel(), dtype=source.dtype, pin_memory=sums.is_pinned())
        self._staging.copy_(source, non_blocking=True)

    def fold_on_host(self) -> None:
        """Add it up there."""
        if not self._overwrites and self._staging is not None:
            accumulate(self._staging, self._main_grad.local_buffer, scale=self._scale)


def _wide_part(packed: DBuffer, reduced: DBuffer) -> list[Part]:
    """Return the reduction of one axis whose sum is of a wider dtype.

    Raises:
        ConfigError: gradients are sharded over several axes, or none.
    """
    try:
        axis = only_flat_axis(reduced.axes, reduced.placements)
    except PlacementError as error:
        raise ConfigError(
            f"MixedPrecisionPolicy(accumulate_dtype={reduced.dtype}) needs gradients that are sharded over exactly one "
            f"axis: {error}; use another strategy, or reduce_dtype={reduced.dtype}"
        ) from error
    return [Part(axis, packed.local_buffer, reduced.local_buffer, "sum")]


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
            functools.partial(_start, reductions),
            functools.partial(_complete, reductions),
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
            _start(reductions, None)
            _complete(reductions)
            devices |= {buffer.packed.device for buffer in buffers}
        for device in devices:
            wait_on_host(device)


def _left_of(groups: Sequence[ParameterGroup], *, on_lane: bool) -> tuple[list[LastReduction], list[GradientBuffer]]:
    """Return what is left to reduce of groups of a unit, on a lane or not, and is not issued yet; and tell of it."""
    reductions, buffers = [], []
    for group in groups:
        buffer = group.gradients
        if buffer is None or buffer.rests_final or buffer.last_tickets or buffer.binding.state is not GradState.PARTIAL:
            continue
        assert isinstance(buffer.reduction, LastReduction)
        if buffer.reduction.finishes_on_lane is on_lane:
            reductions.append(buffer.reduction)
            buffers.append(buffer)
            if listeners:
                tell("final", group)
    return reductions, buffers


def _start(reductions: Sequence[LastReduction], works: list[dist.Work] | None) -> None:
    """Reduce ``main_grad`` of groups of one unit over the axes that still hold partial sums, or issue it."""
    on_all: list[Part] = []
    scattered: list[Part] = []
    for reduction in reductions:
        if reduction.wire is not None:
            reduction.wire.load()
    for reduction in reductions:
        reduction.start_last(on_all, scattered, works)
    all_reduce_together(on_all, works)
    reduce_together(scattered, works)


def _complete(reductions: Sequence[LastReduction]) -> None:
    for reduction in reductions:
        reduction.complete_last()
