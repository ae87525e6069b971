"""Comparison: two files of rows side by side, with a verdict only where the measurements bear one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, read_rows, table

__all__ = ["Verdict", "compare", "comparison_text"]

# Timings of fewer repeats say too little about their own spread.
_FEWEST_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one quantity changed.

    Attributes:
        key: see ``Row.key``.
        before, after: medians.
        word: ``better``, ``worse``, ``same``, or why there is no verdict.
    """

    key: str
    before: float
    after: float
    unit: str
    word: str

    @property
    def ratio(self) -> float:
        """``after`` over ``before``."""
        return self.after / self.before if self.before else float("inf") if self.after else 1.0


def compare(before: Sequence[Row], after: Sequence[Row], *, is_same_machine: bool = True) -> list[Verdict]:
    """Return a verdict for every quantity that both have measured, in the order of ``before``."""
    newer = {row.key: row for row in after}
    return [
        Verdict(
            row.key,
            row.samples.median,
            newer[row.key].samples.median,
            row.unit,
            _word(row, newer[row.key], is_same_machine),
        )
        for row in before
        if row.key in newer
    ]


def _word(before: Row, after: Row, is_same_machine: bool) -> str:
    old, new = before.samples, after.samples
    if before.is_exact and after.is_exact:
        if old.median == new.median:
            return "same"
        return "better" if (new.median > old.median) == before.higher_is_better else "worse"
    if not is_same_machine:
        return "no verdict: other machine"
    if min(len(old.values), len(new.values)) < _FEWEST_SAMPLES:
        return "no verdict: too few samples"
    if new.low <= old.high and old.low <= new.high:
        return "no verdict: within the spread"
    return "better" if (new.median > old.median) == before.higher_is_better else "worse"


def comparison_text(before: Path, after: Path) -> str:
    """Return the comparison of two files as a table, with a note where they were measured in different places."""
    old_environment, old = read_rows(before)
    new_environment, new = read_rows(after)
    is_same = old_environment["machine"] == new_environment["machine"]
    lines = [f"{name}: {_changed(old_environment[name], new_environment[name])}" for name in ("commit", "versions")]
    if not is_same:
        lines.append("measured on different machines: only exact quantities are compared")
    verdicts = compare(old, new, is_same_machine=is_same)
    if not verdicts:
        return "\n".join([*lines, "no quantity is in both files"])
    cells = [["quantity", "before", "after", "unit", "ratio", "verdict"]]
    cells += [
        [
            verdict.key,
            f"{verdict.before:.4g}",
            f"{verdict.after:.4g}",
            verdict.unit,
            f"{verdict.ratio:.3f}",
            verdict.word,
        ]
        for verdict in verdicts
    ]
    return "\n".join([*lines, table(cells)])


def _changed(before: Any, after: Any) -> str:
    return f"{before}" if before == after else f"{before} -> {after}"
