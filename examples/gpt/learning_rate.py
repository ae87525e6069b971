"""The learning-rate schedule: linear warm-up, then constant, linear or cosine decay."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Megatron-LM's schedule (OptimizerParamScheduler), as a pure function of the iteration.

    Attributes:
        peak: rate at the end of the warm-up, ``--lr``.
        floor: rate from ``decay_iterations`` on, ``--min-lr``.
        style: ``constant``, ``linear`` or ``cosine``.
        warmup_iterations: iterations of linear warm-up from 0, may be 0.
        decay_iterations: iteration at which ``floor`` is reached, > ``warmup_iterations``.
    """

    peak: float
    floor: float
    style: str
    warmup_iterations: int
    decay_iterations: int

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> LearningRate:
        """Return the schedule that validated arguments ask for."""
        return cls(args.lr, args.min_lr, args.lr_decay_style, args.lr_warmup_iters, args.lr_decay_iters)

    def at(self, iteration: int) -> float:
        """Return the rate that optimizer step ``iteration`` uses; the first step is iteration 1, so no step has rate 0.

        It equals the rate that Megatron prints on the line of that iteration.
        """
        if iteration <= self.warmup_iterations:
            return self.peak * iteration / self.warmup_iterations
        if self.style == "constant":
            return self.peak
        if iteration >= self.decay_iterations:
            return self.floor
        done = (iteration - self.warmup_iterations) / (self.decay_iterations - self.warmup_iterations)
        share = 1.0 - done if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.floor + share * (self.peak - self.floor)
