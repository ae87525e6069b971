"""The part of a tensor that each rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.tensor import DTensor

from dbuffer import DBuffer
from dbuffer.mesh import MeshAxis
from megatron_fsdp.engine.param_group import ParameterGroup

__all__ = ["axes_of", "holders_of", "local_of", "local_range"]


def axes_of(groups: Iterable[ParameterGroup]) -> tuple[MeshAxis, ...]:
    """Return the data-parallel axes of some parameter groups that have more than one rank, each once."""
    axes = {id(axis.gather_group): axis for group in groups for axis in group.main_weight.axes if axis.size > 1}
    return tuple(axes.values())


def local_of(tensor: Any) -> Any:
    """Return the local tensor of a DTensor; any other value unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_range(buffer: DBuffer, index: int) -> tuple[int, int]:
    """Return where in this rank's part of the buffer its part of one tensor begins and ends."""
    held = buffer.layout.held(index)
    if not held:
        return 0, 0
    start = buffer.plan.offsets[index] + held.start - buffer.layout.start
    return start, start + len(held)


def holders_of(offset: int, numel: int, shard_numel: int) -> tuple[tuple[int, range], ...]:
    """Return the shards of a flat buffer that hold a tensor, with the range of its elements that each has."""
    shards = range(offset // shard_numel, -(-(offset + numel) // shard_numel)) if numel else ()
    return tuple(
        (shard, range(max(shard * shard_numel - offset, 0), min((shard + 1) * shard_numel - offset, numel)))
        for shard in shards
    )
