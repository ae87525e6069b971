"""Draw the bar charts of docs/performance.md from the rows in benchmarks/results and the table of docs/padding.md.

``python -m benchmarks.performance_page`` writes them; tests/unit/benchmarks fails when one is out of date.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.harness import Row, read_rows

__all__ = ["CHARTS", "Chart", "svg"]

RESULTS = Path(__file__).parent / "results"
PADDING = Path(__file__).parents[1] / "docs" / "padding.md"
COLOURS = ("#3b78b5", "#b5752a", "#5b8f4c")
WIDTH, HEIGHT, LEFT, TOP = 960, 130, 56, 34


@dataclass(frozen=True, slots=True)
class Chart:
    """Groups of bars above a common axis.

    Attributes:
        title: the text above the bars, with the unit of the axis.
        groups: the label below each group; ``\\n`` starts a second line.
        series: the name of each series, with a value per group.
        line: the value of a dashed line, and its label. is_log: whether the axis is logarithmic.
    """

    title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float]]
    line: tuple[float, str] | None = None
    is_log: bool = False

    @property
    def height(self) -> int:
        """The height in pixels: title, bars and labels."""
        return TOP + HEIGHT + 12 + 13 * (1 + max(label.count("\n") for label in self.groups))


def svg(charts: Sequence[Chart]) -> str:
    """Return a picture of charts below one another, with the legend of the first."""
    legend, x = [], LEFT
    for colour, name in zip(COLOURS, charts[0].series, strict=False):
        legend.append(f'<rect x="{x}" y="8" width="11" height="11" fill="{colour}"/>{_text(x + 16, 18, name, "start")}')
        x += 40 + 7 * len(name)
    height = 30 + sum(chart.height for chart in charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        *legend,
    ]
    top = 26 + TOP
    for chart in charts:
        parts += _drawn(chart, top)
        top += chart.height
    return "\n".join([*parts, "</svg>", ""])


def _drawn(chart: Chart, top: int) -> Iterator[str]:
    """Yield the parts of one chart; ``top`` is the upper end of its axis."""
    ticks, height_of = _axis(chart)
    bottom, right = top + HEIGHT, WIDTH - 12
    yield _text(LEFT, top - 12, chart.title, "start", "bold")
    for tick in ticks:
        y = bottom - height_of(tick)
        yield f'<line x1="{LEFT}" y1="{y:.0f}" x2="{right}" y2="{y:.0f}" stroke="#e4e4e4"/>'
        yield _text(LEFT - 6, y + 4, f"{tick:,g}", "end")
    room = (right - LEFT) / len(chart.groups)
    width = min(room * 0.8 / len(chart.series), 46)
    for place, (colour, values) in enumerate(zip(COLOURS, chart.series.values(), strict=False)):
        for group, value in enumerate(values):
            x = LEFT + room * (group + 0.5) + width * (place - len(chart.series) / 2)
            height = max(height_of(value), 1)
            yield (
                f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{width - 1:.1f}" height="{height:.1f}" '
                f'fill="{colour}"/>'
            )
            words = _short(value) if chart.is_log else f"{value:.2f}"
            inside = height > 16
            y = bottom - (6 if inside else height + 3)
            yield _text(x + width / 2, y, words, colour="white" if inside else "black")
    for group, label in enumerate(chart.groups):
        for number, words in enumerate(label.split("\n")):
            yield _text(LEFT + room * (group + 0.5), bottom + 15 + 13 * number, words)
    if chart.line:
        y = bottom - height_of(chart.line[0])
        yield f'<line x1="{LEFT}" y1="{y:.0f}" x2="{right}" y2="{y:.0f}" stroke="#333" stroke-dasharray="5 3"/>'
        yield _text(LEFT + 4, y - 4, chart.line[1], "start")


def _axis(chart: Chart) -> tuple[list[float], Callable[[float], float]]:
    """Return the ticks of the axis, and the height of a value in pixels."""
    values = [value for series in chart.series.values() for value in series]
    if chart.is_log:
        low, high = (math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))))
        scale = HEIGHT / (high - low)
        return [10.0**power for power in range(low, high + 1)], lambda value: scale * (math.log10(value) - low)
    most = max(*values, chart.line[0] if chart.line else 0.0) * 1.12
    step = next(step for step in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0) if most / step <= 6)
    return [step * number for number in range(int(most / step) + 1)], lambda value: HEIGHT * value / most


def _short(value: float) -> str:
    """Return a number of any size in at most five characters."""
    return f"{value / 1000:.2g}k" if value >= 1000 else f"{value:.0f}" if value >= 10 else f"{value:.1g}"


def _text(x: float, y: float, words: str, anchor: str = "middle", weight: str = "normal", colour: str = "black") -> str:
    given = {"text-anchor": anchor, "font-weight": weight, "fill": colour}
    defaults = {"text-anchor": "start", "font-weight": "normal", "fill": "black"}
    style = "".join(f' {name}="{value}"' for name, value in given.items() if value != defaults[name])
    return f'<text x="{x:.0f}" y="{y:.0f}"{style}>{escape(words)}</text>'


# ---------------------------------------------------------------------- charts

_PRECISIONS = ("fp32", "bf16", "bf16, reduced in fp32")


def _rows(name: str) -> list[Row]:
    return read_rows(RESULTS / f"{name}.json")[1]


def _value(rows: Sequence[Row], metric: str, **case: str | int) -> float:
    (row,) = [row for row in rows if row.metric == metric and case.items() <= dict(row.case).items()]
    return row.samples.median


def host_time() -> list[Chart]:
    """Return host time and Python calls that sharding adds to a step, over FSDP2's."""
    rows = _rows("host-null-h200")
    series = {
        words: [_value(rows, f"{metric} over FSDP2's", precision=precision) for precision in _PRECISIONS]
        for words, metric in (("host time", "host time"), ("calls of Python and C functions", "calls"))
    }
    title = "Added by sharding to a step of 12 layers of Llama 3.2 1B's widths, over what FSDP2 adds"
    return [Chart(title, _PRECISIONS, series, (1.0, "FSDP2"))]


def memory() -> list[Chart]:
    """Return memory peaks of a step over FSDP2's."""
    rows = _rows("memory")
    metrics = {
        "forward": "peak in forward",
        "backward": "peak in backward",
        "optimizer's step": "peak in step",
        "at rest": "bytes at rest",
        "whole step": "peak of the whole step with what rests",
    }
    series = {
        precision: [
            _value(rows, f"{metric} over FSDP2's", precision=precision, ranks=64) for metric in metrics.values()
        ]
        for precision in _PRECISIONS
    }
    return [Chart("Peak memory on 64 ranks, over FSDP2's", list(metrics), series, (1.0, "FSDP2"))]


def predicted_step() -> list[Chart]:
    """Return the predicted time of forward and backward over FSDP2's, a chart per model."""
    rows = [row for row in _rows("virtual") if row.metric == "predicted step"]
    names = ("model", "sums", "mesh", "tokens", "engine")
    found = {tuple(row.case[name] for name in names): row.samples.median for row in rows}
    models, all_sums, meshes, tokens = (list(dict.fromkeys(row.case[name] for row in rows)) for name in names[:-1])
    settings = [(mesh, count) for mesh in meshes for count in tokens]
    groups = [f"{count} tokens\n{_gpus(str(mesh))}" for mesh, count in settings]
    charts = []
    for model in models:
        series = {
            f"gradients summed in {sums}": [
                found[model, sums, mesh, count, "ours"] / found[model, sums, mesh, count, "FSDP2"]
                for mesh, count in settings
            ]
            for sums in all_sums
        }
        charts.append(Chart(f"{model}: predicted time over FSDP2's", groups, series, (1.0, "")))
    return charts


def _gpus(mesh: str) -> str:
    return mesh.replace("hsdp", "HSDP") if mesh.startswith("hsdp") else f"{mesh} GPUs"


def padding(shards: int = 1024) -> list[Chart]:
    """Return padding of published models in percent, from the table of docs/padding.md."""
    text = PADDING.read_text(encoding="utf-8")
    lines = re.findall(rf"^\| ([^|]+) \| {shards} \| ([^\n]+) \|$", text, re.MULTILINE)
    cells = {model: [float(cell.strip("< ").replace(",", "")) for cell in rest.split("|")] for model, rest in lines}
    columns = {"this planner (rows or elements)": 1, "dim-0 chunks (FSDP2)": 4, "common multiple": 5}
    # A logarithmic axis has no zero; the table has three digits after the point.
    series = {name: [max(each[column], 0.001) for each in cells.values()] for name, column in columns.items()}
    title = f"Padding on {shards:,} ranks, in % of the parameters (0.001 means at most 0.001)"
    return [Chart(title, list(cells), series, is_log=True)]


CHARTS: Mapping[str, Callable[[], list[Chart]]] = {
    "host_time": host_time,
    "memory": memory,
    "predicted_step": predicted_step,
    "padding": padding,
}
"""What each picture in docs/ shows, by the stem of its file."""
