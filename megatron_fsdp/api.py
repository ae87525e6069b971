"""fully_shard: turn modules into units of the sharding engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from dbuffer import PlacementError
from dbuffer.mesh import make_groups, mesh_axes
from megatron_fsdp.build.builder import GranularityChoice, GroupOptions, plan_groups
from megatron_fsdp.build.no_shard import is_no_shard
from megatron_fsdp.build.ownership import OwnedParameter, collect_parameters, mark_ignored
from megatron_fsdp.build.shared_memory import refuse_shared_memory
from megatron_fsdp.checks.added_params import watch_tree
from megatron_fsdp.checks.agreement import Wrapping
from megatron_fsdp.checks.attach import attach_root
from megatron_fsdp.checks.unowned_params import refuse_unowned_steps
from megatron_fsdp.engine.optimizer_steps import add_first_step_check
from megatron_fsdp.engine.post_backward import share_reductions
from megatron_fsdp.engine.recovery import settle
from megatron_fsdp.engine.unit import Unit, units_below
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.installation import check_torch
from megatron_fsdp.lifecycle.make_param_group import forget_originals, make_param_group
from megatron_fsdp.lifecycle.module import FSDPModule, convert, unit_of
from megatron_fsdp.lifecycle.unit_changes import make_unit, rename_unit
from megatron_fsdp.optim.stock.flat_step import attend_optimizers
from megatron_fsdp.policy.mesh import buffer_device, sharding_target, warn_of_one_queue
from megatron_fsdp.policy.offload import offload_of, warn_without_gloo
from megatron_fsdp.policy.precision import as_policy
from megatron_fsdp.policy.strategy import Placements
from megatron_fsdp.variants.memory_slots import check_reshard, reshard_to

__all__ = ["fully_shard", "microbatch", "no_sync", "replicate", "share_comm_ctx"]

M = TypeVar("M", bound="nn.Module | list[nn.Module]")

check_torch(torch.__version__)


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

    Call it bottom-up: on every block, then on the whole model. Each call creates a unit of the parameters that no
    nested unit owns. The unit's weights are gathered before its forward and its backward and released afterwards. The
    module's class becomes ``FSDP<Class>``. Every rank of the mesh must make the same calls in the same order. A call
    that raises does so on all ranks and does not change the module.

    Args:
        module: a module, or a list of modules that run one after the other as one unit, such as a final norm and the
            head.
        mesh: data-parallel device mesh; two axes mean (outer replicas, inner shards). None: one axis over all ranks, on
            CUDA if available, else on CPU. Without a process group, one is initialised: of the job that torchrun, srun
            or mpirun started (docs/launch.md), else of this process alone.
        placements: the sharding strategy. None: ZeRO-3 over the (inner) axis.
        reshard_after_forward: release the gathered weights between forward and backward. None: yes, except for the
            root and the last unit of forward. An int: shard them over groups of that many neighbouring ranks after
            forward, so that backward gathers within such a group.
        mp_policy: ``MixedPrecisionPolicy`` of this package or of ``torch.distributed.fsdp``.
        offload_policy: PyTorch's ``CPUOffloadPolicy()`` keeps shards of weights and gradients in CPU memory.
            ``pin_memory=True`` lets copies overlap with compute; pinned memory cannot be swapped out.
        ignored_params: parameters that are neither sharded nor reduced.
        granularity: where a parameter may be cut into shards: one value, or a function of the parameter. None: between
            slices of the first dimension.
        grad_divisor: divides the gradients in addition to the number of data-parallel ranks.
        shard_placement_fn: for FSDP2 code; may return ``Shard(0)`` or None.
        dp_mesh_dims: ``DataParallelMeshDims`` of this package or of PyTorch: the data-parallel axes of a larger
            ``mesh``.
    Returns:
        ``module``.
    Raises:
        ConfigError: a module, parameter or setting cannot be sharded as requested; names the parameter and the fix.
        OwnershipError: another unit owns a parameter.
        PlacementError, LayoutError, MeshError: the flat buffers cannot be laid out as requested.

    Example:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"fully_shard got a {type(mesh).__name__} as its mesh, not a DeviceMesh. fix: init_device_mesh(...); "
            "instead of Megatron-FSDP's fully_shard(module, optimizer, ...), call "
            "megatron_fsdp.megatron.fully_shard_model_and_optimizer(module, optimizer, ...)"
        )
    modules: list[nn.Module] = list(module) if isinstance(module, list) else [module]
    with Wrapping(mesh) as wrapping:
        _check_modules(modules)
        if modules and all(is_no_shard(each) for each in modules):
            return module
        name = type(modules[0]).__name__
        target = sharding_target(mesh, placements, dp_mesh_dims)
        wrapping.begin(name, target.mesh)
        axes = mesh_axes(target.mesh)
        policy = as_policy(mp_policy)
        ignored = tuple(ignored_params or ())
        owned = collect_parameters(modules, ignored, target)
        refuse_shared_memory(modules, owned, _owned_below(modules))
        _check_shard_placement(owned, shard_placement_fn)
        offload = offload_of(offload_policy, target.placements)
        if offload is not None:
            warn_without_gloo(target.mesh)
        warn_of_one_queue(target.mesh)
        # Do not change the module before all ranks have passed the checks.
        buffers = _moved_buffers(modules, buffer_device(target.mesh), owned)
        plans = plan_groups(owned, GroupOptions(target, policy, offload, grad_divisor, granularity))
        groups = [make_param_group(each.owned, each.plan, each.spec, name) for each in plans]
        unit = make_unit(name, modules, groups, policy)
        check_reshard(unit, reshard_after_forward)
        wrapping.agree(name, groups, reshard_after_forward)
        if groups:
            make_groups(axes)
    for registry, key, buffer in buffers:
        registry[key] = buffer
    put_in_place(unit, modules, owned, reshard_after_forward, ignored)
    return module


def put_in_place(
    unit: Unit,
    modules: Sequence[nn.Module],
    owned: Sequence[OwnedParameter],
    reshard_after_forward: bool | int | None = None,
    ignored: Sequence[nn.Parameter] = (),
) -> None:
    """Attach a new unit to its modules, replace their parameters and make it the root of the units below."""
    reshard_to(unit, reshard_after_forward)
    mark_ignored(modules, ignored)
    for each in modules:
        watch_tree(each, {id(parameter) for parameter in ignored})
    convert(modules, unit)
    for group in unit.groups:
        forget_originals(group)
    add_first_step_check(refuse_unowned_steps)
    attend_optimizers()
    _adopt_units(modules, unit)


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ConfigError("fully_shard got an empty list of modules. fix: pass a module, or a list of at least one")
    for module in modules:
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            raise ConfigError(f"fully_shard got a {name}. fix: pass an nn.Module or a list of them")
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name} is compiled by torch.jit. fix: call fully_shard on the nn.Module that it was compiled from"
            )
        if isinstance(module, FSDPModule):
            raise ConfigError(f"{name} is sharded already. fix: call fully_shard once on each module, children first")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ConfigError(
                f"{name} has no forward, so its weights cannot be gathered before one. fix: call fully_shard on each "
                "of its modules, or on the module that calls them"
            )
        for unit in units_below(module):
            settle(unit.root)
        ordered = next((unit for unit in units_below(module) if unit.root.order is not None), None)
        if ordered is not None:
            raise ConfigError(
                f"{name} contains unit {ordered.name!r}, whose root has a forward order already. fix: call "
                "set_forward_order() after the last fully_shard, on the outermost module"
            )


def _owned_below(modules: Sequence[nn.Module]) -> list[OwnedParameter]:
    units = {id(unit): unit for module in modules for unit in units_below(module)}
    return [owned for unit in units.values() for group in unit.groups for owned in group.owned]


def _moved_buffers(
    modules: Sequence[nn.Module], device: torch.device, owned: Sequence[OwnedParameter]
) -> list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
    """Check the parameters' device, and copy the modules' buffers to it.

    Parameters on CPU are moved later, when their shards are copied.

    Returns:
        For each copied buffer: the dict and the key under which the module stores it, and the copy.
    """
    for parameter in owned:
        found = parameter.parameter.device
        if found.type not in (device.type, "cpu", "meta"):
            raise ConfigError(
                f"parameter {parameter.name!r} is on {found} but the mesh is on {device.type!r}. fix: "
                f"module.to({device.type!r}) before fully_shard, or pass a mesh of {found.type!r}"
            )
    below = {id(module): module for root in modules for module in root.modules()}
    return [
        (module._buffers, name, buffer.to(device))
        for module in below.values()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.device != device and not buffer.is_meta
    ]


def _check_shard_placement(
    owned: Sequence[OwnedParameter], shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None
) -> None:
    if shard_placement_fn is None:
        return
    for parameter in owned:
        placement = shard_placement_fn(parameter.parameter)
        if placement is not None and placement != Shard(0):
            raise PlacementError(
                f"parameter {parameter.name!r}: shard_placement_fn returned {placement!r}, but flat buffers are cut "
                "along the first dimension only. fix: return Shard(0) or None; granularity= sets where the first "
                "dimension may be cut"
            )


def _adopt_units(modules: Sequence[nn.Module], root: Unit) -> None:
    """Put the new root unit and all units below it under one schedule; name them relative to the root's module."""
    units: dict[int, Unit] = {id(root): root}
    for position, module in enumerate(modules):
        prefix = f"{position}." if len(modules) > 1 else ""
        for path, child in module.named_modules():
            if isinstance(child, FSDPModule):
                unit = child._fsdp_unit
                if id(unit) not in units:
                    units[id(unit)] = unit
                    rename_unit(unit, prefix + path)
    root.inner = [unit.reference for unit in units.values() if unit is not root]
    attach_root(root, units.values())


# FSDP2 code asks fully_shard.state(module).
fully_shard.state = unit_of  # type: ignore[attr-defined]


def replicate(module: M, mesh: DeviceMesh | None = None, **options: Any) -> M:
    """Replicate parameters on every rank and all-reduce their gradients: ``fully_shard`` with ``no_shard``.

    Args:
        module: as in ``fully_shard``.
        mesh: as in ``fully_shard``, but the parameters are replicated along all axes.
        options: the keyword arguments of ``fully_shard``, except ``placements``. With ``dp_mesh_dims`` the parameters
            are replicated along all axes that it names.
    Returns:
        ``module``.
    Raises:
        ConfigError: ``placements`` is given; or as in ``fully_shard``.
        OwnershipError: as in ``fully_shard``.

    Example:
        for block in model.blocks:
            replicate(block)
        replicate(model)  # DDP over the same engine
    """
    if "placements" in options:
        raise ConfigError(
            f"replicate(placements={options['placements']}): it replicates over every axis. fix: leave placements out, "
            "or call fully_shard with them"
        )
    dims = options.get("dp_mesh_dims")
    mesh = sharding_target(None, None, dims).mesh if mesh is None else mesh
    num_axes = mesh.ndim if dims is None else bool(dims.replicate_names) + bool(dims.shard_names)
    return fully_shard(module, mesh, Placements.no_shard(*range(num_axes)), **options)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Apply one memory limit to the packed gradients of several roots, such as the stages of a pipeline.

    All units of a process share communication streams and communicators even without this call.

    Args:
        modules: root modules.
    Raises:
        StateError: a module is not sharded.

    Example:
        stages = [fully_shard(block) for block in model.blocks]
        share_comm_ctx(stages)
    """
    roots = [unit_of(module).root for module in modules]
    for root in roots[1:]:
        share_reductions(root, roots[0])


@contextmanager
def microbatch(model: nn.Module, is_last: bool) -> Iterator[None]:
    """Run the forward and the backward of one microbatch of an optimizer step inside the block.

    With ZeRO-2 and ZeRO-3 every microbatch reduces gradients; with ZeRO-1 and ``no_shard`` only the last one does.

    Args:
        model: a sharded model.
        is_last: whether this is the last microbatch before ``optimizer.step()``.

    Example:
        for index, part in enumerate(batches, start=1):
            with microbatch(model, is_last=index == len(batches)):
                model(part).square().mean().backward()
        optimizer.step()
    """
    with _set_for_now([unit.root.backward for unit in units_below(model)], "is_last", is_last):
        yield


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients on this rank, without communication, in the backwards inside the block.

    The next backward outside of the block reduces the sum. Until then each unit keeps a packed gradient buffer.

    Raises:
        StateError: no module of ``model`` is sharded.

    Example:
        with no_sync(model):
            model(batches[0]).square().mean().backward()
        model(batches[1]).square().mean().backward()  # reduces the sum of both
    """
    units = list(units_below(model))
    if not units:
        raise StateError(f"{type(model).__name__} holds no sharded module. fix: call fully_shard on it first")
    with _set_for_now(units, "requires_gradient_sync", False):
        yield


@contextmanager
def _set_for_now(objects: Sequence[object], attribute: str, value: bool) -> Iterator[None]:
    before = [getattr(each, attribute) for each in objects]
    for each in objects:
        setattr(each, attribute, value)
    try:
        yield
    finally:
        for each, old in zip(objects, before, strict=True):
            setattr(each, attribute, old)
