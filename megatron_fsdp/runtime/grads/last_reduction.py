"""LastReduction: one group's gradients over the axes on which they rest as partial sums, once a step.

Microbatches are added up in the dtype of ``main_grad``, and travel in that of the other reductions: a lane casts the
sums into a buffer of that dtype, and what came of them back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dbuffer import DBuffer, PlacementError
from dbuffer.collectives import Part
from dbuffer.collectives_together import all_reduce_together, reduce_together
from dbuffer.layout import only_flat_axis
from dbuffer.route import Route
from dbuffer_kernels import accumulate
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.runtime.step.reduction import Hook, Reduction

__all__ = ["LastReduction", "Wire"]


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

    def unload(self) -> None:
        """Write what came of them to ``final``."""
        accumulate(self.part.local_buffer, self._final.local_buffer, scale=1.0 / self.scale, overwrite=True)
        self.whole.release_storage()

    def unload_to_host(self, hook: Hook | None) -> None:
        """Do that where ``final`` is on another device, after a hook has seen it on this one."""
        averaged = self.part.local_buffer.to(self._final.dtype)
        if self.scale != 1.0:
            averaged = averaged.mul_(1.0 / self.scale)
        if hook is not None:
            hook(averaged)
        self._final.local_buffer.copy_(averaged)
        self.whole.release_storage()


class LastReduction(Reduction):
    """The way of one group's gradients, and what is left to do with them at the end of a step.

    Attributes:
        wire: what travels in the place of ``main_grad`` at the end of a step; None for nothing else.
    """

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

    @property
    def finishes_on_lane(self) -> bool:
        """Whether what is left to reduce at the end may be issued on a lane; the host's own memory is reduced by it."""
        return not self.is_offloaded

    @staticmethod
    def finish(reductions: Sequence[LastReduction]) -> None:
        """Reduce ``main_grad`` of groups of one unit over the axes that still hold partial sums, into ``final``."""
        LastReduction.issue_last(reductions, None)
        LastReduction.complete_last(reductions)

    @staticmethod
    def issue_last(reductions: Sequence[LastReduction], works: list[dist.Work] | None) -> None:
        """Do that, or issue it and append its handles; ``complete_last`` follows."""
        for reduction in reductions:
            if reduction.wire is not None:
                reduction.wire.load()
        on_all = [part for each in reductions if (part := each._last_on_all()) is not None]
        scattered = [part for each in reductions for part in each._last_parts(works)]
        all_reduce_together(on_all, works)
        reduce_together(scattered, works)

    @staticmethod
    def complete_last(reductions: Sequence[LastReduction]) -> None:
        """Bring what is reduced to ``final``, and let hooks reduce it further."""
        for reduction in reductions:
            if reduction.wire is not None and reduction.is_offloaded:
                reduction.wire.unload_to_host(reduction.hook)
                continue
            if reduction.wire is not None:
                reduction.wire.unload()
            if reduction.hook is not None:
                reduction.hook(reduction._final.local_buffer)

    def _last_on_all(self) -> Part | None:
        return self._last.part_on_all()

    def _last_parts(self, works: list[dist.Work] | None) -> list[Part]:
        return [] if self._last.part_on_all() is not None else self._last.parts(works)


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
