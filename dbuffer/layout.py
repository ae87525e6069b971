"""Layout: the range of a plan's flat buffer that one rank holds, and tensor views into it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dbuffer.errors import PlacementError
from dbuffer.mesh import MeshAxis
from dbuffer.placements import BufferPlacement, flat_axes, shard_index
from dbuffer.planner.granularity import Block, Granularity, Row
from dbuffer.planner.plan import Plan


def first_dimension_granularity(shape: Sequence[int]) -> Granularity:
    """Return the finest granularity that a DTensor can describe: shards hold whole slices of the first dimension."""
    return Block(math.prod(shape[1:-1])) if len(shape) > 2 and math.prod(shape[1:-1]) > 0 else Row()


def cuts_inside_slices(shape: Sequence[int], granularity: Granularity) -> bool:
    """Return whether a shard boundary may fall inside a slice of dimension 0, e.g. within one expert's weight."""
    slice_numel = math.prod(shape[1:])
    if not shape or not slice_numel or not shape[0]:
        return False
    unit = granularity.unit_numel(tuple(shape))
    return unit % slice_numel != 0 and unit < math.prod(shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The elements ``[start, stop)`` of the flat buffer that this rank holds under some placements."""

    plan: Plan
    placements: tuple[BufferPlacement, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements that this rank holds."""
        return self.stop - self.start

    def held(self, index: int) -> range:
        """Return which elements of tensor ``index`` (flattened) this rank holds."""
        offset = self.plan.offsets[index]
        numel = self.plan.tensor_numel(index)
        first = min(max(self.start - offset, 0), numel)
        return range(first, min(max(self.stop - offset, first), numel))

    def piece(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Return the 1-D slice of ``flat`` (this rank's part of the buffer) that belongs to tensor ``index``."""
        held = self.held(index)
        start = self.plan.offsets[index] + held.start - self.start if held else 0
        return flat.narrow(0, start, len(held))

    def tensor(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Return ``piece`` as a view in the tensor's shape, as far as the held part allows.

        ``DBuffer.get_local_tensor`` lists the possible shapes.
        """
        held = self.held(index)
        shape = self.plan.shapes[index]
        piece = self.piece(index, flat)
        if len(held) == self.plan.tensor_numel(index):
            return piece.view(shape)
        slice_numel = math.prod(shape[1:])
        if len(held) % slice_numel == 0 and held.start % slice_numel == 0:
            return piece.view(len(held) // slice_numel, *shape[1:])
        row_numel = self.plan.row_numel(index)
        is_rows = len(held) % row_numel == 0 and held.start % row_numel == 0
        return piece.view(-1, row_numel) if is_rows else piece

    def padding(self) -> list[range]:
        """Return the ranges of this rank's part that belong to no tensor, relative to the part's start."""
        taken = sorted(
            (offset, offset + self.plan.tensor_numel(index)) for index, offset in enumerate(self.plan.offsets)
        )
        gaps, cursor = [], 0
        for start, stop in [*taken, (self.plan.numel, self.plan.numel)]:
            first, last = max(cursor, self.start), min(start, self.stop)
            if first < last:
                gaps.append(range(first - self.start, last - self.start))
            cursor = max(cursor, stop)
        return gaps


def make_layout(plan: Plan, placements: tuple[BufferPlacement, ...], axes: Sequence[MeshAxis], name: str) -> Layout:
    """Return the layout of this rank under ``placements``.

    Raises:
        PlacementError: the plan's shards cannot be divided evenly over the ``Flat`` axes.
    """
    flat = flat_axes(placements)
    sizes = [axis.size for axis in axes]
    num_parts = math.prod(sizes[axis] for axis in flat)
    if plan.num_shards % num_parts:
        raise PlacementError(
            f"{name}: a plan of {plan.num_shards} shards cannot be cut into {num_parts} parts ({placements}). fix: "
            f"make the plan with num_shards= a multiple of {num_parts}"
        )
    part = plan.numel // num_parts
    index = shard_index(flat, [axis.rank for axis in axes], sizes)
    return Layout(plan, placements, index * part, (index + 1) * part)


def only_flat_axis(axes: Sequence[MeshAxis], placements: Sequence[BufferPlacement]) -> MeshAxis:
    """Return the only axis that shards a buffer.

    Raises:
        PlacementError: no axis or more than one axis is ``Flat``.
    """
    flat = flat_axes(tuple(placements))
    if len(flat) != 1:
        raise PlacementError(f"{tuple(placements)} has {len(flat)} Flat axes, but exactly one is needed here")
    return axes[flat[0]]
