"""Gradient norms far above those before: often the first sign of bad data or a broken device."""

from __future__ import annotations

import argparse
import math

from torch import Tensor

FACTOR = 10.0


class LargeGradients:
    """Compares each step's gradient norm with the largest so far, with ``--check-for-large-grads``."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._is_on: bool = args.check_for_large_grads
        self._largest = 0.0

    def complaint(self, iteration: int, norm: Tensor) -> str | None:
        """Return what to say of a step, None where there is nothing; the host waits for the norm.

        Args:
            norm: of all gradients before clipping, a 0-d tensor, equal on all ranks.
        """
        if not self._is_on:
            return None
        value, largest = norm.item(), self._largest
        if math.isfinite(value):
            self._largest = max(largest, value)
        if not largest or not value > FACTOR * largest:
            return None
        return (
            f"warning: iteration {iteration}: gradient norm {value:.3g} is more than {FACTOR:.0f} times the largest of "
            f"the steps before ({largest:.3g}), says --check-for-large-grads"
        )
