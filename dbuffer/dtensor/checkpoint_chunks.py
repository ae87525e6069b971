"""Boxes: a range of flattened rows as the rectangular pieces that checkpoints store.

PyTorch's distributed checkpoints describe pieces by offsets and sizes. A rank's rows of an (E, a, b) tensor, flattened,
are up to three such boxes: the end of one slice, some whole slices, and the start of another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dbuffer.dtensor.distribution import Distribution, RaggedShard
from dbuffer.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Box:
    """Offsets and sizes of one piece along the flattened dimensions; ``first`` is its first row within the range."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int

    @property
    def num_rows(self) -> int:
        """Number of rows in the piece."""
        return math.prod(self.sizes)


def boxes_of_run(run: range, sizes: Sequence[int]) -> Iterator[Box]:
    """Yield the boxes that make up a range of consecutive positions in an index space, in order.

    Args:
        run: positions in row-major order. sizes: sizes of the index space, (E, a) for expert weights (E, a, b).
    """
    steps, position = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))], run.start
    while position < run.stop:
        # Take as many whole slices of the outermost possible dimension as fit in the range and the enclosing slice.
        dim = next(dim for dim, step in enumerate(steps) if position % step == 0 and position + step <= run.stop)
        offsets = tuple(position // step % size for step, size in zip(steps, sizes, strict=True))
        count = min((run.stop - position) // steps[dim], sizes[dim] - offsets[dim])
        yield Box(offsets, (*(1 for _ in sizes[:dim]), count, *sizes[dim + 1 :]), position - run.start)
        position += count * steps[dim]


def _pieces(distribution: Distribution, shape: torch.Size) -> Iterator[tuple[ChunkStorageMetadata, Box]]:
    before, part = distribution.local_box(shape)
    for box in boxes_of_run(distribution.rows, part[:-1]):
        offsets = [one + other for one, other in zip(before, (*box.offsets, 0), strict=True)]
        yield ChunkStorageMetadata(torch.Size(offsets), torch.Size((*box.sizes, part[-1]))), box


def chunks_of(distribution: Distribution, shape: torch.Size) -> list[ChunkStorageMetadata]:
    """Return the positions of this rank's rows in the whole tensor, for ``torch.distributed.checkpoint``."""
    return [chunk for chunk, _ in _pieces(distribution, shape)]


def write_items_of(fqn: str, distribution: Distribution, shape: torch.Size, local: torch.Tensor) -> list[WriteItem]:
    """Return the write items of this rank's part of a tensor."""
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shape),
        )
        for chunk in chunks_of(distribution, shape)
    ]


def shard_at(
    offset: torch.Size | None, distribution: Distribution, shape: torch.Size, local: torch.Tensor
) -> torch.Tensor:
    """Return the piece of this rank's part that starts at an offset of the whole tensor, as a view.

    Raises:
        LayoutError: no piece of this rank starts at the offset.
    """
    for chunk, box in _pieces(distribution, shape):
        if offset is None or tuple(chunk.offsets) == tuple(offset):
            return local[box.first : box.first + box.num_rows].view(tuple(chunk.sizes))
    raise LayoutError(
        f"no piece of this rank begins at offset {tuple(offset or ())} of a tensor of shape {tuple(shape)}"
    )


def own_rows(slices: torch.Tensor, placement: RaggedShard, rows: range) -> torch.Tensor:
    """Return this rank's own rows from the whole first-dimension slices that they touch, which PyTorch loaded."""
    flat = placement.by_rows(slices)
    if not rows:
        return flat[:0]
    in_slice = flat.shape[0] // max(slices.shape[0], 1)
    start = rows.start % in_slice
    return flat[start : start + len(rows)]
