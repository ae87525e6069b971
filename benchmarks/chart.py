"""A chart of ratios: one bar for each, its spread as a whisker, and a line where both sides are equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Row

__all__ = ["draw", "ratios"]


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that compare two things: those without a unit."""
    return [row for row in rows if not row.unit]


def draw(rows: Sequence[Row], path: Path) -> int:
    """Write the ratios among the rows as a PNG, and return how many there are; nothing is written where there are none.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    shown = ratios(rows)
    if not shown:
        return 0
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.2 + 0.28 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    positions = range(len(shown))
    medians = [row.samples.median for row in shown]
    below = [max(row.samples.median - row.samples.low, 0.0) for row in shown]
    above = [max(row.samples.high - row.samples.median, 0.0) for row in shown]
    axes.barh(positions, medians, xerr=(below, above), height=0.7, color="#4c72b0", ecolor="#333333")
    axes.axvline(1.0, color="#c44e52", linewidth=1)
    axes.set_yticks(positions, [row.key.partition(": ")[2] for row in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ratio (median, quartiles)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return len(shown)
