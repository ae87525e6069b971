"""An extension of griffe: the site shows the code under "Example:" in a docstring as code.

It also inserts the empty lines that griffe needs between sections.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^Example:\n((?:[ ]+.*\n|\n)*(?:[ ]+.*)?)", re.MULTILINE)

_SECTION = re.compile(r"^(?=(?:Args|Attributes|Returns|Yields|Raises):\n)", re.MULTILINE)


class DocstringExamples(Extension):
    """Rewrites each docstring that griffe reads."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            separated = _SECTION.sub("\n", obj.docstring.value + "\n")
            obj.docstring.value = _EXAMPLE.sub(_fenced, separated).rstrip()


def _fenced(found: re.Match[str]) -> str:
    code = textwrap.dedent(found[1]).strip("\n")
    return f"\n**Example**\n\n```python\n{code}\n```\n\n"
