"""Tables as a page for a browser that needs nothing else, and as a picture."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.formatting import Bar, Table

__all__ = ["draw_png", "html_page"]

# Okabe and Ito's palette, told apart by colour-blind readers too.
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#999999")
_STYLE = (
    "body{font-family:system-ui,sans-serif;max-width:84rem;margin:2rem auto;padding:0 1rem;color:#111;background:#fff;"
    "line-height:1.4}h1{font-size:1.3rem}h2{font-size:1rem;margin:1.8rem 0 .5rem}.scroll{overflow-x:auto}"
    "table{border-collapse:collapse;font-size:.85rem;margin-top:1.2rem}h2+.scroll table{margin-top:0}"
    "th,td{padding:.2rem .9rem .2rem 0;white-space:nowrap;border-bottom:1px solid #ddd;text-align:right;"
    "vertical-align:top}th{border-bottom:2px solid #888}.text{text-align:left}td.text{white-space:pre-wrap}"
    ".bar{position:relative;width:44rem;height:1.2rem}.bar i{position:absolute;top:0;height:100%}"
)


def html_page(title: str, tables: Iterable[Table]) -> str:
    """Return a self-contained HTML page."""
    body = "\n".join(map(_drawn, tables))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _drawn(table: Table) -> str:
    title = f"<h2>{html.escape(table.title)}</h2>" if table.title else ""
    rows = "\n".join(_row(table, row, "td" if number else "th") for number, row in enumerate(table.rows))
    return f"{title}<div class=scroll><table>{rows}</table></div>"


def _row(table: Table, row: Sequence[str | Bar], tag: str) -> str:
    cells = []
    for column, cell in enumerate(row):
        kind = " class=text" if table.is_left(column) else ""
        cells.append(f"<{tag}{kind}>{_bar(cell) if isinstance(cell, Bar) else html.escape(cell)}</{tag}>")
    return f"<tr>{''.join(cells)}</tr>"


def _bar(bar: Bar) -> str:
    scale, spans = 100 / bar.end, []
    for start, stop, title, colour in bar.spans:
        style = f"left:{start * scale:.3f}%;width:{(stop - start) * scale:.3f}%;background:{_COLOURS[colour % 7]}"
        spans.append(f'<i style="{style}" title="{html.escape(title)}"></i>')
    return f"<div class=bar>{''.join(spans)}</div>"


def draw_png(path: str, table: Table, title: str) -> None:
    """Draw the bars of a table, the last cells of its rows, into a file.

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
    figure = Figure(figsize=(10, 1 + 0.3 * len(table.rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, row in enumerate(table.rows[1:]):
        for start, stop, _, colour in row[-1].spans if isinstance(row[-1], Bar) else ():
            axes.barh(-place, stop - start, left=start, color=_COLOURS[colour % 7])
    axes.set_title(title, fontsize=10)
    names = [f"{row[0]}: {row[1]}" for row in table.rows[1:]]
    axes.set_yticks([-place for place in range(len(names))], names)
    axes.set_xticks([])
    figure.savefig(path, dpi=120)
