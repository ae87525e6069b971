"""Charts of a plan's memory: a page for a browser that needs nothing else, and a picture through matplotlib."""

from __future__ import annotations

import html
from collections.abc import Sequence

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.formatting import format_bytes
from megatron_fsdp.planning.estimate import MemoryPart, Projection
from megatron_fsdp.planning.plan_text import headline, page
from megatron_fsdp.planning.search import Search, fit_page

__all__ = ["draw_png", "html_page", "memory_svg"]

# Okabe and Ito's palette, told apart by colour-blind readers too.
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#999999")
_WIDTH, _BAR, _ROW = 820, 44, 22
_STYLE = (
    "body{font-family:system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#111;background:#fff}"
    "pre{font-size:.8rem;line-height:1.35;overflow-x:auto}svg{max-width:100%;height:auto}h1{font-size:1.2rem}"
)


def html_page(
    projection: Projection, decisions: Sequence[str], limit_bytes: int | None = None, found: Search | None = None
) -> str:
    """Return a self-contained HTML page: the memory chart and the text of the plan, behind that of a search."""
    title = html.escape(headline(projection))
    table = "" if found is None else f"<h2>Search</h2>\n<pre>{html.escape(fit_page(found))}</pre>\n"
    text = html.escape(page(projection, decisions, limit_bytes))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{memory_svg(projection, limit_bytes)}\n{table}"
        f"<pre>{text}</pre>\n</body>\n</html>\n"
    )


def memory_svg(projection: Projection, limit_bytes: int | None = None) -> str:
    """Return one stacked bar of a rank's memory with a legend, and a line at the limit."""
    parts = projection.memory
    scale = _WIDTH / max(projection.memory_bytes, limit_bytes or 0, 1)
    shapes, left = [], 0.0
    for part, colour in zip(parts, _COLOURS, strict=False):
        width = part.num_bytes * scale
        label = html.escape(_label(part))
        shapes.append(
            f'<rect x="{left:.2f}" y="0" width="{width:.2f}" height="{_BAR}" fill="{colour}">'
            f"<title>{label}</title></rect>"
        )
        left += width
    for row, (part, colour) in enumerate(zip(parts, _COLOURS, strict=False)):
        top = _BAR + 18 + row * _ROW
        shapes.append(f'<rect x="0" y="{top}" width="14" height="14" fill="{colour}"/>')
        shapes.append(f'<text x="22" y="{top + 12}">{html.escape(_label(part))}</text>')
    height = _BAR + 18 + len(parts) * _ROW
    if limit_bytes is not None:
        at = min(limit_bytes * scale, _WIDTH - 1)
        shapes.append(f'<line x1="{at:.2f}" y1="0" x2="{at:.2f}" y2="{_BAR + 8}" stroke="#000" stroke-width="2"/>')
        shapes.append(f'<text x="{_WIDTH}" y="{_BAR + 30}" text-anchor="end">limit {format_bytes(limit_bytes)}</text>')
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" font-size="13" '
        f'aria-label="memory of one rank, {format_bytes(projection.memory_bytes)}">\n' + "\n".join(shapes) + "\n</svg>"
    )


def _label(part: MemoryPart) -> str:
    return f"{part.name}: {format_bytes(part.num_bytes) if part.is_known else 'not known'}"


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
    for part, colour in zip(projection.memory, _COLOURS, strict=False):
        size = part.num_bytes / 2**30
        axes.barh(0, size, left=left, color=colour, label=_label(part))
        left += size
    if limit_bytes is not None:
        axes.axvline(limit_bytes / 2**30, color="black", label=f"limit: {format_bytes(limit_bytes)}")
    axes.set_title(headline(projection), fontsize=10)
    axes.set_xlabel("GiB on one rank")
    axes.set_yticks([])
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)
