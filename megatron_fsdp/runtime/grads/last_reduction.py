"""LastReduction: one group's gradients over the axes on which they rest as partial sums, once a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from dbuffer import DBuffer
from dbuffer.collectives import Part
from dbuffer.collectives_together import all_reduce_together, reduce_together
from dbuffer.route import Route

__all__ = ["Hook", "LastReduction"]

Hook = Callable[[torch.Tensor], None]


class LastReduction:
    """What is left to do with the gradients of one group at the end of a step.

    Attributes:
        hook: called with each reduced gradient (1-D, averaged) before it is accumulated, to reduce it further.
        is_offloaded: ``main_grad`` lies in CPU memory.
    """

    hook: Hook | None
    is_offloaded: bool
    _packed: DBuffer
    _main_grad: DBuffer
    _final: DBuffer
    _last: Route

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
