"""Route: a redistribution between two fixed buffers that is run repeatedly."""

from __future__ import annotations

import torch.distributed as dist

from dbuffer.buffer import DBuffer
from dbuffer.collectives.all_gather import all_gather
from dbuffer.collectives.parts import Part
from dbuffer.collectives.reduce_scatter import reduce_scatter
from dbuffer.placements import Flat, Partial, Replicate


class Route:
    """Runs ``source.redistribute(out.placements, out=out)`` on each call.

    A redistribution that takes a single collective can be combined with others.

    Attributes:
        ready: that single collective, known after the first ``parts`` call; empty if several are needed.
    """

    def __init__(self, source: DBuffer, out: DBuffer) -> None:
        self._source, self._out = source, out
        pairs = enumerate(zip(source.placements, out.placements, strict=True))
        self._changes = [(axis, before, after) for axis, (before, after) in pairs if before != after]
        self._is_checked = False
        # Tensors keep their identity while their memory is released and reallocated.
        self.ready: list[Part] = []

    def parts(self, works: list[dist.Work] | None) -> list[Part]:
        """Return the single collective that the caller must issue. If several are needed, issue them and return [].

        Args:
            works: as in ``DBuffer.redistribute``.
        """
        if not self._is_checked:
            self.ready = self._check()
            self._is_checked = True
        if not self.ready:
            self._source.redistribute(self._out.placements, out=self._out, works=works)
        return self.ready

    def part_on_all(self) -> Part | None:
        """Return the redistribution as one in-place all-reduce; None where it is anything else."""
        source, out = self._source, self._out
        if len(self._changes) != 1 or source.local_buffer.data_ptr() != out.local_buffer.data_ptr():
            return None
        axis, before, after = self._changes[0]
        if not isinstance(before, Partial) or not isinstance(after, Replicate):
            return None
        return Part(source.axes[axis], source.local_buffer, source.local_buffer, before.reduce_op)

    def _check(self) -> list[Part]:
        if len(self._changes) != 1:
            return []
        axis, before, after = self._changes[0]
        if isinstance(before, Replicate) or (isinstance(before, Partial) and not isinstance(after, Flat)):
            return []
        source, out = self._source, self._out
        _, target = source._change(axis, type(before), after)
        source._output(out, target)
        if isinstance(before, Partial):
            return [Part(source.axes[axis], source.local_buffer, out.local_buffer, before.reduce_op)]
        return [Part(source.axes[axis], out.local_buffer, source.local_buffer)]

    def __call__(self, works: list[dist.Work] | None = None) -> None:
        """Run the redistribution; ``works`` as in ``DBuffer.redistribute``."""
        for part in self.parts(works):
            if part.op:
                reduce_scatter(part.shard, part.whole, part.axis, part.op, works)
            else:
                all_gather(part.whole, part.shard, part.axis, works)
