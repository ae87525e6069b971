"""Matrix views: which matrices a parameter consists of, said by the user and never guessed from its shape."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron_fsdp.errors import ConfigError

__all__ = ["MatrixBlock", "MatrixPiece", "MatrixView"]


@dataclass(frozen=True, slots=True)
class MatrixPiece:
    """Elements of one matrix that lie in a row in a flat piece of its parameter.

    Attributes:
        start, numel: of them in the piece. place: of the first one in the flattened matrix.
    """

    start: int
    numel: int
    place: int


@dataclass(frozen=True, slots=True)
class MatrixBlock:
    """One matrix of a parameter with shape (all leading dims, last dim).

    Attributes:
        columns: of both. row_ranges: the matrix's rows, (start, stop) in the parameter, in order.
    """

    columns: int
    row_ranges: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return sum(stop - start for start, stop in self.row_ranges)

    @property
    def numel(self) -> int:
        """Elements of the matrix."""
        return self.rows * self.columns

    def overlap(self, held: range) -> int:
        """Return how many of the matrix's elements are among ``held``, a range of the flattened parameter."""
        return sum(piece.numel for piece in self.pieces(held))

    def pieces(self, held: range) -> Iterator[MatrixPiece]:
        """Yield the matrix's elements among ``held``, a range of the flattened parameter.

        They come in the order of the matrix's rows; positions count from the first element of ``held``.
        """
        place = 0
        for start, stop in self.row_ranges:
            begin = start * self.columns
            first, last = max(begin, held.start), min(stop * self.columns, held.stop)
            if first < last:
                yield MatrixPiece(first - held.start, last - first, place + first - begin)
            place += (stop - start) * self.columns


@dataclass(frozen=True, slots=True)
class MatrixView:
    """The matrices in a parameter. By default a 2-D parameter is one matrix.

    A parameter of shape (d1, ..., dk, rows, columns) with ``batch_dims=k`` is d1 x ... x dk matrices, such as the
    experts of a layer. Each of them may be cut further into blocks of rows.

    Attributes:
        batch_dims: leading dims that count matrices.
        row_splits: sizes of blocks of rows that are matrices by themselves, repeated as often as the rows allow:
            ``(head_dim,)`` makes a matrix of every head of a query projection, ``(inner, inner)`` two of a fused gate
            and up projection.
        is_joined: the blocks of one position of all repetitions are one matrix: with Megatron's interleaved
            ``row_splits=(q, k, v)`` all query rows together, all keys, all values.

    Example:
        view = MatrixView(batch_dims=1)  # (experts, rows, columns): each expert is a matrix
        groups = muon_param_groups(model, views={"blocks.*.linear.weight": MatrixView()})
        optimizer = Muon(groups, lr=0.02)
    """

    batch_dims: int = 0
    row_splits: tuple[int, ...] = ()
    is_joined: bool = False

    @classmethod
    def of(cls, given: MatrixView | Mapping[str, Any] | None) -> MatrixView:
        """Return a view from itself, from what ``to_plain`` returned, or the default for None.

        Raises:
            ConfigError: unknown keys, or sizes that are none.
        """
        if isinstance(given, MatrixView):
            return given
        plain = dict(given or {})
        known = {field.name for field in fields(cls)}
        if plain.keys() - known:
            raise ConfigError(f"matrix view: unknown {sorted(plain.keys() - known)}. fix: give some of {sorted(known)}")
        plain["row_splits"] = tuple(plain.get("row_splits") or ())
        if any(size < 1 for size in plain["row_splits"]):
            raise ConfigError(
                f"matrix view: row_splits={plain['row_splits']} has a size below 1. fix: give sizes of at least 1"
            )
        return cls(**plain)

    def to_plain(self) -> dict[str, Any]:
        """Return the view as a dictionary of numbers, which param groups and checkpoints hold."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def blocks(self, shape: Sequence[int], name: str) -> tuple[MatrixBlock, ...]:
        """Return the matrices of a parameter.

        Args:
            shape: of the whole parameter, as the user sees it. name: of the parameter, for messages.
        Raises:
            ConfigError: the shape has other dims than the view, or sizes that the splits do not divide.
        """
        shape = tuple(shape)
        if len(shape) != self.batch_dims + 2:
            raise ConfigError(
                f"Muon: {name} has shape {shape}, and its view wants {self.batch_dims} batch dims and a matrix. "
                + _fix_for(shape)
            )
        rows, columns = shape[-2:]
        count = math.prod(shape[:-2])
        row_pieces = _pieces(rows, self.row_splits, f"Muon: {name} of shape {shape}: row_splits")
        period = max(len(self.row_splits), 1)
        joined = [tuple(row_pieces[position::period]) for position in range(period)]
        merged = joined if self.is_joined else [(piece,) for piece in row_pieces]
        return tuple(
            MatrixBlock(columns, tuple((start + offset, stop + offset) for start, stop in ranges))
            for offset in range(0, count * rows, max(rows, 1))
            for ranges in merged
            if rows and columns
        )


def _fix_for(shape: Sequence[int]) -> str:
    if len(shape) < 2:
        return "fix: put biases, norms and gains in a param group with use_muon=False, which AdamW steps"
    if len(shape) == 2:
        return "fix: leave the view of a plain matrix out"
    return (
        f"fix: say which dims count matrices, view=MatrixView(batch_dims={len(shape) - 2}) for experts in front, or "
        "put it in a param group with use_muon=False"
    )


def _pieces(length: int, sizes: Sequence[int], what: str) -> list[tuple[int, int]]:
    if not sizes:
        return [(0, length)]
    if length % sum(sizes):
        raise ConfigError(
            f"{what}={tuple(sizes)} add up to {sum(sizes)}, which does not divide {length}. fix: give "
            f"sizes whose sum divides {length}"
        )
    bounds = list(itertools.accumulate(tuple(sizes) * (length // sum(sizes)), initial=0))
    return list(itertools.pairwise(bounds))
