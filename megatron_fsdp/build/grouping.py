"""Grouping: which of a unit's parameters share a flat buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from dbuffer import Flat, Granularity, PaddingLimits, Plan, Region, Row, first_dimension_granularity, plan_regions
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.policy.precision import GradDtype, GroupDtypes
from megatron_fsdp.policy.strategy import Placements

__all__ = [
    "GranularityChoice", "GroupKey", "even_region", "gathers_main_weights", "granularities", "group_parameters",
    "grouped", "unit_regions",
]  # fmt: skip

T = TypeVar("T")
GranularityChoice = Granularity | Callable[[nn.Parameter], Granularity | None] | None
"""Where shards may be cut: as one says, or a function of each parameter; None: between slices of dimension 0."""


class GroupKey(NamedTuple):
    """What parameters agree in that share buffers.

    Attributes:
        dtype: the parameters' own. split: how they are sharded over axes that are not data-parallel.
        param_dtype, grad_dtype: the policy's for these parameters, and what was set on them.
        alone: the identity of a parameter that is a group by itself: it brings an all-gather of its own, or its
            attribute ``fsdp_own_group`` is set, so that nothing but its own shape decides where it is cut.
    """

    dtype: torch.dtype
    requires_grad: bool
    is_replicated: bool
    is_meta: bool = False
    split: object = None
    param_dtype: torch.dtype | None = None
    grad_dtype: GradDtype = "own"
    alone: int | None = None


def grouped(parameters: Iterable[T], key: Callable[[T], GroupKey]) -> list[tuple[GroupKey, list[T]]]:
    """Split parameters, or what stands for them, into groups that can share buffers, in the order of their first."""
    groups: dict[GroupKey, list[T]] = {}
    for parameter in parameters:
        groups.setdefault(key(parameter), []).append(parameter)
    return list(groups.items())


def group_parameters(owned: Iterable[OwnedParameter]) -> list[list[OwnedParameter]]:
    """Split a unit's parameters into groups that can share buffers."""
    return [alike for _, alike in grouped(owned, _key)]


def _key(owned: OwnedParameter) -> GroupKey:
    parameter, split = owned.parameter, None if owned.split is None else owned.split.key
    is_alone = owned.extension is not None or getattr(parameter, "fsdp_own_group", False)
    alone = id(owned) if is_alone else None
    own = (parameter.dtype, parameter.requires_grad, owned.is_replicated, parameter.is_meta)
    return GroupKey(*own, split, owned.policy.param_dtype, owned.grad_dtype, alone)


def gathers_main_weights(placements: Placements, dtypes: GroupDtypes) -> bool:
    """Whether gathers cast main weights on their way: not where compute weights rest whole, or coarser than these."""
    is_alike = placements.parameter == placements.optimizer
    return is_alike and (dtypes.main is dtypes.compute or Flat() in placements.parameter)


def granularities(owned: Sequence[OwnedParameter], granularity: GranularityChoice) -> list[Granularity]:
    """Return where each parameter may be cut: as asked, else between slices of the first dimension.

    Raises:
        ConfigError: the asked granularity cuts inside rows of the last dimension, which a DTensor cannot describe.
    """
    result = []
    for parameter in owned:
        asked, shape = granularity(parameter.parameter) if callable(granularity) else granularity, parameter.shape
        row_numel = shape[-1] if len(shape) > 1 else 1
        unit_numel = 0 if asked is None else asked.unit_numel(shape)
        if row_numel and unit_numel % row_numel and unit_numel < math.prod(shape):
            raise ConfigError(
                f"parameter {parameter.name!r} of shape {shape}: granularity {asked} would cut inside a row of "
                f"{row_numel} elements, which no DTensor can describe; the finest here is Row()"
            )
        result.append(first_dimension_granularity(shape) if asked is None else asked)
    return result


# Cutting between slices of the first dimension is what PyTorch's tools understand best, and enough but for weights
# of few, large slices: Mixtral's eight experts over 64 ranks would take five times their size.
_LIMITS = PaddingLimits(fallback=Row())
_ALIGNMENT_BYTES = 16


def unit_regions(
    shapes: Sequence[Sequence[int]], num_shards: int, dtypes: GroupDtypes, asked: Sequence[Granularity] | None = None
) -> tuple[Region, ...]:
    """Lay out tensors that share dtypes and strategy.

    Args:
        asked: where each may be cut. None: between slices of the first dimension, or between the rows of
            those tensors that would pad the buffers by more than a percent that way.
    """
    itemsize = min(dtype.itemsize for dtype in (dtypes.compute, dtypes.main, dtypes.reduce, dtypes.main_grad))
    # Tensors begin and shards are cut at multiples of blocks, so that blocks counted from a tensor's first element
    # are never cut.
    return plan_regions(
        shapes,
        num_shards,
        granularity=asked or [first_dimension_granularity(shape) for shape in shapes],
        alignment_bytes=max(_ALIGNMENT_BYTES, dtypes.block_numel * itemsize),
        itemsize=itemsize,
        limits=_LIMITS if asked is None else PaddingLimits(),
    )


def even_region(parameter: OwnedParameter, num_shards: int, dtypes: GroupDtypes) -> Region:
    """Lay out a parameter with hooks of its own without padding, so that each rank holds as many of its rows."""
    numel = math.prod(parameter.shape)
    if numel // num_shards % dtypes.block_numel:
        raise ConfigError(
            f"parameter {parameter.name!r} of shape {parameter.shape} has hooks of its own, which need as many rows on "
            f"each of {num_shards} ranks: {numel // num_shards} elements, no multiple of {dtypes.block_numel}, as "
            "MixedPrecisionPolicy(moments=) needs. Leave moments= out of the unit's policy, or shard the plain weight."
        )
    rows = first_dimension_granularity(parameter.shape)
    return Region((0,), Plan((parameter.shape,), (rows,), num_shards, (0,), numel // num_shards))
