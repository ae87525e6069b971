"""fully_shard: turn modules into units of the sharding engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from dbuffer import Granularity, plan_regions
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.module import FsdpModule, convert, units_below
from megatron_fsdp.ownership import (
    OwnedParameter,
    collect_parameters,
    granularities,
    group_parameters,
    mark_owned,
)
from megatron_fsdp.parameter_group import GroupSpec, ParameterGroup
from megatron_fsdp.precision import MixedPrecisionPolicy, as_policy
from megatron_fsdp.schedule import Schedule
from megatron_fsdp.strategy import Placements
from megatron_fsdp.unit import Unit

__all__ = ["fully_shard", "microbatch", "no_sync"]

M = TypeVar("M", bound="nn.Module | list[nn.Module]")
GranularityChoice = Granularity | Callable[[nn.Parameter], Granularity | None] | None


def fully_shard(
    module: M,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    *,
    reshard_after_forward: bool | int | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    granularity: GranularityChoice = None,
    grad_divisor: float = 1,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    dp_mesh_dims: Any = None,
) -> M:
    """Shard a module's parameters, gradients and optimizer state over a mesh, in place.

    Call it bottom-up: on every block, then on the whole model. Each call makes a unit of the parameters that no
    nested unit owns; the unit's
    weights are gathered before its forward and backward and released after. The module's class becomes ``FSDP<Class>``.

    Args:
        module: a module, or a list of modules that run one after the other and form one unit (a final norm and the
            head).
        mesh: data-parallel device mesh; two axes mean (outer replicas, inner shards). None: one axis over all ranks,
            on CUDA where there is
            one, else on CPU; without an initialised process group, a group of this process alone, unless a launcher
            set one up.
        placements: the sharding strategy. None: ZeRO-3 on the (inner) axis.
        reshard_after_forward: release weights between forward and backward. None: True, but False for the root. A
            bool; sharding to a smaller
            group (an int) is not supported yet.
        mp_policy: ``MixedPrecisionPolicy``, ours or ``torch.distributed.fsdp``'s.
        offload_policy: only the default (no offload) is supported yet.
        ignored_params: parameters to leave alone: not sharded, not reduced.
        granularity: where shards may be cut; one for all, or a function of the parameter. None: between slices of
            the first dimension.
        grad_divisor: gradients are divided by it on top of the number of data-parallel ranks.
        shard_placement_fn: for FSDP2 code; may return ``Shard(0)`` or None.
        dp_mesh_dims: not supported yet; pass the sub-mesh of the data-parallel axes as ``mesh``.
    Returns:
        ``module``.
    Raises:
        ConfigError: a module, parameter or setting that cannot be sharded as asked; it names the parameter and the
            cure.
        OwnershipError: a parameter that another unit owns.
        PlacementError, LayoutError, MeshError: from the buffers.
    """
    modules: list[nn.Module] = list(module) if isinstance(module, list) else [module]
    _check_modules(modules)
    _refuse_unsupported(reshard_after_forward, offload_policy, dp_mesh_dims)
    mesh = _default_mesh() if mesh is None else mesh
    placements = _default_placements(mesh) if placements is None else placements
    mesh = _data_parallel_mesh(mesh, placements)
    policy = as_policy(mp_policy)
    owned = collect_parameters(modules, lambda child: isinstance(child, FsdpModule), ignored_params or ())
    _check_shard_placement(owned, shard_placement_fn)
    name = type(modules[0]).__name__
    device = _buffer_device(mesh)
    _move_to(modules, device, owned)
    build = _GroupBuilder(mesh, placements, device, policy, grad_divisor, granularity)
    groups = [group for like in group_parameters(owned) for group in build(like, name)]
    for parameter in owned:
        mark_owned(parameter.parameter, name, parameter.name)
    unit = Unit(name, modules, groups, policy, None if reshard_after_forward is None else bool(reshard_after_forward))
    convert(modules, unit)
    _adopt_units(modules, unit)
    return module


class _GroupBuilder:
    """Makes the parameter groups of one unit."""

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Placements,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        grad_divisor: float,
        granularity: GranularityChoice,
    ) -> None:
        self._mesh = mesh
        self._placements = placements
        self._device = device
        self._policy = policy
        self._granularity = granularity
        self._num_shards = placements.num_shards([mesh.size(axis) for axis in range(mesh.ndim)])
        self._divisor = mesh.size() * grad_divisor

    def __call__(self, like: Sequence[OwnedParameter], name: str) -> Iterator[ParameterGroup]:
        """Yield the groups (one per region) for parameters of one dtype and ``requires_grad``."""
        first = like[0].parameter
        dtypes = self._policy.dtypes_for(first.dtype, requires_grad=first.requires_grad)
        spec = GroupSpec(self._mesh, self._placements, self._device, dtypes, self._divisor)
        regions = plan_regions(
            [parameter.shape for parameter in like],
            self._num_shards,
            granularity=granularities(like, self._granularity),
            itemsize=min(dtype.itemsize for dtype in (dtypes.compute, dtypes.main, dtypes.reduce, dtypes.main_grad)),
        )
        for region in regions:
            yield ParameterGroup([like[index] for index in region.indices], region.plan, spec, name)


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ConfigError("fully_shard got an empty list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"fully_shard takes a module or a list of modules, found {type(module).__name__}")
        if isinstance(module, FsdpModule):
            raise ConfigError(
                f"{type(module).__name__} is sharded already; call fully_shard once on each module, children first"
            )
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ConfigError(
                f"{type(module).__name__} has no forward, so there is no moment to gather its weights; call "
                "fully_shard on each of its modules, or on the module that calls them"
            )


def _refuse_unsupported(reshard_after_forward: bool | int | None, offload_policy: Any, dp_mesh_dims: Any) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise ConfigError(
            f"reshard_after_forward={reshard_after_forward!r}: resharding to a smaller group is not supported yet; "
            f"use True, False or None"
        )
    if offload_policy is not None and type(offload_policy).__name__ != "OffloadPolicy":
        raise ConfigError(f"offload_policy={offload_policy!r}: offloading is not supported yet; leave it None")
    if dp_mesh_dims is not None:
        raise ConfigError("dp_mesh_dims is not supported yet; pass mesh=mesh['dp'] (or a tuple of names) instead")


_DEFAULT_MESH: list[Any] = []


def _default_mesh() -> DeviceMesh:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_initialized() and not dist.is_torchelastic_launched():
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    elif not dist.is_initialized():
        dist.init_process_group()
    # One mesh for all units without one: meshes made anew would each bring communicators of their own.
    world = dist.group.WORLD
    if not _DEFAULT_MESH or _DEFAULT_MESH[0] is not world:
        _DEFAULT_MESH[:] = [world, init_device_mesh(device_type, (dist.get_world_size(),))]
    mesh: DeviceMesh = _DEFAULT_MESH[1]
    return mesh


def _default_placements(mesh: DeviceMesh) -> Placements:
    if mesh.ndim == 1:
        return Placements.optim_grads_params(0)
    if mesh.ndim == 2:
        return Placements.hsdp(0, 1)
    raise ConfigError(
        f"the mesh has {mesh.ndim} axes; pass its data-parallel axes alone, mesh['dp'], or give placements="
    )


def _data_parallel_mesh(mesh: DeviceMesh, placements: Placements) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    wanted = [names.index(axis) if axis in names else axis for axis in placements.dp_axes]
    unknown = [axis for axis in wanted if not isinstance(axis, int) or not -mesh.ndim <= axis < mesh.ndim]
    if unknown:
        raise ConfigError(
            f"placements name axes {unknown} that the mesh does not have; its axes are {names or mesh.ndim}"
        )
    positions = [int(axis) % mesh.ndim for axis in wanted]
    if positions == list(range(mesh.ndim)):
        return mesh
    if positions != sorted(positions) or not names:
        raise ConfigError(
            f"placements use axes {placements.dp_axes} of a mesh with axes {names or mesh.ndim}; a part of a mesh "
            f"needs named axes, outermost first"
        )
    return mesh[tuple(names[position] for position in positions)]


def _buffer_device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _move_to(modules: Sequence[nn.Module], device: torch.device, owned: Sequence[OwnedParameter]) -> None:
    """Check the parameters' device, and move buffers to it. Parameters on CPU move when their shards are copied."""
    for parameter in owned:
        found = parameter.parameter.device
        if found.type not in (device.type, "cpu"):
            raise ConfigError(
                f"parameter {parameter.name!r} is on {found} but the mesh is on {device.type!r}; move the module to "
                f"{device.type!r}, or pass a mesh of {found.type!r}"
            )
    for root in modules:
        for module in root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)


def _check_shard_placement(
    owned: Sequence[OwnedParameter], shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None
) -> None:
    if shard_placement_fn is None:
        return
    from dbuffer import PlacementError

    for parameter in owned:
        placement = shard_placement_fn(parameter.parameter)
        if placement is not None and placement != Shard(0):
            raise PlacementError(
                f"parameter {parameter.name!r}: shard_placement_fn returned {placement!r}; flat buffers are cut along "
                "the first dimension only. Use granularity= to say where they may be cut."
            )


def _adopt_units(modules: Sequence[nn.Module], root: Unit) -> None:
    """Put the new outermost unit and all units below it under one schedule, and name them from here."""
    schedule = Schedule()
    units: dict[int, Unit] = {id(root): root}
    for position, module in enumerate(modules):
        prefix = f"{position}." if len(modules) > 1 else ""
        for path, child in module.named_modules():
            if isinstance(child, FsdpModule):
                unit = child._fsdp_unit
                if id(unit) not in units:
                    units[id(unit)] = unit
                    unit.rename(prefix + path)
    schedule.adopt(root, units.values())


@contextmanager
def microbatch(model: nn.Module, is_last: bool) -> Iterator[None]:
    """Run one microbatch of an optimizer step: forward and backward go inside.

    Gradients that rest sharded are reduced each time; those that rest partial only when ``is_last``.
    """
    schedules = {id(unit.schedule): unit.schedule for unit in units_below(model)}.values()
    before = [schedule.is_last_backward for schedule in schedules]
    for schedule in schedules:
        schedule.is_last_backward = is_last
    try:
        yield
    finally:
        for schedule, value in zip(schedules, before, strict=True):
            schedule.is_last_backward = value


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communication: they stay on this rank until a backward outside of the block
    reduces the sum.

    It costs a packed gradient buffer per unit for as long as that takes.
    """
    units = list(units_below(model))
    if not units:
        raise StateError(f"{type(model).__name__} holds no sharded module; call fully_shard on it first")
    before = [unit.requires_gradient_sync for unit in units]
    for unit in units:
        unit.requires_gradient_sync = False
    try:
        yield
    finally:
        for unit, value in zip(units, before, strict=True):
            unit.requires_gradient_sync = value
