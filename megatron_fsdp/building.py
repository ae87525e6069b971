"""GroupBuilder: from a unit's parameters to its parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from dbuffer import Granularity
from megatron_fsdp.fused_linear import fuse_linear_layers
from megatron_fsdp.meshes import ShardingTarget, buffer_device
from megatron_fsdp.offload import Offload
from megatron_fsdp.ownership import OwnedParameter, granularities
from megatron_fsdp.parameter_group import ParameterGroup
from megatron_fsdp.precision import MixedPrecisionPolicy
from megatron_fsdp.regions import unit_regions
from megatron_fsdp.weights import GroupSpec

__all__ = ["GranularityChoice", "GroupBuilder"]

GranularityChoice = Granularity | Callable[[nn.Parameter], Granularity | None] | None


class GroupBuilder:
    """Makes the parameter groups of one unit."""

    def __init__(
        self,
        target: ShardingTarget,
        policy: MixedPrecisionPolicy,
        offload: Offload,
        grad_divisor: float,
        granularity: GranularityChoice,
    ) -> None:
        self._target = target
        self._policy = policy
        self._offload = offload
        self._granularity = granularity
        self._divisor = target.mesh.size() * grad_divisor

    def __call__(self, like: Sequence[OwnedParameter], name: str) -> Iterator[ParameterGroup]:
        """Yield the groups (one per region) for parameters that can share buffers."""
        first = like[0].parameter
        dtypes = self._policy.dtypes_for(first.dtype, requires_grad=first.requires_grad)
        for parameter in like:
            parameter.trained_main_dtype = self._policy.dtypes_for(first.dtype, requires_grad=True).stepped
        mesh, placements = self._target.mesh, self._target.placements
        spec = GroupSpec(mesh, placements, buffer_device(mesh), dtypes, self._divisor, is_meta=first.is_meta)
        spec = replace(spec, fuses_weight_gradients=self._policy.fuse_weight_gradients)
        if spec.fuses_weight_gradients:
            fuse_linear_layers(like)
        if like[0].is_replicated:
            spec = replace(spec, placements=placements.no_shard_on_all_axes())
        elif self._offload.is_on:
            spec = replace(spec, is_offloaded=True, is_pinned=self._offload.is_pinned)
        regions = unit_regions(
            [parameter.shape for parameter in like],
            spec.placements.num_shards([mesh.size(axis) for axis in range(mesh.ndim)]),
            min(dtype.itemsize for dtype in (dtypes.compute, dtypes.main, dtypes.reduce, dtypes.main_grad)),
            None if self._granularity is None else granularities(like, self._granularity),
        )
        for region in regions:
            yield ParameterGroup([like[index] for index in region.indices], region.plan, spec, name)
