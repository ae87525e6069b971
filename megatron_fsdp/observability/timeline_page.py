"""The page of a timeline: its lanes, and a table of units, in one file without scripts."""

from __future__ import annotations

import colorsys
import html
import math
from collections.abc import Iterator, Sequence

from megatron_fsdp.formatting import format_bytes, format_seconds
from megatron_fsdp.observability.timeline_record import GATHER, LANES, REDUCE, Span, TimelineRecord, UnitTimes

__all__ = ["colours", "headline", "html_page", "opacity", "stacked", "ticks", "timeline_svg"]

# Okabe and Ito's palette, told apart by colour-blind readers too, for as many units as it has colours.
_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_OTHER = "#777777"
# Of what compute does, so that forward and backward of one unit are told apart.
_OPACITY = {"forward": 0.45, "recompute": 0.7}
_LEFT, _ROW, _GAP = 74, 26, 14
# The lanes get wider with the number of bars on the fullest, so that bars can be told apart; the page scrolls them.
_MIN_WIDTH, _MAX_WIDTH, _PER_BAR = 1200, 12_000, 5
# Gathers and reductions of a lane that are under way at once lie below each other, in at most this many rows.
_MAX_ROWS = 4
_LETTER = 6.4
_STYLE = (
    "body{font-family:system-ui,sans-serif;max-width:80rem;margin:2rem auto;padding:0 1rem;color:#111;background:#fff}"
    "h1{font-size:1.2rem}p{font-size:.9rem}.lanes{overflow-x:auto}"
    "table{border-collapse:collapse;font-size:.8rem;font-variant-numeric:tabular-nums}"
    "th,td{padding:.15rem .6rem;text-align:right}th{border-bottom:1px solid #111}"
    "td:first-child,th:first-child{text-align:left}tfoot td{border-top:1px solid #111;font-weight:600}"
    ".unit{display:inline-block;width:.8rem;height:.8rem;margin-right:.4rem;vertical-align:-.1rem}"
)
_STRIPES = (
    '<defs><pattern id="wait" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#fff"/><rect width="3" height="6" fill="#111"/></pattern></defs>'
)


def html_page(record: TimelineRecord) -> str:
    """Return a self-contained HTML page: the share of exposed communication, the lanes, and a row for each unit."""
    title = html.escape(f"Timeline of rank {record.rank}: {headline(record)}")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n<p>{html.escape(_summary(record))}</p>\n"
        f'<div class="lanes">{timeline_svg(record)}</div>\n'
        "<p>Light: forward. Full: backward. Grey: the optimizer. Striped: compute waits for communication. Point at a "
        "bar for its name and time.</p>\n"
        f"{_table(record)}\n</body>\n</html>\n"
    )


def headline(record: TimelineRecord) -> str:
    """Return the title: the share of exposed communication."""
    return f"{record.exposed_share:.1%} exposed communication"


def _summary(record: TimelineRecord) -> str:
    steps = f"{record.num_steps} step{'' if record.num_steps == 1 else 's'} in " if record.num_steps else ""
    busy, waited = record.communication, record.waited()
    hidden = f", {max(1 - waited / busy, 0.0):.0%} of it beside compute" if busy else ""
    return (
        f"{steps}{format_seconds(record.seconds)}. Compute waited {format_seconds(waited)}: "
        f"{format_seconds(record.waited(GATHER))} for gathers, {format_seconds(record.waited(REDUCE))} for reductions. "
        f"Communication was under way for {format_seconds(busy)}{hidden}."
    )


# ---------------------------------------------------------------------- lanes


def timeline_svg(record: TimelineRecord) -> str:
    """Return the three lanes over time, each bar with its name and time as a tooltip."""
    lanes = {lane: [span for span in record.spans if span.lane == lane] for lane in LANES}
    width = min(max(_PER_BAR * max(map(len, lanes.values())), _MIN_WIDTH), _MAX_WIDTH)
    scale = (width - _LEFT) / max(record.seconds, 1e-9)
    colour_of, shapes, top = colours(record.units), [_STRIPES], 20
    for lane, bars in lanes.items():
        rows = stacked(bars)
        height = len(rows) * _ROW
        shapes.append(f'<text x="0" y="{top + height / 2 + 4:.0f}">{lane}</text>')
        shapes.append(f'<rect x="{_LEFT}" y="{top}" width="{width - _LEFT}" height="{height}" fill="#f4f4f4"/>')
        for row, spans in enumerate(rows):
            for span in spans:
                shapes += _bar(span, top + row * _ROW, scale, colour_of.get(span.unit, _OTHER))
        top += height + _GAP
    for at in ticks(record.seconds, width // 150):
        x = _LEFT + at * scale
        shapes.append(f'<line x1="{x:.1f}" y1="14" x2="{x:.1f}" y2="{top - _GAP}" stroke="#bbb" stroke-width=".5"/>')
        shapes.append(f'<text x="{x:.1f}" y="10" text-anchor="middle">{format_seconds(at) if at else 0}</text>')
    label = html.escape(f"lanes of gathers, compute and reductions, {headline(record)}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-20 -4 {width + 50} {top}" width="{width + 50}" role="img" '
        f'font-family="system-ui,sans-serif" font-size="11" aria-label="{label}">\n' + "\n".join(shapes) + "\n</svg>"
    )


def _bar(span: Span, top: float, scale: float, colour: str) -> Iterator[str]:
    left, width = _LEFT + span.start * scale, span.seconds * scale
    fill = 'fill="url(#wait)"' if span.is_wait else f'fill="{colour}" fill-opacity="{opacity(span)}"'
    size = f", {format_bytes(span.num_bytes)}" if span.num_bytes else ""
    title = html.escape(f"{span.name}: {format_seconds(span.seconds)} from {format_seconds(span.start)} on{size}")
    yield (
        f'<rect x="{left:.2f}" y="{top + 2}" width="{max(width, 0.4):.2f}" height="{_ROW - 4}" {fill}>'
        f"<title>{title}</title></rect>"
    )
    text = span.unit or span.action
    if width > _LETTER * len(text) + 4 and not span.is_wait:
        yield (
            f'<text x="{left + width / 2:.1f}" y="{top + _ROW / 2 + 4:.0f}" text-anchor="middle" '
            f'pointer-events="none">{html.escape(text)}</text>'
        )


def stacked(spans: Sequence[Span]) -> list[list[Span]]:
    """Return rows of spans that do not overlap, at least one; what finds no room is in the last of the most allowed."""
    rows: list[list[Span]] = [[]]
    for span in sorted(spans, key=lambda span: span.start):
        free = next((row for row in rows if not row or row[-1].stop <= span.start), None)
        if free is None:
            free = rows[-1]
            if len(rows) < _MAX_ROWS:
                free = []
                rows.append(free)
        free.append(span)
    return rows


def colours(units: Sequence[str]) -> dict[str, str]:
    """Return a colour for each unit, as ``#rrggbb``; neighbours are never alike."""
    if len(units) <= len(_PALETTE):
        return dict(zip(units, _PALETTE, strict=False))
    # Steps of the golden ratio around the circle of hues: those that follow each other lie far apart.
    chosen = (colorsys.hls_to_rgb(index * 0.618 % 1, (0.5, 0.62)[index % 2], 0.6) for index in range(len(units)))
    names = ("#" + "".join(f"{round(255 * part):02x}" for part in colour) for colour in chosen)
    return dict(zip(units, names, strict=True))


def opacity(span: Span) -> float:
    """Return how opaque a bar is."""
    return _OPACITY.get(span.action, 1.0)


def ticks(seconds: float, count: int) -> list[float]:
    """Return round times from 0 on, at most about ``count``."""
    if seconds <= 0:
        return [0.0]
    rough = seconds / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [index * step for index in range(int(seconds / step) + 1)]


# ---------------------------------------------------------------------- table

_COLUMNS = ("unit", "gathers", "gather", "waited", "reductions", "reduce", "waited", "forward", "recompute", "backward")


def _table(record: TimelineRecord) -> str:
    colour_of, times = colours(record.units), record.unit_times()
    rows = []
    for unit in times:
        swatch = f'<span class="unit" style="background:{colour_of[unit.unit]}"></span>'
        rows.append("<tr>" + _cells(swatch + html.escape(unit.unit), _amounts([unit])) + "</tr>")
    head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    return (
        f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>\n"
        f"<tfoot><tr>{_cells('all units', _amounts(times))}</tr></tfoot>\n</table>"
    )


def _amounts(units: Sequence[UnitTimes]) -> list[str]:
    def total(name: str) -> str:
        seconds = sum(getattr(unit, name) for unit in units)
        return format_seconds(seconds) if seconds else "-"

    return [
        str(sum(unit.num_gathers for unit in units)), total(GATHER), total("gather_waited"),
        str(sum(unit.num_reductions for unit in units)), total(REDUCE), total("reduce_waited"),
        total("forward"), total("recompute"), total("backward"),
    ]  # fmt: skip


def _cells(first: str, others: Sequence[str]) -> str:
    return f"<td>{first}</td>" + "".join(f"<td>{cell}</td>" for cell in others)
