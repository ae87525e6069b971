"""A plan as a page for a browser that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from megatron_fsdp.formatting import Listing, Table
from megatron_fsdp.planning.charts import Chart, svg
from megatron_fsdp.planning.plan_page import Part

__all__ = ["html_page"]

_STYLE = (
    "body{font-family:system-ui,sans-serif;max-width:84rem;margin:2rem auto;padding:0 1rem;color:#111;background:#fff;"
    "line-height:1.4}h1{font-size:1.3rem}h2{font-size:1rem;margin:1.8rem 0 .5rem}.scroll{overflow-x:auto}"
    "table{border-collapse:collapse;font-size:.85rem;margin-top:1.2rem}h2+.scroll table{margin-top:0}"
    "th,td{padding:.2rem .9rem .2rem 0;white-space:nowrap;border-bottom:1px solid #ddd;text-align:right;"
    "vertical-align:top}th{border-bottom:2px solid #888}td.text,th.text{text-align:left}"
    "td.note{text-align:left;white-space:pre-wrap;min-width:16rem}"
    "ul{font-size:.85rem;padding-left:1.2rem}p{font-size:.85rem}pre{font-size:.8rem}"
)


def html_page(title: str, parts: Iterable[Part]) -> str:
    """Return a self-contained HTML page."""
    body = "\n".join(map(_drawn, parts))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _drawn(part: Part) -> str:
    if isinstance(part, Chart):
        caption = f"<p>{html.escape(part.caption)}</p>" if part.caption else ""
        return f"<h2>{html.escape(part.title)}</h2>\n<div class=scroll>{svg(part)}</div>{caption}"
    if isinstance(part, Listing):
        entries = "\n".join(f"<li>{html.escape(entry)}</li>" for entry in part.entries)
        title = html.escape(part.title)
        return f"<h2>{title}</h2>\n<ul>{entries}</ul>" if entries else f"<p>{title}</p>"
    if isinstance(part, Table):
        return _table(part)
    return f"<div class=scroll><pre>{html.escape(str(part))}</pre></div>"


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
