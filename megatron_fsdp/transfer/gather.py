"""Gather main weights into the caller's memory; units and their gathered weights stay unchanged.

A unit's own gather brings the compute weights: 8-bit codes, or another dtype. Transfers start from the main weights, so
that the sent weights equal the state dict of a plain model to the bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dbuffer import DBuffer
from dbuffer.collectives.all_gather import all_gather_together, all_gather_uneven
from dbuffer.collectives.parts import Part
from dbuffer.layout import Layout
from dbuffer.mesh import MeshAxis, mesh_axes
from dbuffer.placements import flat_axes, shard_index
from dbuffer_kernels import join_weight
from megatron_fsdp.build.tensor_parallel import TensorParallel
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.transfer.catalog import ShardedWeight

__all__ = ["Piece", "RegionGather", "Shards", "assemble", "gather_regions", "own_values"]

# An addition to this rank's part of a weight before it is sent, such as a merged adapter. The function gets the whole
# weight's dtype and returns the whole addition.
Addition = Callable[[torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shards:
    """The sharding of a group's main weights: the axes, and this rank's shard.

    Attributes:
        axes: those that cut the flat buffer, from the minor one to the major one. index: of this rank's shard.
        shard_numel: elements of each shard.
    """

    axes: tuple[MeshAxis, ...]
    index: int
    shard_numel: int

    @classmethod
    def of(cls, buffer: DBuffer) -> Shards:
        """Return those of a buffer."""
        flat = flat_axes(buffer.placements)
        ranks, sizes = [axis.rank for axis in buffer.axes], [axis.size for axis in buffer.axes]
        axes = tuple(buffer.axes[position] for position in flat)
        return cls(axes, shard_index(flat, ranks, sizes), buffer.layout.numel)

    @property
    def number(self) -> int:
        """Number of shards."""
        return math.prod(axis.size for axis in self.axes)

    def bounds(self, start: int, stop: int) -> list[int]:
        """Return where the shards begin, and the last one ends, within elements ``[start, stop)`` of the flat buffer.

        Counted from ``start``; a shard that lies outside is empty.
        """
        return [min(max(shard * self.shard_numel, start), stop) - start for shard in range(self.number + 1)]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive weights of one group, which are gathered together.

    Attributes:
        weights: in the order of the flat buffer. start, stop: the elements of the buffer that hold them.
        dtype: in which the weights are sent.
        additions: by the position of a weight in the plan, the addition before it is sent.
    """

    group: ParameterGroup
    weights: tuple[ShardedWeight, ...]
    start: int
    stop: int
    dtype: torch.dtype
    additions: dict[int, Addition]

    @property
    def numel(self) -> int:
        """Elements of the piece, padding between weights included."""
        return self.stop - self.start

    @property
    def tensor_parallel(self) -> TensorParallel | None:
        """The tensor-parallel sharding of the weights; None for whole ones."""
        return self.group.owned[0].tensor_parallel


def own_values(piece: Piece, out: torch.Tensor) -> None:
    """Write this rank's main weights of a piece to ``out``, a 1-D tensor with as many elements."""
    weights = piece.group.weights
    layout, start, stop = _held(piece)
    if start == stop:
        return
    here = slice(start - layout.start, stop - layout.start)
    values = weights.main.local_buffer.detach()[here]
    if weights.remainder is not None:
        # A cast of the FP32 weight takes ties to even; the upper halves at rest have ties away from zero.
        low = weights.remainder.current()[here]
        whole = torch.empty(stop - start, dtype=torch.float32, device=values.device)
        values = join_weight(values, low, whole)
    elif piece.additions:
        values = values.clone()
    for index, addition in piece.additions.items():
        held = layout.held(index)
        first = layout.plan.offsets[index] + held.start
        low_end, high_end = max(first, start), min(first + len(held), stop)
        if low_end < high_end:
            origin = layout.plan.offsets[index]
            part = addition(values.dtype).reshape(-1)[low_end - origin : high_end - origin]
            values[low_end - start : high_end - start].add_(part.to(values.device))
    out.copy_(values)


def _held(piece: Piece) -> tuple[Layout, int, int]:
    layout = piece.group.weights.main.layout
    start = min(max(layout.start, piece.start), piece.stop)
    return layout, start, min(max(layout.stop, start), piece.stop)


@dataclass(frozen=True, slots=True, eq=False)
class RegionGather:
    """The gather of one piece into memory.

    Attributes:
        region: 1-D, of the piece's dtype: where the piece goes, whole. bounds: of the shards in it.
    """

    shards: Shards
    region: torch.Tensor
    bounds: Sequence[int]

    @classmethod
    def filled(cls, piece: Piece, region: torch.Tensor) -> RegionGather:
        """Write this rank's part of a piece to its place in ``region``."""
        buffer = piece.group.weights.main
        shards = Shards.of(buffer)
        bounds = shards.bounds(piece.start, piece.stop)
        own_values(piece, region[bounds[shards.index] : bounds[shards.index + 1]])
        return cls(shards, region, bounds)

    def step(self, number: int) -> tuple[MeshAxis, list[torch.Tensor]] | None:
        """Return the axis of the gather's step ``number`` and the parts that its ranks bring; None past the last."""
        axes = self.shards.axes
        if number >= len(axes):
            return None
        stride = math.prod(axis.size for axis in axes[:number])
        size = axes[number].size
        first = self.shards.index // (stride * size) * stride * size
        edges = [self.bounds[first + position * stride] for position in range(size + 1)]
        return axes[number], [self.region[a:b] for a, b in itertools.pairwise(edges)]


def gather_regions(gathers: Sequence[RegionGather], works: list[dist.Work]) -> None:
    """Issue gathers together: one collective for all that are whole buffers, broadcasts of their parts for windows.

    Args:
        works: gets the handles of the last step; earlier ones (of buffers that two axes cut) are waited for.
    """
    num_steps = max((len(each.shards.axes) for each in gathers), default=0)
    for number in range(num_steps):
        even: list[Part] = []
        uneven: list[tuple[MeshAxis, list[torch.Tensor]]] = []
        is_last = number == num_steps - 1
        for each in gathers:
            step = each.step(number)
            if step is None:
                continue
            axis, parts = step
            if len({part.numel() for part in parts}) == 1:
                start = parts[0].storage_offset() - each.region.storage_offset()
                whole = each.region[start : start + sum(part.numel() for part in parts)]
                # Gather bytes, because not every backend gathers every dtype.
                even.append(Part("all_gather", axis, whole.view(torch.uint8), parts[axis.rank].view(torch.uint8)))
            else:
                uneven.append((axis, parts))
        if even:
            all_gather_together(even, works if is_last else None)
        for axis, parts in uneven:
            all_gather_uneven(parts, axis, works if is_last else None)


# ---------------------------------------------------------------- tensor- and expert-parallel parts


def assemble(local: Sequence[torch.Tensor], tensor_parallel: TensorParallel, out: Sequence[torch.Tensor]) -> None:
    """Put tensor-parallel parts together: one all-gather for each axis that cuts them, whatever their number.

    Args:
        local: this rank's part of each weight, whole along the data-parallel axes.
        out: receives the whole weights. Every rank of the parameters' own mesh has to call it.
    """
    axes = mesh_axes(tensor_parallel.mesh)
    current = list(local)
    for position in reversed(range(len(axes))):
        placement = tensor_parallel.placements[position]
        if not placement.is_shard():
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]  # a Shard
        axis = axes[position]
        shapes = [_local_shape(tuple(each.shape), tensor_parallel, axes[:position]) for each in out]
        cuts = [_chunks(shape[dim], axis.size) for shape in shapes]
        # The first rank's part is the largest; shorter ones are filled up.
        sizes = [math.prod(shape) // max(shape[dim], 1) * len(cut[0]) for shape, cut in zip(shapes, cuts, strict=True)]
        rows = current[0].new_zeros(axis.size, sum(sizes))
        for tensor, place in zip(current, _spans(sizes), strict=True):
            rows[axis.rank, place.start : place.start + tensor.numel()].copy_(tensor.reshape(-1))
        all_gather_together([Part("all_gather", axis, rows.view(-1), rows[axis.rank])])
        current = [
            torch.cat(_parts(rows[:, place], shape, dim, cut), dim=dim)
            for place, shape, cut in zip(_spans(sizes), shapes, cuts, strict=True)
        ]
    for target, whole in zip(out, current, strict=True):
        target.copy_(whole)


def _local_shape(shape: tuple[int, ...], tensor_parallel: TensorParallel, axes: Sequence[MeshAxis]) -> tuple[int, ...]:
    """Return the shape of this rank's part after the first axes alone have cut a weight."""
    found = list(shape)
    for axis, placement in zip(axes, tensor_parallel.placements, strict=False):
        if placement.is_shard():
            dim: int = placement.dim  # type: ignore[attr-defined]  # a Shard
            found[dim] = len(_chunks(found[dim], axis.size)[axis.rank])
    return tuple(found)


def _chunks(length: int, number: int) -> list[range]:
    """Return what each of ``number`` ranks has of a dim, as ``torch.chunk`` cuts it, with empty ones at the end."""
    size = -(-length // number)
    return [range(min(i * size, length), min((i + 1) * size, length)) for i in range(number)]


def _spans(sizes: Sequence[int]) -> list[slice]:
    spans, start = [], 0
    for size in sizes:
        spans.append(slice(start, start + size))
        start += size
    return spans


def _parts(rows: torch.Tensor, shape: tuple[int, ...], dim: int, cut: Sequence[range]) -> list[torch.Tensor]:
    parts = []
    for row, held in zip(rows, cut, strict=True):
        part = (*shape[:dim], len(held), *shape[dim + 1 :])
        parts.append(row[: math.prod(part)].view(part))
    return parts
