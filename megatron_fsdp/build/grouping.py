"""Grouping: which of a unit's parameters share a flat buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import nn

from dbuffer import Granularity, PaddingLimits, Region, Row, first_dimension_granularity, plan_regions
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.errors import ConfigError

__all__ = [
    "group_parameters",
    "unit_regions",
]


def group_parameters(owned: Sequence[OwnedParameter]) -> list[list[OwnedParameter]]:
    """Split a unit's parameters into groups that can share buffers.

    A parameter that brings an all-gather of its own is a group. Those of any other group agree in dtype,
    ``requires_grad``, whether they are replicated, whether they are on the meta device, and how they are sharded over
    axes that are not data-parallel.
    """
    groups: dict[tuple[object, ...], list[OwnedParameter]] = {}
    for one in owned:
        parameter, split = one.parameter, None if one.split is None else one.split.key
        own = None if one.extension is None else id(one)
        key = (own, parameter.dtype, parameter.requires_grad, one.is_replicated, parameter.is_meta, split)
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def granularities(
    owned: Sequence[OwnedParameter], granularity: Granularity | Callable[[nn.Parameter], Granularity | None] | None
) -> list[Granularity]:
    """Return where each parameter may be cut: as asked, else between slices of the first dimension.

    Raises:
        ConfigError: the asked granularity cuts inside rows of the last dimension, which a DTensor cannot describe.
    """
    result = []
    for parameter in owned:
        asked = granularity(parameter.parameter) if callable(granularity) else granularity
        finest = first_dimension_granularity(parameter.shape)
        result.append(finest if asked is None else _checked_granularity(parameter, asked))
    return result


def _checked_granularity(parameter: OwnedParameter, asked: Granularity) -> Granularity:
    row_numel = parameter.shape[-1] if len(parameter.shape) > 1 else 1
    unit = asked.unit_numel(parameter.shape)
    if row_numel and unit % row_numel and unit < math.prod(parameter.shape):
        raise ConfigError(
            f"parameter {parameter.name!r} of shape {parameter.shape}: granularity {asked} would cut inside a row of "
            f"{row_numel} elements, which no DTensor can describe; the finest here is Row()"
        )
    return asked


# Cutting between slices of the first dimension is what PyTorch's tools understand best, and enough but for weights
# of few, large slices: Mixtral's eight experts over 64 ranks would take five times their size.
_LIMITS = PaddingLimits(fallback=Row())
_ALIGNMENT_BYTES = 16


def unit_regions(
    shapes: Sequence[Sequence[int]],
    num_shards: int,
    itemsize: int,
    granularities: Sequence[Granularity] | None = None,
    *,
    block_numel: int = 1,
) -> tuple[Region, ...]:
    """Lay out tensors that share dtype and strategy.

    Args:
        granularities: where each may be cut. None: between slices of the first dimension, or between the rows of
            those tensors that would pad the buffers by more than a percent that way.
        block_numel: tensors begin and shards are cut at multiples of so many elements only, so that blocks counted
            from a tensor's first element are never cut.
    Raises:
        LayoutError: padding beyond ``PaddingLimits``.
    """
    limits = _LIMITS if granularities is None else PaddingLimits()
    return plan_regions(
        shapes,
        num_shards,
        granularity=granularities or [first_dimension_granularity(shape) for shape in shapes],
        alignment_bytes=max(_ALIGNMENT_BYTES, block_numel * itemsize),
        itemsize=itemsize,
        limits=limits,
    )
