"""The learning-rate schedule: linear warm-up, then a decay of some shape."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Megatron-LM's schedule (OptimizerParamScheduler), as a pure function of the iteration.

    Attributes:
        peak: rate at the end of the warm-up, ``--lr``.
        floor: rate after ``decay_iterations``, ``--min-lr``.
        style: one of ``DECAY_STYLES``. WSD (warm-up, stable, decay) stays at the peak until the last
            ``wsd_decay_iterations`` of the decay, which have the shape ``wsd_decay_style``.
        warmup_iterations: iterations of linear warm-up from 0, may be 0.
        decay_iterations: iteration at which the decay ends, > ``warmup_iterations``.
        wsd_decay_style: one of ``WSD_DECAY_STYLES``. wsd_decay_iterations: at least 1 with WSD.
    """

    peak: float
    floor: float
    style: str
    warmup_iterations: int
    decay_iterations: int
    wsd_decay_style: str = "exponential"
    wsd_decay_iterations: int = 0

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> LearningRate:
        """Return the schedule that validated arguments ask for."""
        return cls(
            args.lr,
            args.min_lr,
            args.lr_decay_style,
            args.lr_warmup_iters,
            args.lr_decay_iters,
            args.lr_wsd_decay_style,
            args.lr_wsd_decay_iters or 0,
        )

    def at(self, iteration: int) -> float:
        """Return the rate that optimizer step ``iteration`` uses; the first step is iteration 1, so no step has rate 0.

        It equals the rate that Megatron prints on the line of that iteration.
        """
        if iteration <= self.warmup_iterations:
            return self.peak * iteration / self.warmup_iterations
        if self.style == "constant":
            return self.peak
        if iteration > self.decay_iterations:
            return self.floor
        if self.style == "inverse-square-root":
            return max(self.floor, self.peak * math.sqrt(max(self.warmup_iterations, 1) / iteration))
        return self.floor + self._share(iteration) * (self.peak - self.floor)

    def _share(self, iteration: int) -> float:
        """Return how much of the way from floor to peak the rate stands at, 1 at the start and 0 at the end."""
        if self.style == "WSD":
            start = self.decay_iterations - self.wsd_decay_iterations
            done = max(0.0, (iteration - start) / self.wsd_decay_iterations)
            return _SHARES[self.wsd_decay_style](done)
        return _SHARES[self.style](
            (iteration - self.warmup_iterations) / (self.decay_iterations - self.warmup_iterations)
        )


_SHARES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "exponential": lambda done: 2.0 * 0.5**done - 1.0,
    "minus_sqrt": lambda done: 1.0 - math.sqrt(done),
}
