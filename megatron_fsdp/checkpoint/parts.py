"""Parts of tensors as checkpoint items: rows saved under their own name, and a rank's part of a divided tensor.

``torch.distributed.checkpoint`` saves and loads them in place. They have a shape and a dtype, but their values belong
to another tensor, of which this rank may hold only a shard. Nothing can be computed with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

__all__ = ["CutPart", "Part", "RowPart", "pieces_of"]


class Part(torch.Tensor):
    """Pieces of ``source``, each with its position in a tensor of another shape.

    Attributes:
        source: the tensor with the values.
        was_saved: whether a save has planned to write this. was_found: whether a load has found it in a checkpoint.
    """

    source: torch.Tensor
    was_saved: bool
    was_found: bool
    _pieces: list[tuple[ChunkStorageMetadata, torch.Tensor]]

    @classmethod
    def _of(cls, source: torch.Tensor, shape: tuple[int, ...]) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=source.dtype, device=source.device)
        made.source, made.was_saved, made.was_found, made._pieces = source, False, False, []
        return made

    def _add(self, offsets: tuple[int, ...], values: torch.Tensor) -> None:
        if values.numel():
            self._pieces.append((ChunkStorageMetadata(torch.Size(offsets), values.shape), values))

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return the write items of this rank's pieces."""
        self.was_saved = True
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, position),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(rows), self.size()),
            )
            for position, (chunk, rows) in enumerate(self._pieces)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the positions of this rank's pieces."""
        self.was_found = True
        return [chunk for chunk, _ in self._pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the piece at ``index``, as a view."""
        return next(rows for chunk, rows in self._pieces if chunk.offsets == index.offset)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise for every operator except ``detach``."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func}: a {cls.__name__} is an item of a checkpoint; compute with the whole tensor")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        """Return the class name, shape and dtype."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class RowPart(Part):
    """Rows ``start`` to ``stop`` of a tensor, for formats that store a weight in two halves."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor, start: int, stop: int) -> RowPart:
        made: RowPart = cls._of(whole, (stop - start, *whole.shape[1:]))
        for offsets, local in pieces_of(whole):
            first, last = max(offsets[0], start), min(offsets[0] + local.shape[0], stop)
            if first < last:
                made._add((first - start, *offsets[1:]), local.narrow(0, first - offsets[0], last - first))
        return made


class CutPart(Part):
    """The part that one rank holds of a tensor that is divided over several ranks along a dimension.

    Args:
        own: this rank's part, which may be sharded further. dim: the divided dimension.
        rank, size: this rank's position among the ranks, and their number.
        stride: number of equal blocks that the whole tensor is cut into first; every rank has its part of each block.
            It is 2 for a gate and an up-projection in one weight.
    """

    @staticmethod
    def __new__(cls, own: torch.Tensor, dim: int, rank: int, size: int, stride: int = 1) -> CutPart:
        shape = list(own.shape)
        block = shape[dim] // stride
        shape[dim] *= size
        made: CutPart = cls._of(own, tuple(shape))
        for offsets, local in pieces_of(own):
            for begin, first, count in _by_blocks(offsets[dim], local.shape[dim], block):
                moved = list(offsets)
                moved[dim] = (begin * size + rank) * block + first
                made._add(tuple(moved), local.narrow(dim, begin * block + first - offsets[dim], count))
        return made


def _by_blocks(start: int, length: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Yield (block number, first position in the block, number of positions) for a range of positions."""
    stop = start + length
    while start < stop:
        number, first = divmod(start, block)
        count = min(block - first, stop - start)
        yield number, first, count
        start += count


def pieces_of(whole: torch.Tensor) -> list[tuple[torch.Size, torch.Tensor]]:
    """Return (offsets, view) of the boxes that this rank holds: the whole tensor, or its shards of a DTensor."""
    if isinstance(whole, Part):
        return [(chunk.offsets, values) for chunk, values in whole._pieces]
    whole = whole.detach()
    if not isinstance(whole, DTensor):
        return [(torch.Size([0] * whole.ndim), whole)]
    return [
        (chunk.offsets, whole.__get_tensor_shard__(MetadataIndex("", chunk.offsets, position)).detach())
        for position, chunk in enumerate(whole.__create_chunk_list__())
    ]
