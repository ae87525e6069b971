"""TransferLayout: which rank holds which bytes of a flat space that contains every tensor of a model once."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp.errors import TransferError
from megatron_fsdp.formatting import rank_list
from megatron_fsdp.transfer.bucket import BucketEntry

__all__ = ["Parts", "TransferLayout"]

ALIGNMENT = 64
"""Tensors of a flat space start at multiples of this many bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The bytes of a flat space that one rank holds.

    In that rank's memory they follow one another without gaps, in this order.

    Attributes:
        starts, stops: of each part, 1-D int64; parts ascend, are not empty and do not overlap.
    """

    starts: torch.Tensor
    stops: torch.Tensor

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]] | torch.Tensor) -> Parts:
        """Make parts from (start, stop) pairs, in any order; drop empty ones.

        Raises:
            TransferError: two of them overlap.
        """
        pairs = ranges if isinstance(ranges, torch.Tensor) else torch.tensor(list(ranges), dtype=torch.int64)
        pairs = pairs.reshape(-1, 2)
        pairs = pairs[pairs[:, 0] < pairs[:, 1]]
        pairs = pairs[pairs[:, 0].argsort(stable=True)]
        starts, stops = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
        if bool((starts[1:] < stops[:-1]).any()):
            place = int((starts[1:] < stops[:-1]).nonzero()[0])
            raise TransferError(
                f"a rank holds bytes {int(starts[place + 1])} to {int(stops[place])} of the flat space twice. fix: "
                "give parts that do not overlap"
            )
        return cls(starts, stops)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return int((self.stops - self.starts).sum())

    def local_offsets(self) -> torch.Tensor:
        """Return where each part starts in the rank's memory, 1-D int64."""
        lengths = self.stops - self.starts
        return lengths.cumsum(0) - lengths


@dataclass(frozen=True, slots=True, eq=False)
class TransferLayout:
    """Which rank holds which bytes of the flat space. ``plan_transfer`` plans the way from one layout to another.

    Attributes:
        num_bytes: of the flat space.
        parts: what each rank holds, by rank; a rank that is not named holds nothing.
        tensors: the tensors of the flat space with their places, by offset; empty where only bytes are planned.

    Example:
        halves = TransferLayout.of_ranges(8, {0: [(0, 4)], 1: [(4, 8)]})
        swapped = TransferLayout.of_ranges(8, {0: [(4, 8)], 1: [(0, 4)]})
        print(plan_transfer(halves, swapped))  # 4 bytes each way
    """

    num_bytes: int
    parts: Mapping[int, Parts]
    tensors: tuple[BucketEntry, ...] = ()

    @classmethod
    def of_ranges(cls, num_bytes: int, ranges: Mapping[int, Iterable[tuple[int, int]]]) -> TransferLayout:
        """Return the layout of (start, stop) pairs of bytes for each rank.

        Raises:
            TransferError: ranges of one rank overlap, or lie outside of the flat space.
        """
        parts = {rank: Parts.of(pairs) for rank, pairs in sorted(ranges.items())}
        for rank, each in parts.items():
            if len(each.starts) and (int(each.starts[0]) < 0 or int(each.stops[-1]) > num_bytes):
                raise TransferError(
                    f"rank {rank} holds bytes {int(each.starts[0])} to {int(each.stops[-1])} of a flat space of "
                    f"{num_bytes} bytes. fix: give ranges inside of it"
                )
        return cls(num_bytes, parts)

    @classmethod
    def sliced(
        cls,
        tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
        ranks: Sequence[int],
        dims: Mapping[str, int | None] | None = None,
    ) -> TransferLayout:
        """Return the layout of an inference engine whose ranks cut tensors as ``torch.chunk`` does, or hold them whole.

        Args:
            tensors: name, dtype and shape of each, as ``WeightStream.metadata()`` returns them.
            ranks: of the engine, in the order of their slices.
            dims: the dimension along which a tensor is cut, by name; a tensor without one is whole on each rank.
        Raises:
            TransferError: a name is unknown, or a tensor has no such dimension.
        """
        table = place_tensors(tensors)
        known = {entry.name: entry for entry in table}
        for name, dim in (dims or {}).items():
            if name not in known or (dim is not None and not -len(known[name].shape) <= dim < len(known[name].shape)):
                found = f"its shape is {known[name].shape}" if name in known else "there is no tensor of that name"
                raise TransferError(
                    f"TransferLayout.sliced(dims={{{name!r}: {dim}}}): {found}. fix: give names of `tensors`, and a "
                    "dimension that the tensor has"
                )
        parts = {}
        for position, rank in enumerate(ranks):
            found_here = []
            for entry in table:
                dim = (dims or {}).get(entry.name)
                box = [range(size) for size in entry.shape]
                if dim is not None:
                    length = -(-entry.shape[dim] // len(ranks))
                    ends = (min(place * length, entry.shape[dim]) for place in (position, position + 1))
                    box[dim] = range(*ends)
                found_here.append(box_ranges(entry, box))
            parts[rank] = Parts.of(torch.cat(found_here) if found_here else [])
        return cls(size_of(table), dict(sorted(parts.items())), table)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold anything, ascending."""
        return tuple(sorted(rank for rank, each in self.parts.items() if len(each.starts)))

    def without(self, ranks: Collection[int]) -> TransferLayout:
        """Return the layout that remains when ``ranks`` are lost."""
        kept = {rank: each for rank, each in self.parts.items() if rank not in set(ranks)}
        return TransferLayout(self.num_bytes, kept, self.tensors)

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return the name, dtype and shape of each tensor, as ``WeightStream.metadata()`` does."""
        return [(entry.name, entry.dtype, entry.shape) for entry in self.tensors]

    def tensor_at(self, byte: int) -> str:
        """Return words for a byte of the flat space: the name of its tensor, and the place in it."""
        for entry in self.tensors:
            if entry.offset <= byte < entry.offset + entry.num_bytes:
                return f"tensor {entry.name!r}, byte {byte - entry.offset} of {entry.num_bytes}"
        return f"byte {byte} of the flat space"

    def __repr__(self) -> str:
        return f"TransferLayout({self.num_bytes} bytes over {rank_list(self.parts) if self.parts else 'no rank'})"


def place_tensors(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> tuple[BucketEntry, ...]:
    """Return the tensors one after the other in a flat space, each at a multiple of 64 bytes."""
    placed, offset = [], 0
    for name, dtype, shape in tensors:
        placed.append(BucketEntry(name, dtype, tuple(shape), offset))
        offset += -(-placed[-1].num_bytes // ALIGNMENT) * ALIGNMENT
    return tuple(placed)


def size_of(tensors: Sequence[BucketEntry]) -> int:
    """Return the bytes of the flat space of some tensors."""
    return max((-(-(each.offset + each.num_bytes) // ALIGNMENT) * ALIGNMENT for each in tensors), default=0)


def box_ranges(entry: BucketEntry, box: Sequence[range], held: range | None = None) -> torch.Tensor:
    """Return the (start, stop) pairs, (n, 2), of a box of a tensor, in memory order.

    Args:
        box: which indices of each dimension. held: which elements of the flattened box; None: all of them.
    """
    shape, size = entry.shape, entry.dtype.itemsize
    held = range(math.prod(map(len, box))) if held is None else held
    if not len(held):
        return torch.empty(0, 2, dtype=torch.int64)
    # Dimensions behind the last one that is cut are contiguous.
    cut = max((dim for dim, part in enumerate(box) if len(part) < shape[dim]), default=0)
    inner = math.prod(shape[cut + 1 :])
    length = (len(box[cut]) if box else 1) * inner
    starts = torch.zeros(1, dtype=torch.int64)
    for dim, part in enumerate(box[: cut + 1]):
        places = torch.tensor([part.start]) if dim == cut else torch.arange(part.start, part.stop)
        starts = (starts[:, None] + places * math.prod(shape[dim + 1 :])).reshape(-1)
    first, last = held.start // length, (held.stop - 1) // length + 1
    starts = starts[first:last]
    stops = starts + length
    stops[-1] -= last * length - held.stop
    starts = starts.clone()
    starts[0] += held.start - first * length
    return torch.stack([starts, stops], dim=1) * size + entry.offset
