"""Draw docs/rooms.svg, the rooms of the library and who imports whom, and check the links of docs/architecture.md.

``python docs/rooms.py`` draws; tests/unit/test_architecture.py holds picture and links to the code.
"""

import ast
import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from tests.harness.architecture import FOLDER_ORDER, library, read_sources, room_imports  # noqa: E402

WIDTH, HEIGHT, GAP, MARGIN = 176, 44, 16, 20
STEP = HEIGHT + 40
COLOURS = {"dbuffer_kernels": "#fde8d0", "dbuffer": "#dcebfa", "megatron_fsdp": "#e2f3df"}


def rooms_svg() -> str:
    """Return the picture: a box per room, and arrows for imports, without arrows that follow from others."""
    sources = library(read_sources(ROOT))
    columns = max(len(names) for names in FOLDER_ORDER)
    width = 2 * MARGIN + columns * (WIDTH + GAP) - GAP
    height = 2 * MARGIN + len(FOLDER_ORDER) * STEP - (STEP - HEIGHT)
    places: dict[str, tuple[float, float]] = {}
    for level, names in enumerate(reversed(FOLDER_ORDER)):
        left = (width - len(names) * (WIDTH + GAP) + GAP) / 2
        for position, name in enumerate(names):
            places[name] = (left + position * (WIDTH + GAP), MARGIN + level * STEP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#667"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    parts += [_arrow(places[above], places[below]) for above, below in sorted(_direct(room_imports(sources)))]
    parts += [_box(name, place) for name, place in places.items()]
    return "\n".join([*parts, "</svg>", ""])


def _direct(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Remove arrows that follow from a longer path."""
    reach: dict[str, set[str]] = {}
    for name in (name for names in FOLDER_ORDER for name in names):
        below = {other for above, other in pairs if above == name}
        reach[name] = below.union(*(reach[other] for other in below))
    between = {name: {other for above, other in pairs if above == name} for name in reach}
    return {(a, b) for a, b in pairs if not any(b in reach[other] for other in between[a])}


def _arrow(above: tuple[float, float], below: tuple[float, float]) -> str:
    start, end = above[0] + WIDTH / 2, below[0] + WIDTH / 2
    top, bottom = above[1] + HEIGHT, below[1] - 2
    bend = (bottom - top) / 2
    # Long ways swing out, so that they do not hide behind the boxes between.
    aside = 0.0 if bottom - top < STEP else (90.0 if end >= start else -90.0)
    return (
        f'<path d="M{start:.0f},{top:.0f} C{start + aside:.0f},{top + bend:.0f} {end + aside:.0f},{bottom - bend:.0f} '
        f'{end:.0f},{bottom:.0f}" fill="none" stroke="#667" stroke-opacity="0.45" marker-end="url(#tip)"/>'
    )


def _box(name: str, place: tuple[float, float]) -> str:
    x, y = place
    colour = COLOURS[name.partition(".")[0]]
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{colour}" stroke="#556"/>'
        f'<text x="{x + WIDTH / 2:.0f}" y="{y + 27:.0f}" font-size="11" text-anchor="middle">{escape(name)}</text>'
    )


def check_links(page: str) -> None:
    """Look up every function that a page of docs/ links to, [name](../file.py), in that file.

    Raises:
        LookupError: the file defines no function of that name.
    """
    for name, path in re.findall(r"\[(\w+)\]\(([./\w]+\.py)\)", page):
        tree = ast.parse((ROOT / "docs" / path).read_text(encoding="utf-8"))
        if not any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree)):
            raise LookupError(f"{path} has no function {name!r}")


if __name__ == "__main__":
    (ROOT / "docs" / "rooms.svg").write_text(rooms_svg(), encoding="utf-8")
