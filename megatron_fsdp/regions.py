"""Regions: the flat buffers that a unit's parameters of one kind are laid out in."""

from __future__ import annotations

from collections.abc import Sequence

from dbuffer import Granularity, PaddingLimits, Region, Row, first_dimension_granularity, plan_regions

__all__ = ["unit_regions"]

# Cutting between slices of the first dimension is what PyTorch's tools understand best, and enough but for weights
# of few, large slices: Mixtral's eight experts over 64 ranks would take five times their size.
_LIMITS = PaddingLimits(fallback=Row())


def unit_regions(
    shapes: Sequence[Sequence[int]], num_shards: int, itemsize: int, granularities: Sequence[Granularity] | None = None
) -> tuple[Region, ...]:
    """Lay out tensors that share dtype and strategy.

    Args:
        granularities: where each may be cut. None: between slices of the first dimension, or between the rows of
            those tensors that would pad the buffers by more than a percent that way.
    Raises:
        LayoutError: padding beyond ``PaddingLimits``.
    """
    if granularities is not None:
        return plan_regions(shapes, num_shards, granularity=granularities, itemsize=itemsize)
    finest = [first_dimension_granularity(shape) for shape in shapes]
    return plan_regions(shapes, num_shards, granularity=finest, itemsize=itemsize, limits=_LIMITS)
