"""A timeline as a picture, by matplotlib."""

from __future__ import annotations

from os import PathLike

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.observability.timeline_page import colours, headline, opacity, stacked
from megatron_fsdp.observability.timeline_record import LANES, TimelineRecord

__all__ = ["draw_png"]

_MAX_NAMED = 12


def draw_png(record: TimelineRecord, path: str | PathLike[str]) -> None:
    """Draw the lanes into a file; with more than 12 units the legend is left out.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError(
            "a timeline as .png needs matplotlib: pip install 'megatron-fsdp-dbuffer[examples]'; .html needs nothing"
        ) from error
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colour_of, top, places = colours(record.units), 0.0, []
    for lane in LANES:
        rows = stacked([span for span in record.spans if span.lane == lane])
        places.append(top + len(rows) / 2)
        for row, spans in enumerate(rows):
            for span in spans:
                bar = [(1e3 * span.start, 1e3 * span.seconds)]
                if span.is_wait:
                    axes.broken_barh(
                        bar, (top + row, 0.9), facecolor="white", edgecolor="black", hatch="/////", linewidth=0.4
                    )
                else:
                    colour = colour_of.get(span.unit, "#777777")
                    axes.broken_barh(bar, (top + row, 0.9), facecolor=colour, alpha=opacity(span), linewidth=0)
        top += len(rows) + 0.5
    axes.set(title=f"rank {record.rank}: {headline(record)}", xlabel="ms", xlim=(0, max(1e3 * record.seconds, 1e-6)))
    axes.set_yticks(places, LANES)
    axes.invert_yaxis()
    waits = Patch(facecolor="white", edgecolor="black", hatch="/////", linewidth=0.4, label="compute waits")
    named = record.units if len(record.units) <= _MAX_NAMED else ()
    units = [Patch(facecolor=colour_of[unit], label=unit) for unit in named]
    figure.legend(handles=[*units, waits], loc="outside lower center", ncols=7, fontsize=8)
    figure.savefig(path, dpi=120)
