"""From a unit's parameters to what its parameter groups are built from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import Plan, Region
from dbuffer_kernels.switches import is_off
from megatron_fsdp.build.grouping import (
    GranularityChoice,
    even_region,
    gathers_main_weights,
    granularities,
    group_parameters,
)
from megatron_fsdp.build.ownership import OwnedParameter, settle_grad_dtypes
from megatron_fsdp.build.packed_layout import is_packed, layout_regions
from megatron_fsdp.policy.mesh import ShardingTarget, buffer_device
from megatron_fsdp.policy.offload import CPUOffloadPolicy
from megatron_fsdp.policy.precision import GroupDtypes, MixedPrecisionPolicy
from megatron_fsdp.policy.strategy import Placements

__all__ = ["GroupPlan", "GroupSpec", "Wishes", "plan_groups"]


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
        return gathers_main_weights(self.placements, self.dtypes)

    @property
    def compute_device(self) -> torch.device:
        """Where gathered weights and packed gradients live."""
        return torch.device("meta") if self.is_meta else self.device

    @property
    def resting_device(self) -> torch.device:
        """Where main weights, weights at rest and main gradients live."""
        return torch.device("cpu") if self.is_offloaded and not self.is_meta else self.compute_device


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One parameter group to be built.

    Attributes:
        owned: its parameters. plan: where each lies in the flat buffers. spec: everything else.
    """

    owned: Sequence[OwnedParameter]
    plan: Plan
    spec: GroupSpec


@dataclass(frozen=True, slots=True)
class Wishes:
    """What ``fully_shard`` was asked for, of the groups of one unit.

    Attributes:
        divisor: of gradients, on top of the number of data-parallel ranks.
    """

    target: ShardingTarget
    policy: MixedPrecisionPolicy
    offload: CPUOffloadPolicy | None
    divisor: float
    granularity: GranularityChoice


def plan_groups(owned: Sequence[OwnedParameter], wishes: Wishes) -> list[GroupPlan]:
    """Return the groups of a unit: one per region of parameters that can share buffers.

    Raises:
        ConfigError: ``param_dtype_override_fn`` returned something else than it may, or a granularity cuts inside rows.
    """
    for each in owned:
        each.policy = wishes.policy.for_parameter(each.name, each.parameter)
    settle_grad_dtypes(owned, wishes.policy, [each.parameter for each in owned])
    return [plan for alike in group_parameters(owned) for plan in _plans(alike, wishes)]


def _plans(alike: Sequence[OwnedParameter], wishes: Wishes) -> Iterator[GroupPlan]:
    first = alike[0]
    may_pack = first.parameter.is_floating_point() and not first.is_replicated and first.extension is None
    asked = wishes.policy.gather_dtype if may_pack else None
    for gather in dict.fromkeys((asked, None)):
        members = [one for one in alike if is_packed(one.shape, asked) is (gather is not None)]
        if members:
            spec = _spec(first, wishes, gather)
            for region in _regions(members, spec, wishes):
                yield GroupPlan([members[index] for index in region.indices], region.plan, spec)


def _spec(first: OwnedParameter, wishes: Wishes, gather: str | None) -> GroupSpec:
    own, mesh, placements = first.parameter, wishes.target.mesh, wishes.target.placements
    is_bytes = first.extension is not None and first.extension.is_packed
    dtypes = first.dtypes_for(torch.uint8 if is_bytes else own.dtype, requires_grad=own.requires_grad)
    offload = None if first.is_replicated else wishes.offload
    is_fused = first.extension is None and not is_off("fused-gradients")
    return GroupSpec(
        mesh,
        placements.no_shard_on_all_axes() if first.is_replicated else placements,
        buffer_device(mesh),
        replace(dtypes, gather=gather),
        # Invariant sums are divided by what does not depend on the mesh, which has to be said first.
        math.inf if wishes.policy.reduction else mesh.size() * wishes.divisor,
        is_offloaded=offload is not None,
        is_pinned=offload is not None and offload.pin_memory,
        is_meta=own.is_meta,
        fuses_weight_gradients=is_fused and wishes.policy.fuse_weight_gradients,
    )


def _regions(alike: Sequence[OwnedParameter], spec: GroupSpec, wishes: Wishes) -> Sequence[Region]:
    num_shards = spec.placements.num_shards(spec.mesh.shape)
    # What rests whole is refused where its buffers are made.
    if alike[0].extension is not None and num_shards == wishes.target.num_weight_shards:
        return [even_region(one, num_shards, spec.dtypes) for one in alike]
    asked = None if wishes.granularity is None else granularities(alike, wishes.granularity)
    return layout_regions([one.shape for one in alike], num_shards, spec.dtypes, asked)
