"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# With all else that is loaded at the start, not at the first picture: what is resident then stays what it is.
import matplotlib.backends.backend_agg  # noqa: F401

# Figure alone, without pyplot: it draws with the Agg renderer and keeps no global state, so no display is needed.
from matplotlib.figure import Figure
from PIL import Image

Image.preinit()


def draw_loss_curve(rows: Sequence[dict[str, Any]], path: Path, *, unit: str = "byte") -> None:
    """Write a PNG of training and validation loss over the iterations.

    Args:
        rows: the rows of the JSONL log; those with ``lm_loss`` are training, those with ``validation_loss`` validation.
        path: where the PNG goes; an existing one is replaced.
        unit: what a token is.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for key, label, style in (("lm_loss", "training", "-"), ("validation_loss", "validation, held-out text", "o")):
        points = [(row["iteration"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="iteration", ylabel=f"loss (nats per {unit})", title="GPT language-model loss")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
    figure.savefig(path, dpi=120)


def draw_loss_curves(runs: Mapping[str, Sequence[dict[str, Any]]], path: Path, *, unit: str = "byte") -> None:
    """Write a PNG of training and validation losses of several runs.

    Args:
        runs: the rows of each run's JSONL log, by what to call it.
        path: where the PNG goes; an existing one is replaced. unit: what a token is.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, rows in runs.items():
        color = None
        for key, label, style in (("lm_loss", name, "-"), ("validation_loss", f"{name}, held-out text", "o")):
            points = [(row["iteration"], row[key]) for row in rows if key in row]
            if points:
                (line,) = axes.plot(*zip(*points, strict=True), style, label=label, color=color)
                color = line.get_color()
    axes.set(xlabel="iteration", ylabel=f"loss (nats per {unit})", title="GPT language-model loss")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
    figure.savefig(path, dpi=120)
