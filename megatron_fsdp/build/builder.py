"""GroupPlanner: from a unit's parameters to what its parameter groups are built from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import Granularity, Plan, Region
from dbuffer_kernels.switches import is_off
from megatron_fsdp.build.grouping import even_region, gathers_main_weights, granularities, group_parameters
from megatron_fsdp.build.ownership import OwnedParameter, settle_grad_dtypes
from megatron_fsdp.build.packed_layout import is_packed, layout_regions
from megatron_fsdp.policy.mesh import ShardingTarget, buffer_device
from megatron_fsdp.policy.offload import Offload
from megatron_fsdp.policy.precision import GroupDtypes, MixedPrecisionPolicy
from megatron_fsdp.policy.strategy import Placements

__all__ = [
    "GranularityChoice",
    "GroupPlan",
    "GroupPlanner",
    "GroupSpec",
]

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
        # Invariant sums are divided by what does not depend on the mesh, which has to be said first.
        self._divisor = math.inf if policy.reduction else target.mesh.size() * grad_divisor

    def plans(self, owned: Sequence[OwnedParameter]) -> list[GroupPlan]:
        """Return the groups of a unit: one per region of parameters that can share buffers.

        Raises:
            ConfigError: ``param_dtype_override_fn`` returned something else than it may.
        """
        for each in owned:
            each.policy = self._policy.for_parameter(each.name, each.parameter)
        settle_grad_dtypes(owned, self._policy, [each.parameter for each in owned])
        return [plan for like in group_parameters(owned) for plan in self._plans(like)]

    def _plans(self, like: Sequence[OwnedParameter]) -> Iterator[GroupPlan]:
        # Apart those that travel packed.
        gather = None if like[0].is_replicated or like[0].extension is not None else self._policy.gather_dtype
        packed = [one for one in like if one.parameter.is_floating_point() and is_packed(one.shape, gather)]
        others = [one for one in like if not any(one is other for other in packed)]
        if packed:
            yield from self._groups(packed, gather)
        if others:
            yield from self._groups(others, None)

    def _groups(self, like: Sequence[OwnedParameter], gather: str | None) -> Iterator[GroupPlan]:
        first = like[0].parameter
        dtypes = replace(like[0].dtypes_for(first.dtype, requires_grad=first.requires_grad), gather=gather)
        for parameter in like:
            parameter.trained_main_dtype = parameter.dtypes_for(first.dtype, requires_grad=True).stepped
        extension = like[0].extension
        if extension is not None and extension.is_packed:
            dtypes = like[0].dtypes_for(torch.uint8, requires_grad=False)
            for parameter in like:
                parameter.trained_main_dtype = None
        mesh, placements = self._target.mesh, self._target.placements
        spec = GroupSpec(mesh, placements, buffer_device(mesh), dtypes, self._divisor, is_meta=first.is_meta)
        is_fused = extension is None and not is_off("fused-gradients")
        fuses = self._policy.fuse_weight_gradients if is_fused else False
        spec = replace(spec, fuses_weight_gradients=fuses)
        if like[0].is_replicated:
            spec = replace(spec, placements=placements.no_shard_on_all_axes())
        elif self._offload.is_on:
            spec = replace(spec, is_offloaded=True, is_pinned=self._offload.is_pinned)
        for region in self._regions(like, spec):
            yield GroupPlan([like[index] for index in region.indices], region.plan, spec)

    def _regions(self, like: Sequence[OwnedParameter], spec: GroupSpec) -> Sequence[Region]:
        num_shards = spec.placements.num_shards([spec.mesh.size(axis) for axis in range(spec.mesh.ndim)])
        # What rests whole is refused where its buffers are made.
        if like[0].extension is not None and num_shards == self._target.num_weight_shards:
            return [even_region(one, num_shards, spec.dtypes) for one in like]
        return layout_regions(
            [parameter.shape for parameter in like],
            num_shards,
            spec.dtypes,
            None if self._granularity is None else granularities(like, self._granularity),
        )


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Everything a group is built from besides its parameters.

    Attributes:
        mesh: of the data-parallel axes alone. placements: the strategy on these axes.
        device: where compute happens. dtypes: of the four copies.
        divisor: gradients are divided by this (the number of data-parallel ranks unless told otherwise).
        is_offloaded: main weights, weights at rest and gradients live in CPU memory. is_pinned: in pages that a GPU
            reads.
        is_meta: the parameters are on the meta device: nothing is allocated before ``materialize``.
        fuses_weight_gradients: as the policy's ``fuse_weight_gradients``.
        keeps_gathered: the memory of gathered weights stays when they are resharded.
    """

    mesh: DeviceMesh
    placements: Placements
    device: torch.device
    dtypes: GroupDtypes
    divisor: float
    is_offloaded: bool = False
    is_pinned: bool = False
    is_meta: bool = False
    fuses_weight_gradients: bool | str = True
    keeps_gathered: bool = False

    @property
    def gathers_main_weights(self) -> bool:
        """Whether no compute weights rest beside main weights."""
        return gathers_main_weights(self.placements, self.dtypes, is_offloaded=self.is_offloaded)

    @property
    def compute_device(self) -> torch.device:
        """Where gathered weights and packed gradients live."""
        return torch.device("meta") if self.is_meta else self.device

    @property
    def resting_device(self) -> torch.device:
        """Where main weights, weights at rest and main gradients live."""
        return torch.device("cpu") if self.is_offloaded and not self.is_meta else self.compute_device
