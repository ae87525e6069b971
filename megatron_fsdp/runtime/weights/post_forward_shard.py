"""Resharding to a smaller group: between forward and backward each rank keeps a larger part than its shard.

With ``reshard_after_forward=8`` on 64 ranks, eight neighbours hold the whole weights together, so backward gathers
within them (one machine) instead of over all ranks, for eight times the shard's memory in between.
"""

from __future__ import annotations

import torch

from dbuffer import DBuffer
from dbuffer.collectives import Part
from dbuffer.mesh import MeshAxis, neighbours
from dbuffer.storage import FlatStorage

__all__ = ["PostForwardShard"]


class PostForwardShard:
    """This rank's part of a group's gathered weights while forward is over and backward has not begun.

    Args:
        axis: over which the weights are sharded. size: of the smaller groups.
    Attributes:
        axis: the smaller group. storage: what the part lies in.
    """

    def __init__(self, gathered: DBuffer, axis: MeshAxis, size: int) -> None:
        self._gathered = gathered
        self.axis = neighbours(axis, size)
        numel = gathered.layout.numel // size
        self.storage = FlatStorage(numel, gathered.dtype, gathered.device, name=f"{gathered.name}: post-forward shard")
        self.storage.release()
        self._generation = -1

    def _mine(self) -> torch.Tensor:
        numel = self.storage.tensor.numel()
        return self._gathered.local_buffer.narrow(0, self.axis.rank * numel, numel)

    def keep(self, generation: int) -> None:
        """Copy this rank's part of the gathered weights, which are of a certain generation."""
        self.storage.reallocate()
        self.storage.tensor.copy_(self._mine())
        self._generation = generation

    def holds(self, generation: int) -> bool:
        """Whether it holds weights of that generation."""
        return self.storage.is_allocated and self._generation == generation

    def gather(self) -> Part:
        """Return the gather of the whole weights from the smaller group."""
        mine = self._mine()
        mine.copy_(self.storage.tensor)
        return Part(self.axis, self._gathered.local_buffer, mine)

    def drop(self) -> None:
        """Release the memory."""
        self.storage.release()
