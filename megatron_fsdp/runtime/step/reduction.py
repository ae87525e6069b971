"""Reduction: the way of one group's gradients from the packed buffer to main_grad, and what is configured about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dbuffer import DBuffer
from dbuffer.collectives import Part, reduce_scatter
from dbuffer.collectives_together import reduce_together
from dbuffer.layout import only_flat_axis
from dbuffer.route import Route
from dbuffer_kernels import accumulate
from megatron_fsdp.runtime.step.lanes import Ticket, lane

__all__ = ["Hook", "ReduceFunction", "Reduction", "Stages", "submit_reductions"]

Hook = Callable[[torch.Tensor], None]

# A replacement for the reduce-scatter: (output, input, group, op, async_op) -> handle or None, as FSDP2's
# ``ReduceScatter``.
ReduceFunction = Callable[
    [torch.Tensor, torch.Tensor, dist.ProcessGroup, dist.ReduceOp.RedOpType, bool], "dist.Work | None"
]


class Stages(NamedTuple):
    """What becomes of one packed buffer.

    Attributes:
        start: returns the reduction to be issued; one that is no single collective is issued. fold: device work on its
            result. on_host: work of the CPU after that, if any.
    """

    start: Callable[[list[dist.Work] | None], list[Part]]
    fold: Callable[[], None]
    on_host: Callable[[], None] | None


def submit_reductions(
    device: torch.device,
    all_stages: Sequence[Stages],
    owner: int,
    tickets: Sequence[list[Ticket]],
    after: Sequence[Ticket] = (),
) -> None:
    """Issue reductions together on a lane; who waits for the ticket, which each list gets, sees them folded."""

    def start(works: list[dist.Work] | None) -> None:
        parts: list[Part] = []
        for stages in all_stages:
            parts += stages.start(works)
        if len(parts) == 1:
            reduce_scatter(parts[0].shard, parts[0].whole, parts[0].axis, parts[0].op, works)
        else:
            reduce_together(parts, works)

    def fold() -> None:
        for stages in all_stages:
            stages.fold()

    calls = [stages.on_host for stages in all_stages if stages.on_host is not None]

    def fold_on_host() -> None:
        for call in calls:
            call()

    lane("reduce", device).submit(
        start, fold, fold_on_host if calls else None, owner=owner, tickets=tickets, after=after
    )


class Reduction:
    """The way of one group's gradients from the packed buffer to the optimizer.

    Args:
        packed: receives autograd's gradients. reduced: the slice of it that its reduction leaves to this rank; or, of a
            wider dtype, memory of its own.
        main_grad: the accumulator. final: the slice of it that the optimizer reads.

    Attributes:
        hook: called with each reduced gradient (1-D, averaged) before it is accumulated, to reduce it further.
        function: used instead of the reduce-scatter.
        keeps: what is reduced into has memory all the time, where it has its own.
        is_last: whether ``main_grad`` is what the optimizer reads, so that ``finish`` has nothing to do.
    """

    def __init__(self, packed: DBuffer, reduced: DBuffer, main_grad: DBuffer, final: DBuffer) -> None:
        self.hook: Hook | None = None
        self.function: ReduceFunction | None = None
        self.keeps = False
        self._packed, self._reduced = packed, reduced
        # The reduction into memory of its own, where sums are of a wider dtype.
        self._wide: list[Part] = []
        self._route = Route(packed, reduced)
        self._main_grad, self._final = main_grad, final
        self.is_last = final is main_grad

    def stages(self, scale: float, *, overwrite: bool) -> Stages:
        """Return the reduction of the packed buffer, and its fold into ``main_grad``, for ``submit_reductions``.

        Args:
            scale: the sum over ranks is multiplied by it.
            overwrite: ``main_grad`` holds nothing yet.
        """
        # Not self: a ticket that nobody waits for must not keep this object alive.
        reduced, main_grad = self._reduced, self._main_grad
        reduced.reallocate_storage()
        # Where axes are left to reduce at the end, the hook's turn comes after them, in ``finish``.
        hook = self.hook if self.is_last else None
        # A hook sees averages, so scaling comes before it.
        factor = scale if hook is None else 1.0

        def fold() -> None:
            source = reduced.local_buffer
            if hook is not None:
                hook(source.mul_(scale))
            accumulate(source, main_grad.local_buffer, scale=factor, overwrite=overwrite)

        return Stages(self._operation(), fold, None)

    def _operation(self) -> Callable[[list[dist.Work] | None], list[Part]]:
        packed, reduced, function, route, wide = self._packed, self._reduced, self.function, self._route, self._wide

        def run(works: list[dist.Work] | None) -> list[Part]:
            if function is None:
                return wide or route.ready or route.parts(works)
            group = only_flat_axis(reduced.axes, reduced.placements).reduce_group
            output, whole = reduced.local_buffer, packed.local_buffer
            work = function(output, whole, group, dist.ReduceOp.SUM, works is not None)
            if works is not None and work is not None:
                works.append(work)
            return []

        return run

    def release(self) -> None:
        """Release what the reduction left, which is folded."""
        if self._wide and not self.keeps:
            self._reduced.release_storage()
