"""How amounts are written for people: bytes, counts, seconds, aligned columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = [
    "aligned",
    "format_bytes",
    "format_count",
    "format_seconds",
    "rank_list",
]


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "0.00%"


def aligned(rows: Sequence[Sequence[str]], num_left: int) -> list[str]:
    """Return rows with columns of equal width; the first ``num_left`` columns are flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if position < num_left else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


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
