"""Resharding to a smaller group: between forward and backward each rank keeps a larger part than its shard.

With ``reshard_after_forward=8`` on 64 ranks, eight neighbours hold the whole weights together, so backward gathers
within them (one machine) instead of over all ranks, for eight times the shard's memory in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from dbuffer import BufferPlacement, DBuffer, PlacementError
from dbuffer.collectives import Part
from dbuffer.layout import only_flat_axis
from dbuffer.mesh import MeshAxis, neighbours
from dbuffer.slot_pool import SlotPool
from dbuffer.storage import FlatStorage
from megatron_fsdp.errors import ConfigError

__all__ = ["PostForwardShard", "check_post_forward_size"]


def check_post_forward_size(size: int, axes: Sequence[MeshAxis], placements: Sequence[BufferPlacement]) -> MeshAxis:
    """Return the axis whose ranks are split into groups of ``size``.

    Raises:
        ConfigError: weights are not sharded over exactly one axis, or ``size`` does not divide it.
    """
    try:
        axis = only_flat_axis(axes, placements)
    except PlacementError as error:
        raise ConfigError(
            f"reshard_after_forward={size} needs weights that are sharded over exactly one axis: {error}; use True or "
            "False"
        ) from error
    if size < 1 or axis.size % size:
        raise ConfigError(
            f"reshard_after_forward={size}: it must divide the {axis.size} ranks of axis {axis.name!r} "
            f"over which weights are sharded"
        )
    return axis


class PostForwardShard:
    """This rank's part of a group's gathered weights while forward is over and backward has not begun.

    Attributes:
        storage: what it lies in.
    """

    def __init__(self, gathered: DBuffer, axis: MeshAxis, size: int) -> None:
        self._gathered = gathered
        self._axis = neighbours(axis, size)
        numel = gathered.layout.numel // size
        self._start = self._axis.rank * numel
        self.storage = FlatStorage(numel, gathered.dtype, gathered.device, name=f"{gathered.name}: post-forward shard")
        self.storage.release()
        self._generation = -1

    @property
    def nbytes(self) -> int:
        """Bytes that it holds between forward and backward."""
        return self.storage.nbytes

    @property
    def axis(self) -> MeshAxis:
        """The smaller group."""
        return self._axis

    def use_pool(self, pool: SlotPool | None) -> None:
        """Take its memory from a pool, or from the allocator again."""
        self.storage.use_pool(pool)

    def keep(self, generation: int) -> None:
        """Copy this rank's part of the gathered weights, which are of a certain generation."""
        self.storage.reallocate()
        self.storage.tensor.copy_(self._gathered.local_buffer.narrow(0, self._start, self.storage.tensor.numel()))
        self._generation = generation

    def holds(self, generation: int) -> bool:
        """Whether it holds weights of that generation."""
        return self.storage.is_allocated and self._generation == generation

    def gather(self) -> Part:
        """Return the gather of the whole weights from the smaller group."""
        whole = self._gathered.local_buffer
        mine = whole.narrow(0, self._start, self.storage.tensor.numel())
        mine.copy_(self.storage.tensor)
        return Part(self._axis, whole, mine)

    def drop(self) -> None:
        """Release the memory."""
        self.storage.release()
