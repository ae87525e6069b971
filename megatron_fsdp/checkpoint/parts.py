"""RowPart: some rows of a tensor as an item of a checkpoint of their own, for layouts that store a weight in halves."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

__all__ = ["RowPart"]


class RowPart(torch.Tensor):
    """Rows ``start`` to ``stop`` of a tensor, which ``torch.distributed.checkpoint`` saves and loads in place.

    It has a shape and a dtype and no values: those are the whole's, of which this rank may hold a part. Nothing can be
    computed with it.

    Attributes:
        was_saved: whether a save has planned to write it. was_found: whether a load has found it in a checkpoint.
    """

    was_saved: bool
    was_found: bool
    _pieces: list[tuple[ChunkStorageMetadata, torch.Tensor]]

    @staticmethod
    def __new__(cls, whole: torch.Tensor, start: int, stop: int) -> RowPart:
        shape = (stop - start, *whole.shape[1:])
        made: RowPart = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=whole.dtype, device=whole.device)
        return made

    def __init__(self, whole: torch.Tensor, start: int, stop: int) -> None:
        self.was_saved = self.was_found = False
        self._pieces = []
        for offsets, local in _pieces_of(whole.detach()):
            first, last = max(offsets[0], start), min(offsets[0] + local.shape[0], stop)
            if first < last and local.numel():
                rows = local.narrow(0, first - offsets[0], last - first)
                chunk = ChunkStorageMetadata(torch.Size((first - start, *offsets[1:])), rows.shape)
                self._pieces.append((chunk, rows))

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return what this rank saves."""
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
        """Return where what this rank holds lies among these rows."""
        self.was_found = True
        return [chunk for chunk, _ in self._pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the piece that the index names, as a view."""
        return next(rows for chunk, rows in self._pieces if chunk.offsets == index.offset)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse to compute, but for ``detach``."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func}: a RowPart is an item of a checkpoint; compute with the whole tensor")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        """Name the kind and the shape."""
        return f"RowPart(shape={tuple(self.shape)}, dtype={self.dtype})"


def _pieces_of(whole: torch.Tensor) -> list[tuple[torch.Size, torch.Tensor]]:
    if not isinstance(whole, DTensor):
        return [(torch.Size([0] * whole.ndim), whole)]
    return [
        (chunk.offsets, whole.__get_tensor_shard__(MetadataIndex("", chunk.offsets, position)).detach())
        for position, chunk in enumerate(whole.__create_chunk_list__())
    ]
