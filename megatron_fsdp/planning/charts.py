"""Charts of a plan: memory, bytes of each unit, timeline of a step. Bars in rows, drawn as SVG or by matplotlib."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.formatting import format_bytes, format_seconds
from megatron_fsdp.planning.cost_model import played_microbatches
from megatron_fsdp.planning.estimate import MemoryPart, Projection
from megatron_fsdp.planning.unit_report import UnitReport

__all__ = ["Chart", "draw_png", "memory_chart", "svg", "timeline", "unit_chart"]

# Okabe and Ito's palette, told apart by colour-blind readers too.
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#999999")
_SHADE = "#f3c9c0"
_LABEL, _WIDTH, _ROW = 250, 820, 24


class Bar(NamedTuple):
    """A piece of a row, in the chart's unit. ``text`` is written where there is room for it."""

    start: float
    stop: float
    colour: str
    title: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars in rows, over one scale.

    Attributes:
        title: what it shows, with its total. rows: each with its name. legend: names with colours.
        words: how an amount is written. marks: lines through all rows, with what they say. shades: behind all rows.
        caption: what to know of it.
    """

    title: str
    rows: Sequence[tuple[str, Sequence[Bar]]]
    legend: Sequence[tuple[str, str]]
    words: Callable[[float], str]
    marks: Sequence[tuple[float, str]] = ()
    shades: Sequence[tuple[float, float, str]] = ()
    caption: str = ""

    @property
    def end(self) -> float:
        """The right end of its scale."""
        stops = [bar.stop for _, bars in self.rows for bar in bars]
        return max([*stops, *(at for at, _ in self.marks)], default=0.0) or 1.0

    def ticks(self) -> Iterator[float]:
        """Yield round amounts from 0, at most ten of them."""
        power = 10 ** math.floor(math.log10(self.end))
        step = next((size for size in (power / 10, power / 5, power / 2) if self.end / size <= 9), power)
        return (number * step for number in range(int(self.end / step) + 1))


# ---------------------------------------------------------------------- what they show


def memory_chart(parts: Sequence[MemoryPart], limit_bytes: int | None) -> Chart:
    """Return one stacked bar of a rank's memory, and a line at the limit."""
    bars, legend, start = [], [], 0
    for part, colour in zip(parts, _COLOURS, strict=False):
        label = f"{part.name}: {_bytes(part.num_bytes) if part.is_known else 'not known'}"
        bars.append(Bar(start, start + part.num_bytes, colour, label))
        legend.append((label, colour))
        start += part.num_bytes
    marks = [] if limit_bytes is None else [(float(limit_bytes), f"limit {_bytes(limit_bytes)}")]
    return Chart(f"memory of one rank, {_bytes(start)}", [("one rank", bars)], legend, _bytes, marks)


def unit_chart(units: Sequence[tuple[str, UnitReport]]) -> Chart:
    """Return what each kind of unit takes on one rank: at rest, gathered and packed."""
    kinds = (("at rest", _COLOURS[0]), ("gathered", _COLOURS[3]), ("packed", _COLOURS[2]))
    rows = []
    for name, unit in units:
        gathered, packed = (unit.transient_bytes(kind) for kind in ("gathered weights", "packed gradients"))
        for number, (size, (kind, colour)) in enumerate(
            zip((unit.persistent_bytes, gathered, packed), kinds, strict=True)
        ):
            label = _bytes(size)
            rows.append(("" if number else name, [Bar(0, size, colour, f"{name}, {kind}: {label}", label)]))
    return Chart("bytes of each unit on one rank", rows, kinds, _bytes)


def timeline(projection: Projection) -> Chart:
    """Return the lanes of the engine's step; what no compute hides is shaded."""
    played = played_microbatches(projection.played, projection.setup.workload, projection.setup.hardware)
    lanes: dict[str, list[Bar]] = {"gathers": [], "compute": [], "reductions": []}
    for run in sorted(played.runs, key=lambda run: run.start):
        if run.end == run.start:
            continue
        if run.work.ranks:
            is_gather = run.work.kind == "all_gather"
            bars, name, colour = (
                lanes["gathers" if is_gather else "reductions"],
                run.work.label,
                _COLOURS[3 - is_gather],
            )
            bars.append(_span(run.start, run.end, colour, name or run.work.name))
        elif run.stream == "compute" and run.work.kind != "memory":
            phase = "forward" if run.work.name == "forward" else "backward"
            bars, name = lanes["compute"], f"{run.unit}, {phase}"
            # What a unit computes without a gap is one bar.
            start = run.start
            if bars and bars[-1].text == name and start - bars[-1].stop < 1e-5:
                start = bars.pop().start
            bars.append(_span(start, run.end, _COLOURS[phase == "forward"], name))
    total = played.seconds + projection.time.optimizer
    lanes["compute"].append(_span(played.seconds, total, _COLOURS[5], "optimizer"))
    shades = []
    for before, after in zip([Bar(0, 0, "", ""), *lanes["compute"]], lanes["compute"], strict=False):
        if after.start - before.stop > 1e-4 * total:
            hidden = f"not hidden: {format_seconds(after.start - before.stop)}"
            shades.append((before.stop, after.start, hidden))
    legend = [("forward", _COLOURS[1]), ("backward", _COLOURS[0]), ("gathers", _COLOURS[2]), ("not hidden", _SHADE)]
    title = f"timeline of a step, {format_seconds(total)}"
    return Chart(title, list(lanes.items()), legend, format_seconds, (), shades, _timeline_caption(projection))


def _span(start: float, stop: float, colour: str, name: str) -> Bar:
    return Bar(start, stop, colour, f"{name}: {format_seconds(stop - start)}", name)


def _timeline_caption(projection: Projection) -> str:
    time = projection.time
    count = min(projection.setup.workload.num_microbatches, 3)
    left_out = time.model_parallel + time.bubble
    beside = f" Not drawn: collectives inside the model and waiting for stages, {format_seconds(left_out)}."
    return (
        f"A step of {count} microbatch{'es' * (count > 1)} as the engine does it. Of a whole step no compute hides "
        f"{format_seconds(time.exposed)} of communication.{beside if left_out else ''}"
    )


def _bytes(amount: float) -> str:
    return format_bytes(int(amount))


# ---------------------------------------------------------------------- how they are drawn


def svg(chart: Chart) -> str:
    """Return a chart as SVG, which a browser draws without anything else."""
    scale, bottom = _WIDTH / chart.end, len(chart.rows) * _ROW
    shapes = []
    for start, stop, title in chart.shades:
        shapes.append(_rect(_LABEL + start * scale, 0, (stop - start) * scale, bottom, _SHADE, title))
    for row, (name, bars) in enumerate(chart.rows):
        top = row * _ROW
        shapes.append(_text(_LABEL - 8, top + 16, name, "end"))
        for bar in bars:
            left, width = _LABEL + bar.start * scale, (bar.stop - bar.start) * scale
            shapes.append(_rect(left, top + 3, width, _ROW - 6, bar.colour, bar.title))
            if bar.text and (width > 7 * len(bar.text) or len(bars) == 1):
                shapes.append(_text(left + (4 if len(bars) > 1 else width + 6), top + 16, bar.text))
    for at, words in [*((tick, chart.words(tick) if tick else "0") for tick in chart.ticks()), *chart.marks]:
        left, is_mark = _LABEL + at * scale, (at, words) in chart.marks
        top = 0 if is_mark else bottom
        line = f'x1="{left:.2f}" y1="{top}" x2="{left:.2f}" y2="{bottom + 6}"'
        shapes.append(f'<line {line} stroke="#000" stroke-width="{1 + is_mark}"/>')
        shapes.append(_text(left, bottom + (36 if is_mark else 20), words, "middle"))
    for number, (name, colour) in enumerate(chart.legend):
        left, top = _LABEL + 280 * (number % 3), bottom + 46 + _ROW * (number // 3)
        shapes += [_rect(left, top, 14, 14, colour, name), _text(left + 22, top + 12, name)]
    height = bottom + 46 + _ROW * -(-len(chart.legend) // 3)
    width = _LABEL + _WIDTH + 90
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" font-size="13" '
        f'aria-label="{html.escape(chart.title)}">\n' + "\n".join(shapes) + "\n</svg>"
    )


def _rect(left: float, top: float, width: float, height: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{height}" fill="{colour}">'
        f"<title>{html.escape(title)}</title></rect>"
    )


def _text(left: float, baseline: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{left:.2f}" y="{baseline}" text-anchor="{anchor}">{html.escape(text)}</text>'


def draw_png(path: str, chart: Chart, title: str) -> None:
    """Draw a chart into a file.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            "--png needs matplotlib: pip install 'megatron-fsdp-dbuffer[examples]'; --html draws without it"
        ) from error
    figure = Figure(figsize=(10, 2.9 + 0.3 * len(chart.rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, (_, bars) in enumerate(chart.rows):
        for bar in bars:
            axes.barh(-row, bar.stop - bar.start, left=bar.start, color=bar.colour)
    for at, words in chart.marks:
        axes.axvline(at, color="black", label=words)
    axes.set_title(title, fontsize=10)
    axes.set_yticks([-row for row in range(len(chart.rows))], [name for name, _ in chart.rows])
    ticks = list(chart.ticks())
    axes.set_xticks(ticks, [chart.words(tick) for tick in ticks])
    patches = [Patch(color=colour, label=name) for name, colour in chart.legend]
    figure.legend(handles=[*patches, *axes.get_lines()], loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)
