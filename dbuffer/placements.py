"""Placements: where the data of a flat buffer lives on each axis of its mesh.

``Replicate`` and ``Partial`` are PyTorch's own classes. ``Flat`` is new: the axis cuts the flat buffer itself, not a
dimension of one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed.tensor import Partial, Replicate

from dbuffer.errors import PlacementError

__all__ = [
    "BufferPlacement",
    "Flat",
    "Partial",
    "Replicate",
    "flat_axes",
    "shard_index",
    "validate_placements",
]


@dataclass(frozen=True, slots=True)
class Flat:
    """The mesh axis cuts the flat buffer into equal contiguous shards.

    When several axes are ``Flat``, the last one is the major one: each rank of the last axis holds one contiguous
    piece, and the earlier axes cut that piece further.
    """


BufferPlacement: TypeAlias = Replicate | Partial | Flat


def validate_placements(placements: Sequence[object], num_axes: int) -> tuple[BufferPlacement, ...]:
    """Return ``placements`` as a tuple after checking that there is one valid placement per mesh axis.

    Raises:
        PlacementError: the number of placements is not ``num_axes``, or a placement has an unsupported class.
    """
    if len(placements) != num_axes:
        raise PlacementError(
            f"found {len(placements)} placements {tuple(placements)} for a mesh of {num_axes} axes. fix: give "
            f"exactly one of Replicate(), Partial() or Flat() per axis"
        )
    for axis, placement in enumerate(placements):
        if not isinstance(placement, (Replicate, Partial, Flat)):
            raise PlacementError(
                f"axis {axis}: {placement!r} is not a placement of a flat buffer; legal are Replicate(), Partial(op) "
                f"and Flat(). fix: to choose where tensors are cut, pass Flat() here and granularity= to the buffer"
            )
        if isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
            raise PlacementError(
                f"axis {axis}: Partial({placement.reduce_op!r}) cannot be reduced; legal are 'sum' and 'avg'. "
                "fix: Partial('sum') or Partial('avg')"
            )
    return tuple(placements)  # type: ignore[arg-type]  # narrowed by the loop above


def flat_axes(placements: Sequence[BufferPlacement]) -> tuple[int, ...]:
    """Return the mesh axes that cut the buffer, in mesh order (from minor to major)."""
    return tuple(axis for axis, placement in enumerate(placements) if isinstance(placement, Flat))


def shard_index(axes: Sequence[int], coordinate: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the index of this rank's shard among the ``prod(sizes[a] for a in axes)`` shards.

    Args:
        axes: the ``Flat`` axes in mesh order; the last is the major one.
        coordinate: this rank's position on every axis of the mesh.
        sizes: the number of ranks on every axis of the mesh.
    """
    index = 0
    for axis in reversed(axes):
        index = index * sizes[axis] + coordinate[axis]
    return index
