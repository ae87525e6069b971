"""How amounts are written for people: bytes, counts, seconds, tables and lists."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Table", "counted", "format_bytes", "format_count", "format_seconds", "listing", "rank_list"]

_LEAST_SECONDS = 1e-9


@dataclass(frozen=True, slots=True)
class Table:
    """A table for a terminal: rows of cells, of which the first has the headings, and a title."""

    rows: Sequence[Sequence[str]]
    title: str = ""

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], title: str = "") -> Table:
        """Return the table of plain data: a key is a column, and its ending says how numbers are written.

        ``held_bytes`` and ``step_seconds`` head columns "held" and "step"; those that a row has not are empty.
        """
        rows = list(rows)
        keys = list(dict.fromkeys(key for row in rows for key in row))
        heads = [re.sub(r"^num_|_bytes$|_seconds$", "", key).replace("_", " ") for key in keys] or [title]
        return cls([heads, *([_written(key, row.get(key, "")) for key in keys] for row in rows)], title)

    def lines(self) -> list[str]:
        """Return the title, if any, and the rows with columns of equal width; or that there are none."""
        if len(self.rows) == 1:
            return [f"{self.title or self.rows[0][0]}: none"]
        columns = []
        for column, cells in enumerate(zip(*self.rows, strict=True)):
            width = max(map(len, cells))
            # Flush left are the first one, and those that are not all numbers.
            is_left = column == 0 or not all(cell in ("", "-") or cell[0].isdigit() for cell in cells[1:])
            columns.append([text.ljust(width) if is_left else text.rjust(width) for text in cells])
        lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
        return [self.title, *lines] if self.title else lines


def _written(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return "x".join(map(str, value))
    if key.endswith("bytes"):
        return format_bytes(value)
    if key.endswith("seconds"):
        return format_seconds(value) if value >= _LEAST_SECONDS else "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}"


def listing(title: str, entries: Iterable[str]) -> Table:
    """Return a table of one column."""
    return Table([(title,), *((f"- {entry}",) for entry in entries)])


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 rank`` or ``1,024 ranks``; ``plural``: the plural of a noun that does not end in s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_bytes(num_bytes: int) -> str:
    """Return bytes in B, KiB, MiB, GiB or TiB, in the largest unit with a value of at least one: ``1.50 KiB``."""
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
    """Return seconds in s, ms or us with three digits; less than a nanosecond is a rounding error and gives ``0 s``."""
    if abs(seconds) < _LEAST_SECONDS:
        return "0 s"
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
