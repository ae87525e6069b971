"""Route: a redistribution between two fixed buffers that is run repeatedly."""

from __future__ import annotations

import torch.distributed as dist

from dbuffer.buffer import DBuffer
from dbuffer.collectives.parts import Part


class Route:
    """Writes the content of ``source`` to ``out``. A route of one collective can be combined with others.

    Attributes:
        ready: that one collective, known after the first ``parts`` call; empty if the route takes several.
    """

    def __init__(self, source: DBuffer, out: DBuffer) -> None:
        self._source, self._out = source, out
        # Tensors keep their identity while their memory is released and reallocated.
        self.ready: list[Part] = []

    def parts(self, works: list[dist.Work] | None) -> list[Part]:
        """Return the one collective that the caller must issue. If it takes several, issue them and return [].

        Args:
            works: as in ``DBuffer.redistribute``.
        """
        part = self._source.part_to(self._out)
        if part is None:
            self._source.redistribute(self._out.placements, out=self._out, works=works)
        else:
            self.ready = [part]
        return self.ready
