"""OffloadedReduction: gradients that are reduced where compute runs and added up in CPU memory."""

from __future__ import annotations

import torch

from dbuffer import DBuffer
from dbuffer_kernels import accumulate
from megatron_fsdp.runtime.grads.last_reduction import LastReduction, Wire
from megatron_fsdp.runtime.step.reduction import Stages

__all__ = ["OffloadedReduction"]


class OffloadedReduction(LastReduction):
    """The way of gradients whose ``main_grad`` lies in CPU memory.

    Those of the first microbatch are scaled and cast on the device and copied to ``main_grad``; those of later ones are
    copied to a buffer beside it, from which the CPU adds them once the copy is over.

    Args:
        is_pinned: that buffer is in pages that a GPU writes, as ``main_grad`` is.
    """

    is_offloaded = True

    def __init__(
        self,
        packed: DBuffer,
        reduced: DBuffer,
        main_grad: DBuffer,
        final: DBuffer,
        wire: Wire | None,
        is_pinned: bool,
    ) -> None:
        super().__init__(packed, reduced, main_grad, final, wire)
        self._is_pinned = is_pinned
        self._staging: torch.Tensor | None = None

    def stages(self, scale: float, *, overwrite: bool) -> Stages:
        """Return the reduction of the packed buffer, its copy to CPU memory, and the sum there, if there is one."""
        reduced, main_grad = self._reduced, self._main_grad
        reduced.reallocate_storage()
        # Where axes are left to reduce at the end, the hook's turn comes after them, in ``finish``.
        hook = self.hook if self.is_last else None
        factor = scale if hook is None else 1.0
        staging = None if overwrite else self._staged()

        def copy() -> None:
            source = reduced.local_buffer
            if hook is not None:
                hook(source.mul_(scale))
            if staging is not None:
                staging.copy_(source, non_blocking=True)
                return
            sums = torch.empty_like(source, dtype=main_grad.dtype)
            accumulate(source, sums, scale=factor, overwrite=True)
            main_grad.local_buffer.copy_(sums, non_blocking=True)

        def add() -> None:
            if staging is not None:
                accumulate(staging, main_grad.local_buffer, scale=factor)

        return Stages(self._operation(), copy, add)

    def _staged(self) -> torch.Tensor:
        if self._staging is None:
            numel, pinned = self._reduced.local_buffer.numel(), self._is_pinned and torch.cuda.is_available()
            self._staging = torch.empty(numel, dtype=self._reduced.dtype, pin_memory=pinned)
        return self._staging
