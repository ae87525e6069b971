"""Progress of a command: one line on a terminal, replaced by the next."""

import sys

__all__ = ["show_progress"]


def show_progress(line: str) -> None:
    """Replace the last line of the terminal; an empty line clears it. A file or a pipe gets nothing."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
