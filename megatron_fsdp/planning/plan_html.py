"""A plan as a page for a browser that needs nothing else, and its memory as a picture through matplotlib."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.formatting import Listing, Table, format_bytes, format_seconds
from megatron_fsdp.planning.estimate import Projection
from megatron_fsdp.planning.plan_charts import COLOURS, memory_svg, part_label, timeline_svg, units_svg
from megatron_fsdp.planning.plan_text import decided, headline, memory_rows, stage_table, tables
from megatron_fsdp.planning.report_text import notes
from megatron_fsdp.planning.search import Search, fit_parts

__all__ = ["draw_png", "html_page"]

_STYLE = (
    "body{font-family:system-ui,sans-serif;max-width:84rem;margin:2rem auto;padding:0 1rem;color:#111;background:#fff;"
    "line-height:1.4}h1{font-size:1.3rem}h2{font-size:1rem;margin:1.8rem 0 .5rem}.scroll{overflow-x:auto}"
    "table{border-collapse:collapse;font-size:.85rem;margin-top:1.2rem}h2+.scroll table{margin-top:0}"
    "th,td{padding:.2rem .9rem .2rem 0;white-space:nowrap;border-bottom:1px solid #ddd;text-align:right;"
    "vertical-align:top}th{border-bottom:2px solid #888}td.text,th.text{text-align:left}"
    "td.note{text-align:left;white-space:normal;min-width:16rem}"
    "ul{font-size:.85rem;padding-left:1.2rem}p{font-size:.85rem}pre{font-size:.8rem}"
)


def html_page(
    projection: Projection,
    decisions: Sequence[str],
    limit_bytes: int | None = None,
    beside: tuple[Search | None, Sequence[Projection]] = (None, ()),
) -> str:
    """Return a self-contained HTML page of a plan: charts and tables.

    Args:
        decisions: one line per choice. limit_bytes: memory of one accelerator.
        beside: the search that the plan is the best of, if any, and the stages of a pipeline.
    """
    title = html.escape(headline(projection))
    parts = "\n".join(_parts(projection, decisions, limit_bytes, beside))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{parts}\n</body>\n</html>\n"
    )


def _parts(
    projection: Projection,
    decisions: Sequence[str],
    limit_bytes: int | None,
    beside: tuple[Search | None, Sequence[Projection]],
) -> Iterator[str]:
    found, stages = beside
    report = projection.report()
    units, *others = tables(projection, report)
    yield _section("Memory of one rank", memory_svg(projection, limit_bytes))
    rows = memory_rows(projection, limit_bytes)
    yield _table(Table([row[:3] for row in rows] if limit_bytes is None else rows, has_note=limit_bytes is not None))
    if projection.time.compute:
        yield _section("Timeline of a step", timeline_svg(projection), _timeline_caption(projection))
    yield _section("Bytes of each unit on one rank", units_svg(report))
    yield _table(units)
    if len(stages) > 1:
        yield _section("Stages", _table(stage_table(stages)))
    if found is not None:
        yield _section(
            "Search", *(_listing(part) if isinstance(part, Listing) else _table(part) for part in fit_parts(found))
        )
    yield _listing(decided(decisions))
    for owners in projection.owners:
        yield f"<div class=scroll><pre>{html.escape(str(owners))}</pre></div>"
    yield from map(_table, others)
    yield from map(_listing, notes(report))


def _timeline_caption(projection: Projection) -> str:
    time, workload = projection.time, projection.setup.workload
    count = min(workload.num_microbatches, 3)
    which = f"A step of {count} microbatch{'es' * (count > 1)} with a few of the layers that are alike"
    left_out = time.model_parallel + time.bubble
    beside = (
        f" Collectives inside the model and waiting for stages, {format_seconds(left_out)}, are not drawn."
        if left_out
        else ""
    )
    return (
        f"<p>{which}, as the engine does it: forward (light) and backward (dark) of each unit, gathers ahead of it, "
        f"reductions behind it, the optimizer. Shaded: communication that no compute hides, "
        f"{format_seconds(time.exposed)} in a step.{beside}</p>"
    )


def _section(title: str, *parts: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n<div class=scroll>" + "\n".join(parts) + "</div>"


def _table(table: Table) -> str:
    if len(table.rows) == 1:
        return f"<p>{html.escape(table.lines()[0])}</p>"
    title = f"<h2>{html.escape(table.title)}</h2>" if table.title else ""
    header, *rows = table.rows

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{_kind(table, column, tag)}>{html.escape(cell)}</{tag}>" for column, cell in enumerate(row)
        )

    head = f"<thead><tr>{cells(header, 'th')}</tr></thead>"
    body = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"{title}<div class=scroll><table>{head}\n<tbody>{body}</tbody></table></div>"


def _kind(table: Table, column: int, tag: str) -> str:
    if table.has_note and column == len(table.rows[0]) - 1 and tag == "td":
        return " class=note"
    return " class=text" if table.is_left(column) else ""


def _listing(listing: Listing) -> str:
    entries = "\n".join(f"<li>{html.escape(entry)}</li>" for entry in listing.entries)
    title = html.escape(listing.title)
    return f"<h2>{title}</h2>\n<ul>{entries}</ul>" if entries else f"<p>{title}</p>"


def draw_png(path: str, projection: Projection, limit_bytes: int | None = None) -> None:
    """Draw the memory chart into a file.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--png needs matplotlib: pip install 'megatron-fsdp-dbuffer[examples]'; --html draws without it"
        ) from error
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    left = 0.0
    for part, colour in zip(projection.memory, COLOURS, strict=False):
        size = part.num_bytes / 2**30
        axes.barh(0, size, left=left, color=colour, label=part_label(part))
        left += size
    if limit_bytes is not None:
        axes.axvline(limit_bytes / 2**30, color="black", label=f"limit: {format_bytes(limit_bytes)}")
    axes.set_title(headline(projection), fontsize=10)
    axes.set_xlabel("GiB on one rank")
    axes.set_yticks([])
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)
