"""SmallGradients: gradients of few elements on their way into a buffer together.

A copy of a few elements costs a launch as one of many does; a unit has dozens of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["SmallGradients"]

_SMALL_NUMEL = 1 << 14
_MAX_WAITING = 64


class SmallGradients:
    """Gradients of few elements that wait for each other, to be copied in one call, and one launch.

    Args:
        views: where the gradient of each parameter belongs.
    """

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views = views
        self._is_small = [view.numel() <= _SMALL_NUMEL for view in views]
        self._targets: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []

    def copy(self, index: int, gradient: torch.Tensor) -> None:
        """Copy a gradient into its view, at once or at the next ``pack``."""
        if not self._is_small[index]:
            self._views[index].copy_(gradient)
            return
        self._targets.append(self._views[index])
        self._gradients.append(gradient)
        if len(self._gradients) == _MAX_WAITING:
            self.pack()

    def pack(self) -> None:
        """Copy what waits."""
        if self._gradients:
            torch._foreach_copy_(self._targets, self._gradients)
            self.drop()

    def drop(self) -> None:
        """Forget what waits."""
        self._targets.clear()
        self._gradients.clear()
