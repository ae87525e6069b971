"""Origins: the line of code that issued an operator or a wait."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

__all__ = ["Origin", "here"]

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_CERTIFY = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(_CERTIFY.rstrip(os.sep))
_ENGINE = tuple(
    os.path.join(os.path.dirname(_PACKAGE), *parts) + os.sep
    for parts in (("megatron_fsdp",), ("dbuffer",), ("kernels", "dbuffer_kernels"), ("dbuffer_kernels",))
)
_node: Callable[[], Any] = torch._C._current_autograd_node
# By file name: whether ``here`` skips lines of the file.
_hidden: dict[str, bool] = {}


@dataclass(frozen=True, slots=True)
class Origin:
    """A line; and the autograd node, if autograd itself issued the work."""

    path: str
    line: int
    node: str = ""

    @property
    def is_engine(self) -> bool:
        """Return whether the line is in the engine."""
        return self.path.startswith(_ENGINE) and not self.path.startswith(_CERTIFY)

    @property
    def place(self) -> str:
        """File and line, without the node."""
        path = os.path.relpath(self.path) if self.path.startswith(os.getcwd() + os.sep) else self.path
        return f"{path}:{self.line}"

    def __str__(self) -> str:
        return self.place + (f" ({self.node})" if self.node else "")


def here(outside: str = "") -> Origin:
    """Return the innermost line outside of PyTorch, of the standard library's own frames and of the checker.

    Args:
        outside: a file that is looked through as well.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == outside or _is_hidden(frame.f_code.co_filename)):
        if os.path.basename(frame.f_code.co_filename) == "weakref.py":
            # The line that dropped the last reference is unrelated to the finalizer's work.
            return Origin("a finalizer", 0)
        frame = frame.f_back
    if frame is None:
        return Origin("", 0)
    node = _node()
    return Origin(frame.f_code.co_filename, frame.f_lineno, "" if node is None else node.name())


def _is_hidden(path: str) -> bool:
    hidden = _hidden.get(path)
    if hidden is None:
        is_library = path.startswith((_TORCH, "<frozen")) or os.path.basename(path) in ("contextlib.py", "weakref.py")
        hidden = _hidden[path] = is_library or path.startswith(_CERTIFY)
    return hidden
