"""Route: a redistribution that is done again and again between the same two buffers; what it takes is decided once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbuffer import collectives
from dbuffer.buffer import DBuffer
from dbuffer.placements import Flat, Partial, Replicate

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Route"]


class Route:
    """Does ``source.redistribute(out.placements, out=out)`` as often as it is called.

    The first call is that very one, with all its checks; where one collective is all there is to it, later calls issue
    it at once.
    """

    def __init__(self, source: DBuffer, out: DBuffer) -> None:
        self._source, self._out = source, out
        pairs = zip(source.placements, out.placements, source.axes, strict=True)
        self._changes = [(before, after, axis) for before, after, axis in pairs if before != after]
        self._is_checked = False

    def __call__(self, works: list[dist.Work] | None = None) -> None:
        """Issue it.

        Args:
            works: as in ``DBuffer.redistribute``.
        """
        source, out = self._source, self._out
        if self._is_checked and len(self._changes) == 1:
            before, after, axis = self._changes[0]
            if isinstance(before, Flat) and isinstance(after, Replicate):
                collectives.all_gather(out.local_buffer, source.local_buffer, axis, works)
                return
            if isinstance(before, Partial) and isinstance(after, Flat):
                collectives.reduce_scatter(out.local_buffer, source.local_buffer, axis, before.reduce_op, works)
                return
        source.redistribute(out.placements, out=out, works=works)
        self._is_checked = True
