"""Picture: draw a rank's memory by category and the timeline of a step with its exposed communication."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.formatting import format_bytes, format_seconds
from megatron_fsdp.virtual.playback import Playback, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LANES", "Bar", "draw", "save", "time_line"]

LANES = ("gather lane", "compute", "reduce lane")
"""The streams of a step, from top to bottom of the picture."""

_COLOURS = {
    "all-gather": "#7aa6d8",
    "forward": "#9ccb8b",
    "backward": "#e8b26a",
    "copy": "#b9a7d6",
    "waits": "#d0342c",
    "reduce-scatter": "#d98a8a",
    "AdamW": "#8d8d8d",
}
_MEMORY_COLOURS = ("#4c78a8", "#9ecae9", "#f58518", "#ffbf79", "#54a24b", "#88d27a", "#b79a20", "#bab0ac")
# Bars with a gap below this share of the step are drawn as one, which keeps the file small.
_FINEST = 1 / 2000


@dataclass(frozen=True, slots=True)
class Bar:
    """One kind of work of one unit on one stream, from ``start`` to ``end`` in seconds since the step began.

    Attributes:
        kind: "all-gather", "forward", "backward", "copy", "waits" (compute waits for communication), "reduce-scatter"
            or "AdamW".
    """

    lane: str
    kind: str
    unit: str
    start: float
    end: float


def time_line(played: Playback) -> list[Bar]:
    """Return the bars of a step in time order; adjacent bars of the same kind and unit are merged."""
    found = [Bar(run.stream, _kind(run), _unit(run), run.start, run.end) for run in played.runs]
    found += [
        Bar("compute", "waits", stall.unit, stall.start, stall.start + stall.seconds)
        for stall in played.stalls
        if stall.stream == "compute"
    ]
    last: dict[str, int] = {}
    merged: list[Bar] = []
    for bar in sorted(found, key=lambda bar: (bar.start, bar.end)):
        before = merged[last[bar.lane]] if bar.lane in last else None
        gap = float("inf") if before is None else bar.start - before.end
        if before is not None and (before.kind, before.unit) == (bar.kind, bar.unit) and gap < _FINEST * played.seconds:
            merged[last[bar.lane]] = replace(before, end=max(before.end, bar.end))
        else:
            last[bar.lane] = len(merged)
            merged.append(bar)
    return merged


def _kind(run: Run) -> str:
    if run.stream == "gather lane":
        return "all-gather"
    if run.stream == "reduce lane":
        return "reduce-scatter"
    if run.work.ranks:
        return "waits"
    if run.work.kind == "memory":
        return "copy"
    return "forward" if run.work.name == "forward" else "backward"


def _unit(run: Run) -> str:
    """Return the unit that the work is for; a lane works ahead of or behind the unit that computes."""
    return run.work.label.partition(" of ")[2] or run.unit


def draw(title: str, memory: Mapping[str, int], bars: Sequence[Bar], seconds: float, adamw: float = 0.0) -> Figure:
    """Return a figure: the memory of one rank by category on top, the timeline of its step below.

    Args:
        memory: bytes by category. bars: the bars of forward and backward. seconds: their duration. adamw: seconds of
            the optimizer step that follows.
    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib, which is not installed. fix: pip install matplotlib") from error
    figure = Figure(figsize=(11, 5), dpi=110, layout="constrained")
    # Jupyter displays a figure made without pyplot only through this method.
    vars(figure)["_repr_png_"] = partial(_png, figure)
    figure.suptitle(title, fontsize=11)
    above, below = figure.subplots(2, 1, height_ratios=(1, 2.2))
    _draw_memory(above, memory)
    steps = [*bars, *([Bar("compute", "AdamW", "", seconds, seconds + adamw)] if adamw else [])]
    _draw_time(below, steps, seconds + adamw)
    return figure


def save(figure: Figure, path: str | PathLike[str]) -> None:
    """Write a figure to a file; its name gives the format: .png, .svg or .pdf.

    ConfigError: the file cannot be written, or matplotlib does not support the format.
    """
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the picture could not be written to {str(path)!r}: {error}. fix: name a file that ends with .png in a "
            f"folder that exists"
        ) from error


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _draw_memory(axes: Axes, memory: Mapping[str, int]) -> None:
    """Draw one horizontal bar, divided by category."""
    left = 0.0
    for position, (name, size) in enumerate((name, size) for name, size in memory.items() if size > 0):
        colour = _MEMORY_COLOURS[position % len(_MEMORY_COLOURS)]
        axes.barh([0], [size], left=left, color=colour, edgecolor="white", label=f"{name}, {format_bytes(size)}")
        left += size
    axes.set_title(f"Memory of one rank: {format_bytes(int(left))} at the highest", loc="left", fontsize=10)
    axes.set_xlim(0, left or 1)
    axes.set_axis_off()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.05), ncols=4, frameon=False, fontsize=8)


def _draw_time(axes: Axes, bars: Sequence[Bar], seconds: float) -> None:
    """Draw one row per stream."""
    lanes = [lane for lane in LANES if any(bar.lane == lane for bar in bars)]
    for kind, colour in _COLOURS.items():
        for lane in lanes:
            spans = [
                (1e3 * bar.start, 1e3 * (bar.end - bar.start)) for bar in bars if (bar.lane, bar.kind) == (lane, kind)
            ]
            if spans:
                style: dict[str, Any] = {"label": kind} if kind not in _labels(axes) else {}
                axes.broken_barh(spans, (-lanes.index(lane) - 0.35, 0.7), facecolors=colour, **style)
    waited = sum(bar.end - bar.start for bar in bars if bar.kind == "waits")
    share = waited / seconds if seconds else 0.0
    words = f"{format_seconds(seconds)} predicted, exposed communication {format_seconds(waited)} ({share:.1%})"
    axes.set_title(f"One step: {words}", loc="left", fontsize=10)
    axes.set_yticks([-position for position in range(len(lanes))], lanes)
    axes.set_xlim(0, 1e3 * seconds or 1)
    axes.set_xlabel("ms")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=len(_COLOURS), frameon=False, fontsize=8)


def _labels(axes: Axes) -> list[str]:
    return [str(label) for label in axes.get_legend_handles_labels()[1]]
