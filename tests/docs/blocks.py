"""Find the fenced code blocks of the pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Languages of blocks that are not run: the output of a command, or a configuration.
SILENT = ("text", "yaml")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block.

    Attributes:
        page: path of the page below the root.
        line: number of the block's first line.
        language: language of the fence; "" if the page names none.
        code: the text between the fences.
    """

    page: str
    line: int
    language: str
    code: str


def pages() -> list[str]:
    """Return the paths of all pages, below the root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found]


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the blocks of a page; a diff yields the Python code after the change."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        language, code = found[1], found[2]
        if language == "diff":
            language, code = "python", side_of(code, "+")
        yield Block(page, text.count("\n", 0, found.start(2)) + 1, language, code)


def side_of(diff: str, sign: str) -> str:
    """Return one side of a diff: "-" the code before the change, "+" the code after it."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[:1] in (" ", "\n", sign))
