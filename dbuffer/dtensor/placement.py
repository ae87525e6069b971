"""The placement of a flat buffer's tensors: a ``Shard(0)`` with true, uneven row counts.

A flat plan gives each rank a run of rows that no ``torch.chunk`` would: some ranks hold more, some none.
``RaggedShard`` answers PyTorch's questions (how many rows has rank r, from which on, split, gather) from the plan.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from dbuffer import collectives
from dbuffer.mesh import mesh_axes

__all__ = ["FlatRows", "RaggedShard", "ragged_shard"]


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Where the rows of one tensor lie in a flat buffer that is cut into equal shards.

    Attributes:
        tensor_offset: where the tensor starts in the buffer, in elements.
        shard_numel: elements of the buffer in one shard.
        row_numel: elements of one row: all dimensions but the first, or the last one alone (``RaggedShard``).
        num_rows: how many there are.
    """

    tensor_offset: int
    shard_numel: int
    row_numel: int
    num_rows: int

    def of_slice(self, first: int, num_rows: int) -> FlatRows:
        """Return where the rows ``first`` to ``first + num_rows`` lie, a tensor of their own."""
        return FlatRows(self.tensor_offset + first * self.row_numel, self.shard_numel, self.row_numel, num_rows)

    def of_shard(self, shard: int) -> range:
        """Return the rows in one shard, empty where there are none; rows without elements are in the first."""
        if self.row_numel == 0:
            return range(self.num_rows) if shard == 0 else range(self.num_rows, self.num_rows)
        return range(self._first_row_at(shard * self.shard_numel), self._first_row_at((shard + 1) * self.shard_numel))

    def _first_row_at(self, position: int) -> int:
        return min(max(-(-(position - self.tensor_offset) // self.row_numel), 0), self.num_rows)


class RaggedShard(Shard):
    """A ``Shard(0)`` whose boundaries are those of a flat buffer: a few integers, whatever the number of ranks.

    Args:
        rows: where the tensor's rows lie.
        axis_sizes: for a mesh that was flattened, the sizes of its axes; their last one is the major one of the buffer,
            while ranks of a flattened mesh count the first one slowest. Empty where rank r holds shard r.
        is_flattened: rows are those of all dimensions but the last, flattened: expert weights (E, a, b) may be cut
            between any two of their E * a rows, and local parts are 2-D.
    """

    rows: FlatRows
    axis_sizes: tuple[int, ...]
    is_flattened: bool

    # The base class is a compiled one that takes the dimension alone.
    def __new__(cls, rows: FlatRows, axis_sizes: tuple[int, ...] = (), is_flattened: bool = False) -> RaggedShard:
        """Create the placement; see the class."""
        return super().__new__(cls, 0)  # type: ignore[call-arg]  # the stub lacks the argument

    def __init__(self, rows: FlatRows, axis_sizes: tuple[int, ...] = (), is_flattened: bool = False) -> None:
        super().__init__(0)
        self.rows = rows
        self.axis_sizes = axis_sizes
        self.is_flattened = is_flattened

    def _key(self) -> tuple[FlatRows, tuple[int, ...], bool]:
        return (self.rows, self.axis_sizes, self.is_flattened)

    # PyTorch compares placements with a plain Shard(0) in operator strategies and expects equality there; between two
    # of these the rows decide, and they are part of the hash: the sharding cache must not hand one layout to another.
    def __eq__(self, other: object) -> bool:
        if isinstance(other, RaggedShard):
            return self._key() == other._key()
        if type(other) is not Shard or other.dim != 0:
            return False
        # Not for whole specs: DTensor's sharding cache looks up by spec, and compares whatever shares a bucket. A hit
        # there would give a tensor that PyTorch cut itself the rows of this one, or the reverse.
        return sys._getframe(1).f_code.co_name != "_check_equals"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return (RaggedShard, self._key())

    def __copy__(self) -> RaggedShard:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedShard:
        return self

    def __repr__(self) -> str:
        return f"RaggedShard({self.rows}, {self.axis_sizes}, {self.is_flattened})"

    def __str__(self) -> str:
        return "S(0)"

    def rows_of(self, rank: int) -> range:
        """Return the rows that one rank holds, empty where it holds none."""
        shard, weight = 0, math.prod(self.axis_sizes)
        if not self.axis_sizes:
            return self.rows.of_shard(rank)
        for size in reversed(self.axis_sizes):
            weight //= size
            rank, coordinate = divmod(rank, size)
            shard += coordinate * weight
        return self.rows.of_shard(shard)

    def by_rows(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor with its rows along the first dimension, as a view where it is contiguous."""
        return whole.reshape(-1, whole.shape[-1]) if self.is_flattened else whole

    def _rows_per_rank(self, num_chunks: int) -> list[range]:
        return [self.rows_of(rank) for rank in range(num_chunks)]

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        rows = self.rows_of(int(rank))
        if not self.is_flattened:
            return len(rows), rows.start
        # PyTorch can only say which slices of the first dimension a rank has: those that its rows touch.
        in_slice = max(self.rows.num_rows // max(curr_local_size, 1), 1)
        first = rows.start // in_slice
        return (-(-rows.stop // in_slice) - first if rows else 0), first

    def local_shard_size_and_offset(self, curr_local_size: Any, num_chunks: int, rank: Any) -> tuple[Any, Any]:  # type: ignore[override]
        """Return (rows, first row) of one rank: PyTorch asks this of placement objects too."""
        return self._local_shard_size_and_offset(curr_local_size, num_chunks, rank)

    def _split_tensor(
        self, tensor: torch.Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[torch.Tensor], list[int]]:
        rows = self._rows_per_rank(num_chunks)
        most = max(len(part) for part in rows)
        shards = [self.by_rows(tensor)[part.start : part.stop] for part in rows]
        if not with_padding:
            return [shard.contiguous() if contiguous else shard for shard in shards], []
        padding = [most - len(part) for part in rows]
        return [_pad_rows(shard, pad) for shard, pad in zip(shards, padding, strict=True)], padding

    def _select_split_tensor(
        self, tensor: torch.Tensor, num_chunks: int, index: Any, *, with_padding: bool = True, **options: Any
    ) -> torch.Tensor:
        rows = self.rows_of(int(index))
        shard = self.by_rows(tensor)[rows.start : rows.stop].clone()
        if not with_padding:
            return shard
        return _pad_rows(shard, max(len(part) for part in self._rows_per_rank(num_chunks)) - len(rows))

    def _shard_tensor(
        self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, src_data_rank: int | None = 0
    ) -> torch.Tensor:
        axis = mesh_axes(mesh)[mesh_dim]
        if src_data_rank is not None:
            tensor = tensor.contiguous().clone()
            collectives.broadcast(tensor, axis, src_data_rank)
        return self._select_split_tensor(tensor, axis.size, axis.rank, with_padding=False)

    def _to_replicate_tensor(
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Any
    ) -> torch.Tensor:
        axis = mesh_axes(mesh)[mesh_dim]
        rows = self._rows_per_rank(axis.size)
        most = max(len(part) for part in rows)
        row_shape = tuple(current_logical_shape[-1:] if self.is_flattened else current_logical_shape[1:])
        whole = local_tensor.new_empty((sum(len(part) for part in rows), *row_shape))
        if not whole.numel():
            return whole.view(tuple(current_logical_shape)) if self.is_flattened else whole
        # As bytes, because not every backend gathers every dtype (gloo refuses bool).
        padded = whole.new_empty((most, *row_shape))
        padded[: local_tensor.shape[0]] = local_tensor
        shard = padded.view(-1).view(torch.uint8)
        gathered = torch.empty(axis.size * shard.numel(), dtype=torch.uint8, device=shard.device)
        collectives.all_gather(gathered, shard, axis)
        shards = gathered.view(whole.dtype).view(axis.size, most, *row_shape)
        for rank, part in enumerate(rows):
            whole[part.start : part.stop] = shards[rank, : len(part)]
        return whole.view(tuple(current_logical_shape)) if self.is_flattened else whole

    def _reduce_shard_tensor(
        self, tensor: torch.Tensor, mesh: DeviceMesh, reduce_op: str, mesh_dim: int
    ) -> torch.Tensor:
        axis = mesh_axes(mesh)[mesh_dim]
        reduced = tensor.contiguous().clone()
        collectives.all_reduce(reduced, axis, reduce_op)
        return self._select_split_tensor(reduced, axis.size, axis.rank, with_padding=False)

    def _to_new_shard_dim(
        self,
        local_tensor: torch.Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        current_logical_shape: Any,
        new_shard_dim: int,
    ) -> torch.Tensor:
        full = self._to_replicate_tensor(local_tensor, mesh, mesh_dim, current_logical_shape)
        axis = mesh_axes(mesh)[mesh_dim]
        return Shard(new_shard_dim)._select_split_tensor(full, axis.size, axis.rank, with_padding=False)


def _pad_rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    if num_rows == 0:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros((num_rows, *tensor.shape[1:]))])


@functools.lru_cache(maxsize=65536)
def ragged_shard(rows: FlatRows, axis_sizes: tuple[int, ...] = (), is_flattened: bool = False) -> RaggedShard:
    """Return one object for equal arguments: weights, gradients and optimizer state then compare by identity."""
    return RaggedShard(rows, axis_sizes, is_flattened)
