"""GroupPlanner: from a unit's parameters to what its parameter groups are built from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from dbuffer import Granularity, Plan
from megatron_fsdp.meshes import ShardingTarget, buffer_device
from megatron_fsdp.offload import Offload
from megatron_fsdp.ownership import OwnedParameter, granularities
from megatron_fsdp.precision import MixedPrecisionPolicy
from megatron_fsdp.regions import unit_regions
from megatron_fsdp.weights import GroupSpec

__all__ = ["GranularityChoice", "GroupPlan", "GroupPlanner"]

GranularityChoice = Granularity | Callable[[nn.Parameter], Granularity | None] | None


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One parameter group to be built.

    Attributes:
        owned: its parameters. plan: where each lies in the flat buffers. spec: everything else.
    """

    owned: Sequence[OwnedParameter]
    plan: Plan
    spec: GroupSpec


class GroupPlanner:
    """Divides parameters of one unit into groups."""

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

    def __call__(self, like: Sequence[OwnedParameter]) -> Iterator[GroupPlan]:
        """Yield the groups (one per region) for parameters that can share buffers."""
        first = like[0].parameter
        dtypes = self._policy.dtypes_for(first.dtype, requires_grad=first.requires_grad)
        for parameter in like:
            parameter.trained_main_dtype = self._policy.dtypes_for(first.dtype, requires_grad=True).stepped
        mesh, placements = self._target.mesh, self._target.placements
        spec = GroupSpec(mesh, placements, buffer_device(mesh), dtypes, self._divisor, is_meta=first.is_meta)
        spec = replace(spec, fuses_weight_gradients=self._policy.fuse_weight_gradients)
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
            yield GroupPlan([like[index] for index in region.indices], region.plan, spec)
