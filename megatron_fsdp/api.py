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
from megatron_fsdp.build.builder import GranularityChoice, Wishes, plan_groups
from megatron_fsdp.build.no_shard import is_no_shard
from megatron_fsdp.build.ownership import OwnedParameter, collect_parameters, leave_alone
from megatron_fsdp.build.shared_memory import refuse_shared_memory
from megatron_fsdp.checks.added_params import make_tree
from megatron_fsdp.checks.agreement import Wrapping
from megatron_fsdp.checks.attached import attach_root
from megatron_fsdp.checks.unowned_params import refuse_unowned_steps
from megatron_fsdp.engine.backward import share_reductions
from megatron_fsdp.engine.freshness import hear_of_first_steps
from megatron_fsdp.engine.unit import Unit, units_below
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.installation import check_torch
from megatron_fsdp.lifecycle.make_param_group import forget_originals, make_param_group, make_unit, rename_unit
from megatron_fsdp.lifecycle.module import FSDPModule, convert, unit_of
from megatron_fsdp.optim.flat_step import attend_optimizers
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

    Call it bottom-up: on every block, then on the whole model. Each call makes a unit of the parameters that no nested
    unit owns; its weights are gathered before its forward and backward and released after. The module's class becomes
    ``FSDP<Class>``. Every rank of the mesh makes the same calls, in the same order. A call that raises leaves the
    module as it was, and raises on all ranks.

    Args:
        module: a module, or a list of modules that run one after the other (a final norm and the head) as one unit.
        mesh: data-parallel device mesh; two axes mean (outer replicas, inner shards). None: one axis over all ranks, on
            CUDA where there is one, else on CPU; without an initialised process group, the job that torchrun, srun or
            mpirun started (docs/launch.md), or a group of this process alone where none did.
        placements: the sharding strategy. None: ZeRO-3 on the (inner) axis.
        reshard_after_forward: release weights between forward and backward. None: yes, but not of the root, nor of the
            unit that forward uses last. An int: keep a part, such that groups of that many neighbours hold the
            weights together and backward gathers within them.
        mp_policy: ``MixedPrecisionPolicy``, ours or ``torch.distributed.fsdp``'s.
        offload_policy: ``CPUOffloadPolicy()``, PyTorch's, keeps what rests in CPU memory; ``pin_memory`` is there for
            copies that run beside compute, and is not swapped out.
        ignored_params: parameters to leave alone: not sharded, not reduced.
        granularity: where shards may be cut; one for all, or a function of the parameter. None: between slices of
            the first dimension.
        grad_divisor: gradients are divided by it on top of the number of data-parallel ranks.
        shard_placement_fn: for FSDP2 code; may return ``Shard(0)`` or None.
        dp_mesh_dims: ``DataParallelMeshDims``, ours or PyTorch's: the data-parallel axes of a larger ``mesh``.
    Returns:
        ``module``.
    Raises:
        ConfigError: a module, parameter or setting that cannot be sharded as asked; it names parameter and cure.
        OwnershipError: a parameter that another unit owns.
        PlacementError, LayoutError, MeshError: from the buffers.

    Example:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"fully_shard got a {type(mesh).__name__} as its mesh, not a DeviceMesh. Megatron-FSDP's "
            "fully_shard(module, optimizer, ...) is fully_shard_model_and_optimizer(module, optimizer, ...) here"
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
        # Nothing of the module is changed until all ranks are through.
        buffers = _moved_buffers(modules, buffer_device(target.mesh), owned)
        plans = plan_groups(owned, Wishes(target, policy, offload, grad_divisor, granularity))
        groups = [make_param_group(each.owned, each.plan, each.spec, name) for each in plans]
        unit = make_unit(name, modules, groups, policy)
        check_reshard(unit, reshard_after_forward)
        wrapping.agree(name, groups, reshard_after_forward)
        if groups:
            make_groups(axes, target.placements.optimizer)
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
    """Let a unit that was made have its modules and parameters, and serve all units below it."""
    reshard_to(unit, reshard_after_forward)
    leave_alone(modules, ignored)
    unit.trees = {id(each): make_tree(each, {id(parameter) for parameter in ignored}) for each in modules}
    convert(modules, unit)
    for group in unit.groups:
        forget_originals(group)
    hear_of_first_steps(refuse_unowned_steps)
    attend_optimizers()
    _adopt_units(modules, unit)


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ConfigError("fully_shard got an empty list of modules")
    for module in modules:
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            raise ConfigError(f"fully_shard takes a module or a list of modules, found {name}")
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(f"{name} is compiled; call fully_shard on the nn.Module that it was made from")
        if isinstance(module, FSDPModule):
            raise ConfigError(f"{name} is sharded already; call fully_shard once on each module, children first")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ConfigError(
                f"{name} has no forward, so there is no moment to gather its weights; call fully_shard on each of its "
                "modules, or on the module that calls them"
            )
        ordered = next((unit for unit in units_below(module) if unit.root.order is not None), None)
        if ordered is not None:
            raise ConfigError(
                f"{name} is around unit {ordered.name!r}, whose root has a forward order already. fix: call "
                "set_forward_order() after the last fully_shard, on the outermost module"
            )


def _owned_below(modules: Sequence[nn.Module]) -> list[OwnedParameter]:
    units = {id(unit): unit for module in modules for unit in units_below(module)}
    return [owned for unit in units.values() for group in unit.groups for owned in group.owned]


def _moved_buffers(
    modules: Sequence[nn.Module], device: torch.device, owned: Sequence[OwnedParameter]
) -> list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
    """Check the parameters' device; return buffers that are elsewhere, moved, and where they belong.

    Parameters on CPU move when their shards are copied.
    """
    for parameter in owned:
        found = parameter.parameter.device
        if found.type not in (device.type, "cpu", "meta"):
            raise ConfigError(
                f"parameter {parameter.name!r} is on {found} but the mesh is on {device.type!r}; move the module to "
                f"{device.type!r}, or pass a mesh of {found.type!r}"
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
                f"parameter {parameter.name!r}: shard_placement_fn returned {placement!r}; flat buffers are cut along "
                "the first dimension only. Use granularity= to say where they may be cut."
            )


def _adopt_units(modules: Sequence[nn.Module], root: Unit) -> None:
    """Put the new outermost unit and all units below it under one schedule, and name them from here."""
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
    """Keep parameters whole on every rank and all-reduce their gradients: ``fully_shard`` with ``no_shard``.

    Args:
        mesh: as in ``fully_shard``; every axis of it is one of replicas.
        options: the keyword arguments of ``fully_shard``.

    Example:
        for block in model.blocks:
            replicate(block)
        replicate(model)  # DDP over the same engine
    """
    if options.get("dp_mesh_dims") is None:
        mesh = sharding_target(mesh, None, None).mesh
        options["placements"] = Placements.no_shard(*range(mesh.ndim))
    return fully_shard(module, mesh, **options)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Let several roots (stages of a pipeline) keep the memory rule of one: their packed gradients count together.

    Lanes and communicators are shared by all units of a process in any case.

    Raises:
        StateError: one of them is not sharded.

    Example:
        stages = [fully_shard(block) for block in model.blocks]
        share_comm_ctx(stages)
    """
    roots = [unit_of(module).root for module in modules]
    for root in roots[1:]:
        share_reductions(root, roots[0])


@contextmanager
def microbatch(model: nn.Module, is_last: bool) -> Iterator[None]:
    """Run one microbatch of an optimizer step: forward and backward go inside.

    Gradients that rest sharded are reduced each time; those that rest partial only when ``is_last``.

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
    """Accumulate gradients without communication: they stay on this rank until a backward outside of the block
    reduces the sum.

    It costs a packed gradient buffer per unit for as long as that takes.

    Example:
        with no_sync(model):
            model(batches[0]).square().mean().backward()
        model(batches[1]).square().mean().backward()  # reduces the sum of both
    """
    units = list(units_below(model))
    if not units:
        raise StateError(f"{type(model).__name__} holds no sharded module; call fully_shard on it first")
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
