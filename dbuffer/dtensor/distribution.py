"""How the elements of a DTensor are spread over its mesh, with rows that a flat buffer decides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dbuffer import collectives
from dbuffer.dtensor.placement import RaggedShard, ragged_shard
from dbuffer.errors import PlacementError
from dbuffer.mesh import MeshAxis, mesh_axes

__all__ = ["Distribution", "contiguous_stride"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """The placements of a tensor on a mesh, and the data movement between its local part and the whole tensor.

    At most one placement is a ``RaggedShard``; the axes before it may cut the tensor by ``Shard`` (tensor parallelism).
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> Distribution:
        """Return how a DTensor is spread."""
        return cls(tensor._spec.mesh, tensor._spec.placements)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all elements."""
        return all(placement.is_replicate() for placement in self.placements)

    @property
    def ragged(self) -> RaggedShard | None:
        """The placement that cuts slices of the first dimension, if it is the only one that cuts."""
        cuts = [placement for placement in self.placements if not placement.is_replicate()]
        if len(cuts) != 1 or not isinstance(cuts[0], RaggedShard) or cuts[0].is_flattened:
            return None
        return cuts[0]

    def local_shape(self, shape: torch.Size) -> torch.Size:
        """Return the whole shape that the local part has along the axes before the ragged one."""
        sizes = list(shape)
        for axis, placement in zip(mesh_axes(self.mesh), self.placements, strict=True):
            if type(placement) is Shard:
                sizes[placement.dim] = _chunk_size(sizes[placement.dim], axis)
        return torch.Size(sizes)

    @property
    def rows(self) -> range:
        """The rows of this rank where ``ragged`` is not None."""
        for axis, placement in zip(mesh_axes(self.mesh), self.placements, strict=True):
            if isinstance(placement, RaggedShard):
                return placement.rows_of(axis.rank)
        raise PlacementError(f"placements {self.placements} have no rows of their own on each rank")

    @property
    def cutting_axes(self) -> list[MeshAxis]:
        """The axes whose ranks hold different elements."""
        axes = zip(mesh_axes(self.mesh), self.placements, strict=True)
        return [axis for axis, placement in axes if not placement.is_replicate()]

    @property
    def replicating_axes(self) -> list[MeshAxis]:
        """The axes whose ranks hold the same elements, but for axes of one rank."""
        axes = zip(mesh_axes(self.mesh), self.placements, strict=True)
        return [axis for axis, placement in axes if placement.is_replicate() and axis.size > 1]

    def sliced(self, first: int, num_rows: int) -> Distribution:
        """Return how a slice of the rows is spread when every rank keeps those that it has."""
        placements = tuple(
            ragged_shard(placement.rows.of_slice(first, num_rows), placement.axis_sizes)
            if isinstance(placement, RaggedShard)
            else placement
            for placement in self.placements
        )
        return Distribution(self.mesh, placements)

    @property
    def is_flattened(self) -> bool:
        """Whether ranks hold rows of all dimensions but the last, so that local parts are 2-D."""
        return any(isinstance(placement, RaggedShard) and placement.is_flattened for placement in self.placements)

    def local_offsets(self, shape: torch.Size) -> list[int]:
        """Return where ``local_shape`` begins in the whole tensor."""
        offsets, sizes = [0] * len(shape), list(shape)
        for axis, placement in zip(mesh_axes(self.mesh), self.placements, strict=True):
            if type(placement) is Shard:
                size = sizes[placement.dim]
                offsets[placement.dim] += min(axis.rank * -(-size // axis.size), size)
                sizes[placement.dim] = _chunk_size(size, axis)
        return offsets

    def gather(self, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the whole tensor, in memory of its own unless ``is_whole``; all ranks of the mesh call it together."""
        if self.is_whole:
            return local
        part, placements = local, list(self.placements)
        for axis in reversed(range(len(placements))):
            placement = placements[axis]
            if isinstance(placement, RaggedShard):
                part = placement._to_replicate_tensor(part, self.mesh, axis, self.local_shape(shape))
                placements[axis] = Replicate()
        if all(placement.is_replicate() for placement in placements):
            return part
        stride = contiguous_stride(shape)
        return DTensor.from_local(
            part.contiguous(), self.mesh, placements, run_check=False, shape=shape, stride=stride
        ).full_tensor()

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor that all ranks hold whole, as a view of it.

        Raises:
            PlacementError: a placement that is not ``Replicate``, ``Shard`` or ``RaggedShard``.
        """
        part = whole
        for axis, placement in zip(mesh_axes(self.mesh), self.placements, strict=True):
            if isinstance(placement, RaggedShard):
                rows = placement.rows_of(axis.rank)
                part = placement.by_rows(part)[rows.start : rows.stop]
            elif type(placement) is Shard:
                part = _chunk(part, placement.dim, axis)
            elif not placement.is_replicate():
                raise PlacementError(
                    f"no rank has a part of a whole tensor under placement {placement!r} of {self.placements}; "
                    "redistribute that DTensor to Replicate or Shard first"
                )
        return part

    def check_alike(self, tensor: torch.Tensor) -> None:
        """Check that the ranks hold the same values of a plain tensor that each will combine with its own rows.

        One all-reduce, and a look at its result on the host; nothing where neither may be (capture, tracing).

        Raises:
            PlacementError: they do not.
        """
        is_captured = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        if type(tensor) is not torch.Tensor or is_captured or not tensor.numel():
            return
        own = torch.stack([tensor.reshape(-1), -tensor.reshape(-1)]).to(torch.float64)
        most = self.all_reduce(own.clone(), "max")
        if not torch.equal(most.nan_to_num(), own.nan_to_num()):
            raise PlacementError(
                f"a plain tensor of shape {tuple(tensor.shape)} beside a sharded one differs from rank to rank, while "
                "each rank has rows of its own. Make it the same on all ranks, or bring it in after the sum over rows: "
                "p.square().sum() * factor"
            )

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Combine what the ranks found in their own parts, in place; ``op`` as in ``collectives.all_reduce``."""
        for axis in self.cutting_axes:
            collectives.all_reduce(tensor, axis, op)
        return tensor


def _chunk(tensor: torch.Tensor, dim: int, axis: MeshAxis) -> torch.Tensor:
    # torch.chunk's rule, which Shard follows: equal chunks rounded up, the last ranks may get less or nothing.
    size = tensor.shape[dim]
    start = min(axis.rank * -(-size // axis.size), size)
    return tensor.narrow(dim, start, _chunk_size(size, axis))


def _chunk_size(size: int, axis: MeshAxis) -> int:
    most = -(-size // axis.size)
    return max(min(most, size - axis.rank * most), 0)


def contiguous_stride(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Return the stride of a contiguous tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
