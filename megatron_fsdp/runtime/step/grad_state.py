"""What ``main_grad`` of a parameter group holds, and what that may become."""

from __future__ import annotations

import enum

__all__ = ["CHANGES", "GradState"]


class GradState(enum.Enum):
    """What ``main_grad`` holds: nothing, a sum not reduced over all axes yet, or what the optimizer may read."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FINAL = "final"


CHANGES = (
    (GradState.EMPTY, GradState.PARTIAL),
    (GradState.PARTIAL, GradState.FINAL),
    (GradState.FINAL, GradState.EMPTY),
    (GradState.FINAL, GradState.PARTIAL),
    (GradState.PARTIAL, GradState.PARTIAL),
    (GradState.PARTIAL, GradState.EMPTY),
    (GradState.EMPTY, GradState.EMPTY),
)
