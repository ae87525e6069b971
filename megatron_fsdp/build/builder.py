"""Group a unit's parameters by flat buffer, and plan the layout and the kind of each buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import (
    Flat,
    Granularity,
    PaddingLimits,
    Plan,
    Region,
    Row,
    first_dimension_granularity,
    plan_regions,
)
from dbuffer_kernels.switches import is_off
from megatron_fsdp.build.ownership import OwnedParameter, settle_grad_dtypes
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.policy.mesh import ShardingTarget, buffer_device
from megatron_fsdp.policy.offload import CPUOffloadPolicy
from megatron_fsdp.policy.precision import GroupDtypes, MixedPrecisionPolicy
from megatron_fsdp.policy.strategy import Placements

__all__ = ["GranularityChoice", "GroupOptions", "GroupPlan", "GroupSpec", "plan_groups"]

GranularityChoice = Granularity | Callable[[nn.Parameter], Granularity | None] | None
"""Where shards may be cut: one rule for all parameters, or a function that returns the rule of each.

None cuts between slices of dimension 0.
"""

# PyTorch's tools support cuts between slices of the first dimension best. Only weights of few, large slices need finer
# ones: Mixtral's eight experts over 64 ranks would take five times their size.
_LIMITS = PaddingLimits(fallback=Row())
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Everything a group is built from except its parameters.

    Attributes:
        mesh: the data-parallel axes alone. placements: the strategy on these axes.
        device: of compute. dtypes: of the four copies.
        divisor: gradients are divided by this, by default the number of data-parallel ranks.
        is_offloaded: main weights, resting weights and main gradients live in CPU memory. is_pinned: that memory is
            page-locked, so that a GPU can read it.
        is_meta: the parameters are on the meta device: nothing is allocated before ``materialize``.
        fuses_weight_gradients: as the policy's ``fuse_weight_gradients``.
        keeps_gathered: the memory of gathered weights stays when they are resharded.
        has_own_granularity: the user set where shards may be cut.
        has_own_divisor: the user set ``divisor``, independent of the number of ranks.
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
    has_own_granularity: bool = False
    has_own_divisor: bool = False

    @property
    def gathers_main_weights(self) -> bool:
        """Return whether gathers read main weights and cast them, so that the group has no separate resting weights.

        False if resting weights are unsharded in another dtype, or sharded more coarsely than main weights.
        """
        parameter, dtypes = self.placements.parameter, self.dtypes
        return parameter == self.placements.optimizer and (dtypes.main is dtypes.compute or Flat() in parameter)

    @property
    def compute_device(self) -> torch.device:
        """The device of gathered weights and packed gradients."""
        return torch.device("meta") if self.is_meta else self.device

    @property
    def resting_device(self) -> torch.device:
        """The device of main weights, resting weights and main gradients."""
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
class GroupOptions:
    """The arguments of ``fully_shard`` that concern the groups of one unit.

    Attributes:
        divisor: of gradients, on top of the number of data-parallel ranks.
    """

    target: ShardingTarget
    policy: MixedPrecisionPolicy
    offload: CPUOffloadPolicy | None
    divisor: float
    granularity: GranularityChoice


def plan_groups(owned: Sequence[OwnedParameter], options: GroupOptions) -> list[GroupPlan]:
    """Return the groups of a unit: one per region of parameters that can share buffers.

    Raises:
        ConfigError: ``param_dtype_override_fn`` returned something else than it may, or a granularity cuts inside rows.
    """
    for each in owned:
        each.policy = options.policy.for_parameter(each.name, each.parameter)
    settle_grad_dtypes(owned, options.policy, [each.parameter for each in owned])
    alike: dict[tuple[object, ...], list[OwnedParameter]] = {}
    for each in owned:
        alike.setdefault(_group_key(each, options), []).append(each)
    plans = []
    for members in alike.values():
        spec = _spec(members[0], options)
        for region in _regions(members, spec, options):
            plans.append(GroupPlan([members[index] for index in region.indices], region.plan, spec))
    return plans


def _gather_dtype(owned: OwnedParameter, options: GroupOptions) -> str | None:
    """Return the dtype in which a parameter is gathered, if it is not the compute dtype."""
    may_pack = owned.parameter.is_floating_point() and not owned.is_replicated and owned.extension is None
    is_matrix = len(owned.shape) > 1 and owned.parameter.numel() > 0
    return options.policy.gather_dtype if may_pack and is_matrix else None


def _group_key(owned: OwnedParameter, options: GroupOptions) -> tuple[object, ...]:
    """Return the properties that parameters in one group have in common.

    A parameter with its own all-gather is a separate group. So is one with the attribute ``fsdp_own_group``: then only
    its own shape decides where it is cut.
    """
    parameter = owned.parameter
    is_alone = owned.extension is not None or getattr(parameter, "fsdp_own_group", False)
    return (
        parameter.dtype, parameter.requires_grad, parameter.is_meta, owned.is_replicated,
        None if owned.tensor_parallel is None else owned.tensor_parallel.key, owned.policy.param_dtype,
        owned.grad_dtype,
        id(owned) if is_alone else None, _gather_dtype(owned, options),
    )  # fmt: skip


def _spec(first: OwnedParameter, options: GroupOptions) -> GroupSpec:
    own, mesh, placements = first.parameter, options.target.mesh, options.target.placements
    is_bytes = first.extension is not None and first.extension.is_packed
    dtypes = first.dtypes_for(torch.uint8 if is_bytes else own.dtype, requires_grad=own.requires_grad)
    offload = None if first.is_replicated else options.offload
    is_fused = first.extension is None and not is_off("fused-gradients")
    return GroupSpec(
        mesh,
        Placements.no_shard(*placements.dp_axes) if first.is_replicated else placements,
        buffer_device(mesh),
        replace(dtypes, gather=_gather_dtype(first, options)),
        # Invariant sums need a divisor that does not depend on the mesh, and the user has to give it.
        math.inf if options.policy.reduction == "invariant" else mesh.size() * options.divisor,
        is_offloaded=offload is not None,
        is_pinned=offload is not None and offload.pin_memory,
        is_meta=own.is_meta,
        fuses_weight_gradients=is_fused and options.policy.fuse_weight_gradients,
        has_own_granularity=options.granularity is not None,
    )


# ---------------------------------------------------------------- layout


def _regions(alike: Sequence[OwnedParameter], spec: GroupSpec, options: GroupOptions) -> Sequence[Region]:
    """Lay out parameters that share buffers."""
    num_shards = spec.placements.num_shards(spec.mesh.shape)
    # Unsharded weights with hooks are refused where their buffers are made.
    if alike[0].extension is not None and num_shards == options.target.num_weight_shards:
        return [_even_region(alike[0], num_shards, spec.dtypes)]
    shapes = [one.shape for one in alike]
    if options.granularity is not None:
        asked = [granularity_of(one, options.granularity) for one in alike]
        return unit_regions(shapes, num_shards, spec.dtypes, asked, PaddingLimits())
    return unit_regions(shapes, num_shards, spec.dtypes)


def unit_regions(
    shapes: Sequence[Sequence[int]],
    num_shards: int,
    dtypes: GroupDtypes,
    granularity: Sequence[Granularity] | None = None,
    limits: PaddingLimits = _LIMITS,
) -> tuple[Region, ...]:
    """Lay out tensors that share dtypes and strategy.

    Args:
        granularity: for each tensor, where it may be cut. None: between slices of the first dimension.
    """
    itemsize = min(dtype.itemsize for dtype in (dtypes.compute, dtypes.main, dtypes.reduce, dtypes.main_grad))
    return plan_regions(
        shapes,
        num_shards,
        granularity=granularity or [first_dimension_granularity(shape) for shape in shapes],
        # Tensors start, and shards are cut, at multiples of blocks. So no block of a tensor is ever cut.
        alignment_bytes=max(_ALIGNMENT_BYTES, dtypes.block_numel * itemsize),
        itemsize=itemsize,
        limits=limits,
    )


def granularity_of(parameter: OwnedParameter, granularity: GranularityChoice) -> Granularity:
    """Return a parameter's granularity: the one that the user chose, or slices of the first dimension.

    Raises:
        ConfigError: the asked granularity cuts inside rows of the last dimension, which a DTensor cannot describe.
    """
    asked, shape = granularity(parameter.parameter) if callable(granularity) else granularity, parameter.shape
    if asked is None:
        return first_dimension_granularity(shape)
    row_numel, unit_numel = shape[-1] if len(shape) > 1 else 1, asked.unit_numel(shape)
    if row_numel and unit_numel % row_numel and unit_numel < math.prod(shape):
        raise ConfigError(
            f"parameter {parameter.name!r} of shape {shape}: granularity {asked} would cut inside a row of "
            f"{row_numel} elements, which no DTensor can describe. fix: granularity=Row() or coarser"
        )
    return asked


def _even_region(parameter: OwnedParameter, num_shards: int, dtypes: GroupDtypes) -> Region:
    """Lay out a parameter with hooks without padding, so that each rank has the same number of its rows."""
    numel = math.prod(parameter.shape)
    if numel // num_shards % dtypes.block_numel:
        raise ConfigError(
            f"parameter {parameter.name!r} of shape {parameter.shape} has hooks, which need equal numbers of rows on "
            f"{num_shards} ranks: {numel // num_shards} elements, no multiple of {dtypes.block_numel}, as "
            "MixedPrecisionPolicy(moments=) needs. fix: leave moments= out of the policy, or shard the plain weight"
        )
    rows = first_dimension_granularity(parameter.shape)
    return Region((0,), Plan((parameter.shape,), (rows,), num_shards, (0,), numel // num_shards))
