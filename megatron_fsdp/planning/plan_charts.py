"""Charts of a plan as SVG, which a browser draws without anything else: memory, bytes per unit, timeline of a step."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_fsdp.formatting import format_bytes, format_seconds
from megatron_fsdp.planning.cost_model import played_microbatches
from megatron_fsdp.planning.estimate import MemoryPart, Projection
from megatron_fsdp.planning.plan_text import Folded, folded, unit_names
from megatron_fsdp.planning.played_step import with_names
from megatron_fsdp.planning.report_text import Report

__all__ = ["COLOURS", "memory_svg", "part_label", "timeline_svg", "units_svg"]

# Okabe and Ito's palette, told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#999999")
_WIDTH, _BAR, _ROW = 820, 44, 22
# Of a unit: what rests, its gathered weights, its packed gradients.
_UNIT_BARS = (("at rest", COLOURS[0]), ("gathered", COLOURS[3]), ("packed", COLOURS[2]))
_UNIT_WIDTH = 640
_LANES = {"gather": (18, "gathers"), "compute": (50, "compute"), "reduce": (82, "reductions")}
_LANE_HEIGHT, _LEFT, _TIME_WIDTH = 28, 84, 1100
_SPAN_COLOURS = {
    ("gather", ""): COLOURS[3],
    ("compute", "forward"): COLOURS[1],
    ("compute", "backward"): COLOURS[0],
    ("compute", ""): COLOURS[5],
    ("reduce", ""): COLOURS[2],
}


def memory_svg(projection: Projection, limit_bytes: int | None = None) -> str:
    """Return one stacked bar of a rank's memory with a legend, and a line at the limit."""
    parts = projection.memory
    scale = _WIDTH / max(projection.memory_bytes, limit_bytes or 0, 1)
    shapes, left = [], 0.0
    for part, colour in zip(parts, COLOURS, strict=False):
        width = part.num_bytes * scale
        shapes.append(_rect(left, 0, width, _BAR, colour, part_label(part)))
        left += width
    for row, (part, colour) in enumerate(zip(parts, COLOURS, strict=False)):
        shapes += _legend(0, _BAR + 18 + row * _ROW, colour, part_label(part))
    height = _BAR + 18 + len(parts) * _ROW
    if limit_bytes is not None:
        at = min(limit_bytes * scale, _WIDTH - 1)
        shapes.append(f'<line x1="{at:.2f}" y1="0" x2="{at:.2f}" y2="{_BAR + 8}" stroke="#000" stroke-width="2"/>')
        shapes.append(_text(_WIDTH, _BAR + 30, f"limit {format_bytes(limit_bytes)}", "end"))
    return _svg(_WIDTH, height, f"memory of one rank, {format_bytes(projection.memory_bytes)}", shapes)


def part_label(part: MemoryPart) -> str:
    """Return a part of memory with its size."""
    return f"{part.name}: {format_bytes(part.num_bytes) if part.is_known else 'not known'}"


def units_svg(report: Report) -> str:
    """Return what each kind of unit takes on one rank, as bars of one scale: at rest, gathered and packed."""
    kinds = [(alike, _unit_bytes(alike)) for alike in folded(report) if alike.unit.groups]
    most = max((size for _, sizes in kinds for size in sizes), default=0)
    scale = _UNIT_WIDTH / max(most, 1)
    shapes = []
    for number, (name, colour) in enumerate(_UNIT_BARS):
        shapes += _legend(130 * number, 0, colour, name)
    top = 30
    for alike, sizes in kinds:
        count = len(alike.names)
        shapes.append(_text(0, top + 12, unit_names(alike.names) + (", each" if count > 1 else "")))
        for size, (name, colour) in zip(sizes, _UNIT_BARS, strict=True):
            top += 16
            label = format_bytes(size)
            shapes.append(_rect(0, top + 2, size * scale, 12, colour, f"{alike.names[0]}, {name}: {label}"))
            shapes.append(_text(size * scale + 6, top + 12, label))
        top += 26
    return _svg(_WIDTH, top, "bytes of each unit on one rank", shapes)


def _unit_bytes(alike: Folded) -> tuple[int, int, int]:
    unit = alike.unit
    return (
        unit.persistent_bytes,
        unit.transient_bytes("gathered weights"),
        unit.transient_bytes("packed gradients"),
    )


@dataclass(frozen=True, slots=True)
class _Span:
    """What a lane does for one unit, in seconds; ``phase``: "forward", "backward", or none of the two."""

    lane: str
    name: str
    phase: str
    start: float
    stop: float


def timeline_svg(projection: Projection) -> str:
    """Return the lanes of the engine's step, with few of the layers that are alike; what no compute hides is shaded."""
    spans = [span for span in _step_spans(projection) if span.stop > span.start]
    total = max((span.stop for span in spans), default=0.0)
    scale = (_TIME_WIDTH - _LEFT - 20) / (total or 1.0)
    shapes = [_text(0, top + 19, name) for top, name in _LANES.values()]
    for start, stop in _exposed(spans):
        label = f"not hidden: {format_seconds(stop - start)}"
        shapes.append(_rect(_LEFT + start * scale, 10, (stop - start) * scale, 108, "#f3c9c0", label))
    for span in spans:
        top, _ = _LANES[span.lane]
        width = (span.stop - span.start) * scale
        label = f"{span.name}{span.phase and ', '}{span.phase}: {format_seconds(span.stop - span.start)}"
        colour = _SPAN_COLOURS[span.lane, span.phase]
        shapes.append(_rect(_LEFT + span.start * scale, top, width, _LANE_HEIGHT, colour, label))
        if width > 7 * len(span.name) + 6:
            shapes.append(_text(_LEFT + span.start * scale + 4, top + 18, span.name))
    for at in _ticks(total):
        left = _LEFT + at * scale
        shapes.append(f'<line x1="{left:.2f}" y1="112" x2="{left:.2f}" y2="120" stroke="#666"/>')
        shapes.append(_text(left, 134, format_seconds(at) if at else "0", "middle"))
    return _svg(_TIME_WIDTH, 140, f"timeline of a step, {format_seconds(total)}", shapes)


def _step_spans(projection: Projection) -> Iterator[_Span]:
    """Yield what the engine does in time, then the optimizer's step; what a unit computes without a gap is one span."""
    setup = projection.setup
    found = played_microbatches(projection.step, setup.workload, setup.hardware)
    kept: _Span | None = None
    for run in found.runs:
        if run.work.ranks:
            lane = "gather" if run.work.kind == "all_gather" else "reduce"
            name = with_names(run.work.label or run.work.name, projection.facts)
            yield _Span(lane, name, "", run.start, run.end)
        elif run.stream == "compute" and run.work.kind != "memory":
            phase = "forward" if run.work.name == "forward" else "backward"
            name = with_names(run.unit, projection.facts)
            if kept is not None and (kept.name, kept.phase) == (name, phase) and run.start - kept.stop < 1e-5:
                kept = replace(kept, stop=run.end)
            else:
                yield from () if kept is None else (kept,)
                kept = _Span("compute", name, phase, run.start, run.end)
    yield from () if kept is None else (kept,)
    yield _Span("compute", "optimizer", "", found.seconds, found.seconds + projection.time.optimizer)


def _exposed(spans: list[_Span]) -> Iterator[tuple[float, float]]:
    """Yield the intervals in which nothing is computed."""
    computed = sorted((span.start, span.stop) for span in spans if span.lane == "compute")
    ends = [0.0, *(stop for _, stop in computed)]
    starts = [*(start for start, _ in computed), max((span.stop for span in spans), default=0.0)]
    shortest = 1e-4 * starts[-1]
    yield from ((stop, start) for stop, start in zip(ends, starts, strict=True) if start - stop > shortest)


def _ticks(total: float) -> list[float]:
    """Return round times from 0, at most ten of them."""
    if total <= 0:
        return []
    step = 10 ** math.floor(math.log10(total))
    step = next((size for size in (step / 10, step / 5, step / 2) if total / size <= 9), step)
    return [number * step for number in range(int(total / step) + 1)]


def _rect(left: float, top: float, width: float, height: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{height}" fill="{colour}">'
        f"<title>{html.escape(title)}</title></rect>"
    )


def _legend(left: float, top: float, colour: str, text: str) -> list[str]:
    swatch = f'<rect x="{left}" y="{top + 1}" width="14" height="14" fill="{colour}"/>'
    return [swatch, _text(left + 22, top + 13, text)]


def _text(left: float, baseline: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{left:.2f}" y="{baseline}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(width: int, height: int, label: str, shapes: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" font-size="13" '
        f'aria-label="{html.escape(label)}">\n' + "\n".join(shapes) + "\n</svg>"
    )
