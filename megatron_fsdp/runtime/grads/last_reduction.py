"""LastReduction: one group's gradients over the axes on which they rest as partial sums, once a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from dbuffer import DBuffer, PlacementError
from dbuffer.collectives import Part
from dbuffer.collectives_together import all_reduce_together, reduce_together
from dbuffer.layout import only_flat_axis
from dbuffer.route import Route
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.runtime.step.reduction import Reduction

__all__ = ["LastReduction"]


class LastReduction(Reduction):
    """The way of one group's gradients, and what is left to do with them at the end of a step."""

    def __init__(
        self, packed: DBuffer, reduced: DBuffer, main_grad: DBuffer, final: DBuffer, *, is_offloaded: bool,
        is_pinned: bool,
    ) -> None:  # fmt: skip
        super().__init__(packed, reduced, main_grad, final, is_offloaded=is_offloaded, is_pinned=is_pinned)
        if reduced.dtype is not packed.dtype:
            self._wide = _wide_part(packed, reduced)
        self._last = Route(main_grad, final)

    def keep(self, keeps: bool) -> None:
        """Have the memory of what is reduced into all the time, or while it is in use."""
        self.keeps = keeps
        if keeps and self._wide:
            self._reduced.reallocate_storage()
        self.release()

    @property
    def finishes_on_lane(self) -> bool:
        """Whether what is left to reduce at the end may be issued on a lane; the host's own memory is reduced by it."""
        return not self.is_offloaded

    @staticmethod
    def finish(reductions: Sequence[LastReduction]) -> None:
        """Reduce ``main_grad`` of groups of one unit over the axes that still hold partial sums, into ``final``."""
        LastReduction.issue_last(reductions, None)
        LastReduction.call_hooks(reductions)

    @staticmethod
    def issue_last(reductions: Sequence[LastReduction], works: list[dist.Work] | None) -> None:
        """Do that, or issue it and append its handles; ``call_hooks`` follows."""
        on_all = [part for each in reductions if (part := each._last_on_all()) is not None]
        scattered = [part for each in reductions for part in each._last_parts(works)]
        all_reduce_together(on_all, works)
        reduce_together(scattered, works)

    @staticmethod
    def call_hooks(reductions: Sequence[LastReduction]) -> None:
        """Let hooks reduce further what is reduced."""
        for reduction in reductions:
            if reduction.hook is not None and not reduction.is_offloaded:
                reduction.hook(reduction._final.local_buffer)

    def _last_on_all(self) -> Part | None:
        return None if self.is_offloaded else self._last.part_on_all()

    def _last_parts(self, works: list[dist.Work] | None) -> list[Part]:
        if not self.is_offloaded:
            return [] if self._last.part_on_all() is not None else self._last.parts(works)
        main_grad, final = self._main_grad, self._final
        # Collectives run where compute does.
        like, device = main_grad, self._packed.device
        staged = DBuffer.from_plan(like.plan, like.mesh, like.placements, like.dtype, device, name=like.name)
        staged.local_buffer.copy_(main_grad.local_buffer)
        reduced = staged.redistribute(final.placements)
        if self.hook is not None:
            self.hook(reduced.local_buffer)
        final.local_buffer.copy_(reduced.local_buffer)
        return []


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
