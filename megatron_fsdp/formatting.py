"""How amounts are written for people: bytes, counts, seconds, tables and lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Bar", "Span", "Table", "format_bytes", "format_count", "format_seconds", "listing", "rank_list"]

_MARKS = 40


class Span(NamedTuple):
    """A piece of a bar: from where to where, what it is, and the number of its colour."""

    start: float
    stop: float
    title: str
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Bar:
    """A cell of spans, on a scale from 0 to ``end``; ``str()`` has 40 marks for it."""

    spans: Sequence[Span]
    end: float

    def __str__(self) -> str:
        marks = [" "] * _MARKS
        for span in self.spans:
            # What is there at all takes at least one mark.
            first = min(round(_MARKS * span.start / self.end), _MARKS - 1)
            stop = max(round(_MARKS * span.stop / self.end), first + 1) if span.stop > span.start else first
            marks[first:stop] = "#+=*.:%"[span.colour % 7] * (stop - first)
        return "".join(marks)


@dataclass(frozen=True, slots=True)
class Table:
    """A table for a terminal (``lines``) or a page.

    Attributes:
        rows: cells; the first row holds the headings.
        num_left: how many columns are flush left; the others hold amounts.
        has_note: the last column is text, flush left.
        title: a line above it, "" for none.
    """

    rows: Sequence[Sequence[str | Bar]]
    num_left: int = 1
    has_note: bool = False
    title: str = ""

    def is_left(self, column: int) -> bool:
        """Whether a column is flush left."""
        return column < self.num_left or (self.has_note and column == len(self.rows[0]) - 1)

    def lines(self) -> list[str]:
        """Return the title, if any, and the rows with columns of equal width; or that there are none."""
        if len(self.rows) == 1:
            return [f"{self.title or self.rows[0][0]}: none"]
        texts = [[str(cell) for cell in row] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        rows = [
            "  ".join(
                cell.ljust(width) if self.is_left(column) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in texts
        ]
        return [self.title, *rows] if self.title else rows


def listing(title: str, entries: Iterable[str]) -> Table:
    """Return a table of one column."""
    return Table([(title,), *((f"- {entry}",) for entry in entries)])


def format_bytes(num_bytes: int) -> str:
    """Return bytes in the largest of B, KiB, MiB, GiB, TiB of which there is at least one: ``1.50 KiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_count(count: int) -> str:
    """Return a number of parameters with four digits: ``8.030 B``."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return str(count)


def format_seconds(seconds: float) -> str:
    """Return seconds as s, ms or us, three digits."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}" if seconds / size < 1000 else f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def rank_list(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"
