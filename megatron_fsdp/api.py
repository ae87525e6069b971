"""fully_shard: turn modules into units of the sharding engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from dbuffer import Partial, PlacementError, Replicate
from dbuffer.mesh import make_reduce_groups, mesh_axes
from megatron_fsdp.build.builder import GranularityChoice, GroupPlan, GroupPlanner
from megatron_fsdp.build.no_shard import is_no_shard
from megatron_fsdp.build.ownership import OwnedParameter, collect_parameters, mark_owned
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.installation import check_torch
from megatron_fsdp.optim.step_hook import attend_optimizers
from megatron_fsdp.policy.megatron_call import refuse_megatron_call
from megatron_fsdp.policy.mesh import buffer_device, sharding_target
from megatron_fsdp.policy.offload import offload_of
from megatron_fsdp.policy.precision import MixedPrecisionPolicy, as_policy
from megatron_fsdp.policy.strategy import Placements
from megatron_fsdp.runtime.guards.agreement import Wrapping
from megatron_fsdp.runtime.guards.asked_gradients import serve_asked_gradients
from megatron_fsdp.runtime.guards.inner_outputs import InnerOutputs, readers_of
from megatron_fsdp.runtime.lifecycle.convert import convert
from megatron_fsdp.runtime.lifecycle.fsdp2_view import show_state, state_to_come
from megatron_fsdp.runtime.lifecycle.make_param_group import forget_originals, make_param_group
from megatron_fsdp.runtime.lifecycle.module import FSDPModule, unit_of
from megatron_fsdp.runtime.lifecycle.originals import Originals, check_conversion
from megatron_fsdp.runtime.step.backward import Backward
from megatron_fsdp.runtime.step.freshness import mark_replaced
from megatron_fsdp.runtime.step.hooks import Tree
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.step.schedule import Schedule
from megatron_fsdp.runtime.step.unit import Unit, units_below
from megatron_fsdp.runtime.weights.memory_slots import check_reshard, reshard_to

__all__ = ["fully_shard", "microbatch", "no_sync", "replicate", "share_comm_ctx"]

M = TypeVar("M", bound="nn.Module | list[nn.Module]")

check_torch(torch.__version__)
serve_asked_gradients()


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
    **others: NoReturn,
) -> M:
    """Shard a module's parameters, gradients and optimizer state over a mesh, in place.

    Call it bottom-up: on every block, then on the whole model. Each call makes a unit of the parameters that no
    nested unit owns; the unit's
    weights are gathered before its forward and backward and released after. The module's class becomes ``FSDP<Class>``.
    Every rank of the mesh makes the same calls, in the same order. A call that raises leaves the module as it was, and
    raises on all ranks.

    Args:
        module: a module, or a list of modules that run one after the other and form one unit (a final norm and the
            head).
        mesh: data-parallel device mesh; two axes mean (outer replicas, inner shards). None: one axis over all ranks,
            on CUDA where there is
            one, else on CPU; without an initialised process group, the job that torchrun, srun or mpirun started
            (docs/launch.md), or a group of this process alone where none did.
        placements: the sharding strategy. None: ZeRO-3 on the (inner) axis.
        reshard_after_forward: release weights between forward and backward. None: yes, but not of the root, nor of the
            unit that forward uses last. An int: keep a part, such that groups of that many neighbours hold the
            weights together and backward gathers within them.
        mp_policy: ``MixedPrecisionPolicy``, ours or ``torch.distributed.fsdp``'s.
        offload_policy: ``CPUOffloadPolicy()``, ours or ``torch.distributed.fsdp``'s, keeps what rests in CPU memory.
        ignored_params: parameters to leave alone: not sharded, not reduced.
        granularity: where shards may be cut; one for all, or a function of the parameter. None: between slices of
            the first dimension.
        grad_divisor: gradients are divided by it on top of the number of data-parallel ranks.
        shard_placement_fn: for FSDP2 code; may return ``Shard(0)`` or None.
        dp_mesh_dims: ``DataParallelMeshDims``, ours or PyTorch's: the data-parallel axes of a larger ``mesh``.
        others: refused; those of Megatron-FSDP's function of this name with what to call instead.
    Returns:
        ``module``.
    Raises:
        ConfigError: a module, parameter or setting that cannot be sharded as asked; it names the parameter and the
            cure.
        OwnershipError: a parameter that another unit owns.
        PlacementError, LayoutError, MeshError: from the buffers.

    Example:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    """
    refuse_megatron_call(mesh, others)
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
        owned = collect_parameters(modules, _is_unit, ignored, target)
        _check_shard_placement(owned, shard_placement_fn)
        planner = GroupPlanner(target, policy, offload_of(offload_policy, target.placements), grad_divisor, granularity)
        # Until all ranks are through, everything can be put back.
        with Originals(modules):
            _move_to(modules, buffer_device(target.mesh), owned)
            plans = planner.plans(owned)

            def agree(groups: Sequence[ParameterGroup]) -> None:
                wrapping.agree(name, groups, reshard_after_forward)
                if groups:
                    make_reduce_groups(axes)

            unit = make_unit(modules, plans, policy, reshard_after_forward, ignored, agree=agree)
    finish_unit(modules, unit, plans)
    return module


def make_unit(
    modules: Sequence[nn.Module],
    plans: Sequence[GroupPlan],
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | int | None,
    ignored: Sequence[nn.Parameter] = (),
    *,
    agree: Callable[[Sequence[ParameterGroup]], None],
) -> Unit:
    """Make the groups that were planned for modules, and the unit of them; ``agree`` is called in between."""
    name = type(modules[0]).__name__
    has_hooks = any(each.extension is not None for plan in plans for each in plan.owned)
    is_asked = state_to_come(modules, is_released=reshard_after_forward is not False) if has_hooks else nullcontext()
    with is_asked:
        groups = [make_param_group(each.owned, each.plan, each.spec, name) for each in plans]
    unit = Unit(name, modules, groups, policy)
    check_reshard(unit, reshard_after_forward)
    check_conversion(modules)
    agree(groups)
    reshard_to(unit, reshard_after_forward)
    unit.trees = {id(each): Tree(each, {id(parameter) for parameter in ignored}) for each in modules}
    convert(modules, unit)
    if has_hooks:
        show_state(unit, modules)
    return unit


def finish_unit(modules: Sequence[nn.Module], unit: Unit, plans: Sequence[GroupPlan]) -> None:
    """Take over the parameters of a unit that was made, and all units below it."""
    owned = [each for plan in plans for each in plan.owned]
    for parameter in owned:
        mark_owned(parameter.parameter, unit.name, parameter.name)
        mark_replaced(parameter.parameter, parameter.name)
    for group in unit.groups:
        forget_originals(group)
    attend_optimizers()
    unit.inner_outputs = InnerOutputs(readers_of(owned, unit), unit)
    _adopt_units(modules, unit)


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ConfigError("fully_shard got an empty list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"fully_shard takes a module or a list of modules, found {type(module).__name__}")
        if isinstance(module, FSDPModule):
            raise ConfigError(
                f"{type(module).__name__} is sharded already; call fully_shard once on each module, children first"
            )
        if any(isinstance(child, FSDPModule) and unit_of(child).backward.is_manual for child in module.modules()):
            raise ConfigError(
                f"a module below {type(module).__name__} has set_manual_backward_finalization(True), which is the "
                "root's to call: call it on the outermost module, after the last fully_shard"
            )
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ConfigError(
                f"{type(module).__name__} has no forward, so there is no moment to gather its weights; call "
                "fully_shard on each of its modules, or on the module that calls them"
            )


def _move_to(modules: Sequence[nn.Module], device: torch.device, owned: Sequence[OwnedParameter]) -> None:
    """Check the parameters' device, and move buffers to it. Parameters on CPU move when their shards are copied."""
    for parameter in owned:
        found = parameter.parameter.device
        if found.type not in (device.type, "cpu", "meta"):
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
            if isinstance(child, FSDPModule):
                unit = child._fsdp_unit
                if id(unit) not in units:
                    units[id(unit)] = unit
                    unit.rename(prefix + path)
    root.inner = [unit.reference for unit in units.values() if unit is not root]
    schedule.adopt(root, units.values())
    Backward(schedule)


def _state(module: nn.Module) -> Unit:
    """Return the unit that ``fully_shard`` made of a module.

    Raises:
        StateError: ``fully_shard`` was not called on it.
    """
    return unit_of(module)


# FSDP2 code asks fully_shard.state(module).
fully_shard.state = _state  # type: ignore[attr-defined]


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
        target = sharding_target(mesh, None, None)
        axes = tuple(range(target.mesh.ndim))
        whole, summed = (Replicate(),) * len(axes), (Partial("sum"),) * len(axes)
        return fully_shard(module, target.mesh, Placements(axes, whole, summed, whole), **options)
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
    backwards = [unit_of(module).backward for module in modules]
    for backward in backwards[1:]:
        backward.share_reductions(backwards[0])


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
    backwards = {id(unit.backward): unit.backward for unit in units_below(model)}.values()
    before = [backward.is_last for backward in backwards]
    for backward in backwards:
        backward.is_last = is_last
    try:
        yield
    finally:
        for backward, value in zip(backwards, before, strict=True):
            backward.is_last = value


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
    before = [unit.requires_gradient_sync for unit in units]
    for unit in units:
        unit.requires_gradient_sync = False
    try:
        yield
    finally:
        for unit, value in zip(units, before, strict=True):
            unit.requires_gradient_sync = value
