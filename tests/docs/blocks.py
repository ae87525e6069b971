"""The fenced blocks of code of the pages, in order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Of a block that is no code to run: what a command prints, or a sketch.
SILENT = ("text", "yaml")


@dataclass(frozen=True, slots=True)
class Block:
    """One block.

    Attributes:
        page: path of its page below the root. line: of its first line. language: "" where the page names none.
    """

    page: str
    line: int
    language: str
    code: str


def pages() -> list[str]:
    """Return the pages that have code, by their paths below the root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found]


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the blocks of a page; of a diff, the Python that it leads to."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        language, code = found[1], found[2]
        if language == "diff":
            language, code = "python", side_of(code, "+")
        yield Block(page, text.count("\n", 0, found.start(2)) + 1, language, code)


def side_of(diff: str, sign: str) -> str:
    """Return one side of a diff: "-" is what was there before, "+" is what comes instead."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[:1] in (" ", "\n", sign))
