"""Distribution: how the elements of a DTensor are spread over its mesh, with row counts from a flat buffer.

A flat plan gives each rank a range of rows that differs from ``torch.chunk``: some ranks hold more rows, some none.
``RaggedShard`` is a ``Shard(0)`` with these uneven row counts. From the plan it answers what PyTorch asks of a
placement: how many rows a rank has, where they start, and how to split and gather.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dbuffer.collectives.all_gather import all_gather
from dbuffer.collectives.broadcast import broadcast
from dbuffer.collectives.parts import is_traced
from dbuffer.dtensor.reads import read_gather_uneven, read_reduce
from dbuffer.errors import MeshError, PlacementError
from dbuffer.mesh import MeshAxis, cannot_send_cpu_tensors, mesh_axes


@dataclass(frozen=True, slots=True)
class FlatRows:
    """The position of a tensor's rows in a flat buffer that is cut into equal shards.

    Attributes:
        tensor_offset: start of the tensor in the buffer, in elements.
        shard_numel: elements of one shard of the buffer.
        row_numel: elements of one row. A row is a slice of the first dimension, or of the last (see ``RaggedShard``).
        num_rows: number of rows.
    """

    tensor_offset: int
    shard_numel: int
    row_numel: int
    num_rows: int

    def of_shard(self, shard: int) -> range:
        """Return the rows in one shard; empty if there are none. Rows without elements are in shard 0."""
        if self.row_numel == 0:
            return range(self.num_rows) if shard == 0 else range(self.num_rows, self.num_rows)
        return range(self._first_row_at(shard * self.shard_numel), self._first_row_at((shard + 1) * self.shard_numel))

    def _first_row_at(self, position: int) -> int:
        return min(max(-(-(position - self.tensor_offset) // self.row_numel), 0), self.num_rows)


class RaggedShard(Shard):
    """A ``Shard(0)`` with the boundaries of a flat buffer. Its size does not depend on the number of ranks.

    Args:
        rows: the position of the tensor's rows in the buffer.
        axis_sizes: for a flattened mesh, the sizes of its original axes. The buffer's major axis is the last one, while
            a flattened mesh counts ranks with the first axis slowest. Empty: rank r holds shard r.
        leading: (E, a) if a row is a slice of the last dimension of an (E, a, b) tensor. Expert weights may then be
            cut between any two of their E * a rows, and local parts are 2-D. Otherwise empty.
    """

    rows: FlatRows
    axis_sizes: tuple[int, ...]
    leading: tuple[int, ...]

    # The base class is compiled; its __new__ takes only the dimension.
    def __new__(cls, rows: FlatRows, axis_sizes: tuple[int, ...] = (), leading: tuple[int, ...] = ()) -> RaggedShard:
        """Create the placement; see the class."""
        return super().__new__(cls, 0)  # type: ignore[call-arg]  # the stub lacks the argument

    def __init__(self, rows: FlatRows, axis_sizes: tuple[int, ...] = (), leading: tuple[int, ...] = ()) -> None:
        super().__init__(0)
        self.rows = rows
        self.axis_sizes = axis_sizes
        self.leading = leading

    @property
    def is_flattened(self) -> bool:
        """True if a row is a slice of the last dimension, with all other dimensions flattened."""
        return bool(self.leading)

    def _key(self) -> tuple[FlatRows, tuple[int, ...], tuple[int, ...]]:
        return (self.rows, self.axis_sizes, self.leading)

    # PyTorch's operator strategies compare placements with a plain Shard(0) and expect equality. Two RaggedShards
    # compare by their rows, which are also hashed: the sharding cache must not use one layout for another.
    def __eq__(self, other: object) -> bool:
        if isinstance(other, RaggedShard):
            return self._key() == other._key()
        if type(other) is not Shard or other.dim != 0:
            return False
        # Not equal inside the comparison of whole specs: DTensor's sharding cache looks up specs with it. A hit would
        # give a tensor that PyTorch cut itself the rows of this one, or the reverse.
        return sys._getframe(1).f_code.co_name != "_check_equals"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return (RaggedShard, self._key())

    def __repr__(self) -> str:
        return f"RaggedShard({self.rows}, {self.axis_sizes}, {self.leading})"

    def __str__(self) -> str:
        return "S(0)"

    def rows_of(self, rank: int) -> range:
        """Return the rows that one rank holds; empty if it holds none."""
        shard, weight = 0, math.prod(self.axis_sizes)
        if not self.axis_sizes:
            return self.rows.of_shard(rank)
        for size in reversed(self.axis_sizes):
            weight //= size
            rank, coordinate = divmod(rank, size)
            shard += coordinate * weight
        return self.rows.of_shard(shard)

    def by_rows(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor with its rows along the first dimension; a view if the tensor is contiguous."""
        return whole.reshape(-1, whole.shape[-1]) if self.is_flattened else whole

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        rows = self.rows_of(int(rank))
        if not self.is_flattened:
            return len(rows), rows.start
        # PyTorch can only express whole slices of the first dimension: those that the rank's rows touch.
        in_slice = max(self.rows.num_rows // max(curr_local_size, 1), 1)
        first = rows.start // in_slice
        return (-(-rows.stop // in_slice) - first if rows else 0), first

    def local_shard_size_and_offset(self, curr_local_size: Any, num_chunks: int, rank: Any) -> tuple[Any, Any]:  # type: ignore[override]
        """Return (number of rows, first row) of one rank; PyTorch calls this on placements."""
        return self._local_shard_size_and_offset(curr_local_size, num_chunks, rank)

    def _split_tensor(
        self, tensor: torch.Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[torch.Tensor], list[int]]:
        rows = list(map(self.rows_of, range(num_chunks)))
        shards = [self.by_rows(tensor)[part.start : part.stop] for part in rows]
        if not with_padding:
            return [shard.contiguous() if contiguous else shard for shard in shards], []
        padding = [max(map(len, rows)) - len(part) for part in rows]
        return [_pad_rows(shard, pad) for shard, pad in zip(shards, padding, strict=True)], padding

    def _select_split_tensor(
        self, tensor: torch.Tensor, num_chunks: int, index: Any, *, with_padding: bool = True, **options: Any
    ) -> torch.Tensor:
        rows = self.rows_of(int(index))
        shard = self.by_rows(tensor)[rows.start : rows.stop].clone()
        if not with_padding:
            return shard
        return _pad_rows(shard, max(map(len, map(self.rows_of, range(num_chunks)))) - len(rows))

    def _shard_tensor(
        self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, src_data_rank: int | None = 0
    ) -> torch.Tensor:
        axis = mesh_axes(mesh)[mesh_dim]
        if src_data_rank is not None:
            tensor = tensor.contiguous().clone()
            broadcast(tensor, axis, src_data_rank)
        return self._select_split_tensor(tensor, axis.size, axis.rank, with_padding=False)

    def _to_replicate_tensor(
        self,
        local_tensor: torch.Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        current_logical_shape: Any,
        *,
        of: DTensor | None = None,
    ) -> torch.Tensor:
        axis = mesh_axes(mesh)[mesh_dim]
        rows = list(map(self.rows_of, range(axis.size)))
        row_shape = tuple(current_logical_shape[-1:] if self.is_flattened else current_logical_shape[1:])
        whole = local_tensor.new_empty((sum(map(len, rows)), *row_shape))
        result = whole.view(tuple(current_logical_shape)) if self.is_flattened else whole
        if not whole.numel():
            return result
        mine = rows[axis.rank]
        whole[mine.start : mine.stop] = local_tensor
        if is_traced(local_tensor):
            return self._gather_traced(whole, local_tensor, rows, axis).view(result.shape)
        read_gather_uneven(whole, [whole[part.start : part.stop] for part in rows], axis, of)
        return result

    def _gather_traced(
        self, whole: torch.Tensor, local: torch.Tensor, rows: Sequence[range], axis: MeshAxis
    ) -> torch.Tensor:
        """Gather parts that are padded to equal size, because a compiler has only that operator."""
        most = max(map(len, rows))
        padded = whole.new_zeros((most, *whole.shape[1:]))
        padded[: local.shape[0]] = local
        shard = padded.view(-1).view(torch.uint8)
        gathered = torch.empty(axis.size * shard.numel(), dtype=torch.uint8, device=shard.device)
        all_gather(gathered, shard, axis.of_operators)
        shards = gathered.view(whole.dtype).view(axis.size, most, *whole.shape[1:])
        return torch.cat([shards[rank, : len(part)] for rank, part in enumerate(rows)])

    def _reduce_shard_tensor(
        self, tensor: torch.Tensor, mesh: DeviceMesh, reduce_op: str, mesh_dim: int
    ) -> torch.Tensor:
        axis = mesh_axes(mesh)[mesh_dim]
        reduced = tensor.contiguous().clone()
        read_reduce(reduced, axis, reduce_op)
        return self._select_split_tensor(reduced, axis.size, axis.rank, with_padding=False)

    def _to_new_shard_dim(
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, *shape_and_dim: Any
    ) -> torch.Tensor:
        shape, new_shard_dim = shape_and_dim
        full, axis = self._to_replicate_tensor(local_tensor, mesh, mesh_dim, shape), mesh_axes(mesh)[mesh_dim]
        return Shard(new_shard_dim)._select_split_tensor(full, axis.size, axis.rank, with_padding=False)


def _pad_rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    if num_rows == 0:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros((num_rows, *tensor.shape[1:]))])


@functools.lru_cache(maxsize=65536)
def ragged_shard(rows: FlatRows, axis_sizes: tuple[int, ...] = (), leading: tuple[int, ...] = ()) -> RaggedShard:
    """Return the same object for equal arguments, so that weights, gradients and state compare by identity."""
    return RaggedShard(rows, axis_sizes, leading)


@dataclass(frozen=True, slots=True)
class Distribution:
    """The placements of a tensor on a mesh, and the collectives between its local part and the whole tensor.

    At most one placement is a ``RaggedShard``. Earlier axes may cut the tensor by ``Shard`` (tensor parallelism).
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> Distribution:
        """Return the distribution of a DTensor."""
        return cls(tensor._spec.mesh, tensor._spec.placements)

    @property
    def is_whole(self) -> bool:
        """True if every rank holds all elements."""
        return all(placement.is_replicate() for placement in self.placements)

    @property
    def ragged(self) -> RaggedShard | None:
        """The ``RaggedShard``, if it is the only placement that cuts and it cuts between slices of dimension 0."""
        cuts = [placement for placement in self.placements if not placement.is_replicate()]
        if len(cuts) != 1 or not isinstance(cuts[0], RaggedShard) or cuts[0].is_flattened:
            return None
        return cuts[0]

    def local_box(self, shape: torch.Size) -> tuple[list[int], torch.Size]:
        """Return the offsets and the shape of the part that the ``Shard`` axes leave to this rank."""
        offsets, sizes = [0] * len(shape), list(shape)
        for axis, placement in zip(mesh_axes(self.mesh), self.placements, strict=True):
            if type(placement) is Shard:
                start, sizes[placement.dim] = _chunk(sizes[placement.dim], axis)
                offsets[placement.dim] += start
        return offsets, torch.Size(sizes)

    @property
    def rows(self) -> range:
        """The rows of this rank under the ``RaggedShard``."""
        for axis, placement in zip(mesh_axes(self.mesh), self.placements, strict=True):
            if isinstance(placement, RaggedShard):
                return placement.rows_of(axis.rank)
        raise PlacementError(f"placements {self.placements} have no rows of their own on each rank")

    @property
    def cutting_axes(self) -> list[MeshAxis]:
        """The axes whose ranks hold different elements."""
        return [axis for axis, one in zip(mesh_axes(self.mesh), self.placements, strict=True) if not one.is_replicate()]

    @property
    def replicating_axes(self) -> list[MeshAxis]:
        """The axes, of more than one rank, whose ranks hold the same elements."""
        return [axis for axis in mesh_axes(self.mesh) if axis.size > 1 and axis not in self.cutting_axes]

    @property
    def is_flattened(self) -> bool:
        """True if a row is a slice of the last dimension, so that local parts are 2-D."""
        return any(isinstance(placement, RaggedShard) and placement.is_flattened for placement in self.placements)

    def gather(self, local: torch.Tensor, shape: torch.Size, of: DTensor | None = None) -> torch.Tensor:
        """Return the whole tensor, in memory of its own unless ``is_whole``. All ranks of the mesh must call this.

        ``of``: the tensor that is gathered, for its name in errors.
        """
        self._check_backend(local)
        part, placements = local, list(self.placements)
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, RaggedShard):
                part = placement._to_replicate_tensor(part, self.mesh, axis, self.local_box(shape)[1], of=of)
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
            PlacementError: a placement is not ``Replicate``, ``Shard`` or ``RaggedShard``.
        """
        part = whole
        for axis, placement in zip(mesh_axes(self.mesh), self.placements, strict=True):
            if isinstance(placement, RaggedShard):
                rows = placement.rows_of(axis.rank)
                part = placement.by_rows(part)[rows.start : rows.stop]
            elif type(placement) is Shard:
                part = part.narrow(placement.dim, *_chunk(part.shape[placement.dim], axis))
            elif not placement.is_replicate():
                raise PlacementError(
                    f"no rank has a part of a whole tensor under placement {placement!r} of {self.placements}. "
                    "fix: redistribute that DTensor to Replicate() or Shard() first"
                )
        return part

    def all_reduce(self, tensor: torch.Tensor, op: str, of: DTensor | None = None) -> torch.Tensor:
        """Reduce the ranks' partial results in place; ``op`` as in ``all_reduce``."""
        self._check_backend(tensor)
        for axis in self.cutting_axes:
            read_reduce(tensor, axis, op, of)
        return tensor

    def _check_backend(self, tensor: torch.Tensor) -> None:
        """Raise for a tensor in CPU memory if the mesh's process group only supports GPU tensors."""
        if tensor.device.type != "cpu":
            return
        if any(axis.size > 1 and cannot_send_cpu_tensors(axis.gather_group) for axis in self.cutting_axes):
            raise MeshError(
                f"a sharded tensor in CPU memory over {self.mesh}: the process group has no backend for it, "
                f"only for {self.mesh.device_type}. Offloaded parameters need one for what PyTorch does with them "
                'between steps. fix: torch.distributed.init_process_group("cpu:gloo,cuda:nccl")'
            )


def _chunk(size: int, axis: MeshAxis) -> tuple[int, int]:
    """Return the start and the size of this rank's part of a dimension.

    It follows torch.chunk, as Shard does: equal chunks, rounded up; the last ranks may get less or nothing.
    """
    most = -(-size // axis.size)
    start = min(axis.rank * most, size)
    return start, min(most, size - start)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the stride of a contiguous tensor, in elements."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
