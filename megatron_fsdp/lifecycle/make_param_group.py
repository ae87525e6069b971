"""How parameter groups and their parameters are made, and what becomes of them and of units between steps."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer, FlatDTensor, Plan
from dbuffer.dtensor.attribute_ops import rebind, refuse_uses
from dbuffer.dtensor.autograd import accept_plain_gradients
from dbuffer.dtensor.placed_tensor import Label, label
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.ownership import OwnedParameter, mark_owned, settle_grad_dtypes
from megatron_fsdp.engine.backward import UnitGradientListener
from megatron_fsdp.engine.freshness import Freshness
from megatron_fsdp.engine.grads import GradientBuffer, LanePacker, should_pack_on_lane
from megatron_fsdp.engine.param_group import ParameterGroup, WeightBuffers, note_group
from megatron_fsdp.engine.params import (
    NEVER,
    FSDPParams,
    ParamModuleInfos,
    Place,
    WeightHandle,
    gradient_hook,
    gradient_hook_on_streams,
    handle_of,
)
from megatron_fsdp.engine.reduce import ReduceFunction, make_reduction
from megatron_fsdp.engine.streams import compute_of, join_lanes
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.engine.unsharded_param import KINDS, UnshardedParam
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.lifecycle.replaced_params import replace_original
from megatron_fsdp.policy.precision import MixedPrecisionPolicy, grad_dtype_of, set_grad_dtype
from megatron_fsdp.variants.gather_hooks import ExtensionHooks, extension_weights
from megatron_fsdp.variants.hooked_weights import packed_weights
from megatron_fsdp.variants.invariant_reduction import InvariantReduction, invariant_gradients
from megatron_fsdp.variants.memory_slots import place_unit

__all__ = [
    "follow_grad_dtypes", "follow_gradients", "follow_requires_grad", "forget_originals", "leave_taken_gradients",
    "make_over",
    "make_param_group", "make_unit", "make_weights", "materialize_group", "materialize_unit", "rebuild", "rename_unit",
    "restore_group", "set_divisor", "set_reduction", "shown_over",
]  # fmt: skip


def make_param_group(owned: Sequence[OwnedParameter], plan: Plan, spec: GroupSpec, name: str) -> ParameterGroup:
    """Return a group with the values of these parameters. The caller must still call ``register``."""
    group = ParameterGroup(owned, plan, spec, name)
    # Before the buffers: their memory goes back to an allocator that knows nothing of lanes.
    weakref.finalize(group, join_lanes).atexit = False
    _build(group, spec)
    if not spec.is_meta:
        group.weights.fill([parameter.local_tensor for parameter in owned])
    return group


def make_weights(owned: Sequence[OwnedParameter], plan: Plan, spec: GroupSpec, name: str) -> WeightBuffers:
    """Return the weight buffers of a group, with zeros for main weights."""
    if owned[0].extension is not None:
        return extension_weights(owned[0], plan, spec, name)
    if spec.dtypes.gather is not None:
        return packed_weights(plan, spec, name)
    return WeightBuffers(plan, spec, name)


def _build(
    group: ParameterGroup,
    spec: GroupSpec,
    known: Sequence[nn.Parameter] = (),
    weights: WeightBuffers | None = None,
) -> None:
    """Make the buffers and the parameters of a group.

    Args:
        known: sharded parameters that stay the same objects, over other memory.
        weights: weight buffers that exist already.
    """
    group.spec, group.is_meta = spec, spec.is_meta
    if weights is None:
        weights = make_weights(group.owned, group.plan, spec, group.name)
    weights.keeps_gathered = spec.keeps_gathered
    group.weights, group.rests_whole = weights, weights.rests_whole
    group.main_weight, group.model_weight, group.gathered = weights.main, weights.model, weights.gathered
    params = group.fsdp_params = _make_params(group, weights, known)
    note_params(group)
    for index, owned in enumerate(group.owned):
        set_requires_grad(params, index, owned.parameter.requires_grad)
    if weights.remainder is not None:
        weights.remainder.watch(params.sharded_params)
    if not group.rests_whole:
        # Not earlier, because PyTorch makes views on allocated memory only.
        params.released()
        group.weights.release()
    group.gradient_buffer = None
    if any(param.requires_grad for param in params.sharded_params):
        make_gradients(group)
    group.freshness = Freshness(params.counted, group.freshness.num_changes)


def _make_params(group: ParameterGroup, weights: WeightBuffers, known: Sequence[nn.Parameter]) -> FSDPParams:
    extension = weights.hooks if isinstance(weights.hooks, ExtensionHooks) else None
    sharded = [
        _standing_for(
            each,
            weights.sharded_rows(index, each) if extension is None else extension.sharded_rows(),
            each.parameter.requires_grad,
        )
        for index, each in enumerate(group.owned)
    ]
    for old, new in zip(known, sharded, strict=True) if known else ():
        assert isinstance(old, FlatDTensor)
        assert isinstance(new, FlatDTensor)
        rebind(old, new)
    unsharded, reference = [], weakref.ref(group)
    for index, each in enumerate(group.owned):
        weight = weights.unsharded_param(index, each) if extension is None else extension.used
        if not isinstance(weight, UnshardedParam):
            _with_attributes(each, weight)
        weight._fsdp_handle = WeightHandle(reference, each.name)  # type: ignore[attr-defined]  # an attribute of its own
        unsharded.append(weight)
    params = FSDPParams(group.owned, weights.main, list(known) or sharded, unsharded, KINDS)
    if extension is not None:
        params.subclass = extension.take_part(sharded[0])
    return params


def _standing_for(owned: OwnedParameter, value: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    param = nn.Parameter(value, requires_grad=requires_grad)
    if owned.kind is not None:
        param.__class__ = _sharded_kind(type(param), owned.kind)
    return _with_attributes(owned, param)


@functools.cache
def _sharded_kind(sharded: type, kind: type[nn.Parameter]) -> Any:
    """Return a class of sharded parameters that is a user's subclass of ``nn.Parameter`` as well."""
    return type(f"Sharded{kind.__name__}", (sharded, kind), {"__module__": __name__})


def _with_attributes(owned: OwnedParameter, param: nn.Parameter) -> nn.Parameter:
    """Copy the attributes that users set on the original parameter. A subclass keeps inner tensors there: skip it."""
    for name, attribute in vars(owned.parameter).items() if owned.extension is None else ():
        setattr(param, name, attribute)
    return param


def set_requires_grad(params: FSDPParams, index: int, requires_grad: bool) -> None:
    """Set ``requires_grad`` of an unsharded parameter; if True, also add the hook that receives its gradient."""
    used = params.unsharded_params[index]
    used.requires_grad_(requires_grad)
    params.required[index] = requires_grad
    if requires_grad and not used._post_accumulate_grad_hooks:
        group, compute = handle_of(used).group, compute_of(used.device)
        if compute is None:
            hook = gradient_hook(group, index, params.begun if params.is_small[index] else NEVER, params.came)
        else:
            begun = params.begun if params.is_small[index] else params.begun_on_lane
            current = partial(compute.streams.current_id, compute.device)
            hook = gradient_hook_on_streams(group, index, begun, params.came, params.last_turn, current)
        torch.Tensor.register_post_accumulate_grad_hook(used, hook)  # type: ignore[no-untyped-call]  # torch's stub


def note_params(group: ParameterGroup) -> None:
    """Let the sharded parameters be found by name, and the group by them; refuse what would have no effect on them."""
    params = group.fsdp_params
    params.module_infos = make_module_infos(params.owned, params.sharded_params, params.unsharded_params)
    # Every in-place operator on a sharded parameter changes the version of the rows below it.
    locals_ = [param._local_tensor for param in params.sharded_params if isinstance(param, DTensor)]
    params.counted[:] = [params.main_weight.local_buffer, *locals_]
    group.parameters = dict(zip((each.name for each in group.owned), params.sharded_params, strict=True))
    for owned, param, weight in zip(group.owned, params.sharded_params, params.unsharded_params, strict=True):
        note_group(param, group)
        mark_owned(param, group.name, owned.name)
        handle = handle_of(weight)
        reasons = {"hook": partial(_no_hooks, handle), "convert": partial(_no_conversion, handle)}
        refuse_uses(param, name=partial(_words, handle), **reasons)
        label(param, Label(partial(_words, handle), _OUTSIDE, group.spec.dtypes.compute))
        if isinstance(param, FlatDTensor):
            accept_plain_gradients(param)
        if grad_dtype_of(param) == "own":
            set_grad_dtype(param, owned.grad_dtype)


_OUTSIDE = (
    "make the module whose forward reads the weight the unit (fully_shard(attention) instead of its out_proj); or read "
    "it in a forward (compute the loss in model.forward, or in a method for which register_fsdp_forward_method(model, "
    "name) was called); a forward that is a generator can return a list"
)


def _words(handle: WeightHandle) -> str:
    return handle.words


def _no_hooks(handle: WeightHandle) -> str:
    return (
        f"{handle.words}: register_hook on a sharded parameter would never be called, as autograd knows the gathered "
        "weights alone. Use register_post_accumulate_grad_hook(hook): it gets the parameter when .grad, the gradient "
        "averaged over ranks, is there, and may change that in place."
    )


def _no_conversion(handle: WeightHandle) -> str:
    return (
        f"{handle.words}: .to(), .cpu(), .float(), .half() and the like of a module that shows it. The parameters of a "
        "unit share one buffer, so one of them cannot have another dtype or device than the rest. fix: convert the "
        "module before fully_shard, or the whole model after it. MixedPrecisionPolicy sets dtypes of compute and "
        "gradients; CPUOffloadPolicy() keeps weights in CPU memory; p.full_tensor() gives copies to move."
    )


def make_gradients(group: ParameterGroup) -> None:
    """Make gradient buffers for parameters that are trained."""
    spec, dtypes = group.spec, group.spec.dtypes
    if dtypes.reduction is None:
        packer = LanePacker() if should_pack_on_lane(spec, group.fsdp_params) else None
        reduction = make_reduction(group.main_weight, spec)
        group.gradient_buffer = GradientBuffer(group.main_weight, spec, group.fsdp_params, reduction, packer)
    else:
        group.gradient_buffer = invariant_gradients(group.main_weight, spec, group.fsdp_params)
    group.gradient_buffer.rename(group.name)
    group.gradient_buffer.weigh(group.gradient_weight)
    set_reduction(group)
    if dtypes.reduce.itemsize > dtypes.compute.itemsize:
        # Keep autograd functions' gradients in their own dtype when it is wider than the compute dtype.
        for param in group.fsdp_params.unsharded_params:
            param.grad_dtype = None


def materialize_group(group: ParameterGroup) -> None:
    """Allocate the buffers of a group that was built from meta parameters, with zeros; no-op for any other.

    Like ``nn.Module.to_empty`` this makes new parameter objects: build optimizers afterwards.
    """
    if group.is_meta:
        for owned, param in zip(group.owned, group.fsdp_params.sharded_params, strict=True):
            owned.parameter.requires_grad_(param.requires_grad)
        _build(group, replace(group.spec, is_meta=False))
        group.fsdp_params.module_infos.register()


def rebuild(group: ParameterGroup, spec: GroupSpec) -> None:
    """Make other buffers, with undefined content, under the parameters, which stay the same objects."""
    _build(group, spec, group.fsdp_params.sharded_params)
    group.fsdp_params.module_infos.register()


def make_over(
    params: Sequence[nn.Parameter],
    owned: Sequence[OwnedParameter],
    plan: Plan,
    spec: GroupSpec,
    like: ParameterGroup,
    weights: WeightBuffers,
) -> ParameterGroup:
    """Return a group over other weight buffers, under sharded parameters that stay the same objects.

    Args:
        params: the sharded parameters, in plan order. owned: what they were made from.
        like: a group; its name and the user's hooks on reductions are copied.
    """
    group = ParameterGroup(owned, plan, spec, like.name)
    weakref.finalize(group, join_lanes).atexit = False
    group.reduce_hook, group.reduce_function = like.reduce_hook, like.reduce_function
    weights.gather_function = like.weights.gather_function
    for each, param in zip(owned, params, strict=True):
        # A parameter that was materialized has the one on the meta device there.
        each.parameter = param
    _build(group, spec, params, weights)
    return group


def restore_group(group: ParameterGroup, values: Sequence[nn.Parameter]) -> None:
    """Put the sharded parameters of a group back over its buffers, after ``make_over`` took them.

    Args:
        values: tensors over the group's main weights, in plan order.
    """
    for param, value in zip(group.fsdp_params.sharded_params, values, strict=True):
        rebind(param, value)  # type: ignore[arg-type]  # both are sharded
    note_params(group)
    if group.gradient_buffer is not None:
        make_gradients(group)


def forget_originals(group: ParameterGroup) -> None:
    """Free the original parameters, which take the memory of the whole unit, and make later uses raise."""
    for owned, param in zip(group.owned, group.fsdp_params.sharded_params, strict=True):
        mark_owned(owned.parameter, group.name, owned.name)
        words = f"unit {group.name!r}, parameter {owned.name!r}"
        if owned.parameter.requires_grad:
            owned.parameter.register_post_accumulate_grad_hook(partial(_refuse_original, words))
        if not group.is_meta and owned.extension is None:
            replace_original(owned.parameter, param, words)
        if not group.is_meta:
            # Frees the original, unless the user keeps a reference.
            owned.parameter = param
            if owned.extension is not None:
                owned.extension = owned.extension.emptied()


def _refuse_original(words: str, original: torch.Tensor) -> None:
    original.grad = None
    raise StateError(
        f"{words}: a backward came to the tensor that the parameter was before fully_shard, which a list, a closure or "
        "a module that is not sharded has kept. Its gradient would be this rank's alone. fix: read the "
        "parameter from its module in each forward; or call fully_shard on a module that contains all its users"
    )


# ---------------------------------------------------------------- how gradients are reduced


def set_divisor(group: ParameterGroup, divisor: float) -> None:
    """Divide summed gradients by ``divisor`` from now on.

    Raises:
        StateError: see ``GradientBuffer.divide_by``.
    """
    if group.gradient_buffer is not None:
        group.gradient_buffer.divide_by(divisor)
    group.spec = replace(group.spec, divisor=divisor, has_own_divisor=True)


def set_reduction(
    group: ParameterGroup, *, hook: Callable[[torch.Tensor], None] | None = None, function: ReduceFunction | None = None
) -> None:
    """Set the hook on reduced gradients or the function that replaces the reduce-scatter; None keeps the current one.

    Raises:
        ConfigError: a replacement, or a hook, where the policy has the engine add up itself.
    """
    reduction, accumulate = group.spec.dtypes.reduction, group.spec.dtypes.accumulate
    if reduction is not None and (hook is not None or function is not None):
        raise ConfigError(
            f"unit {group.name!r}: a custom reduce-scatter and a hook on reduced gradients have an order of their own, "
            f"but the policy says reduction={reduction!r}. fix: give one of the two"
        )
    if function is not None and accumulate is not None:
        raise ConfigError(
            f"unit {group.name!r}: a custom reduce-scatter adds up by itself, but the policy says "
            f"accumulate_dtype={accumulate}. fix: give one of the two"
        )
    group.reduce_hook, group.reduce_function = hook or group.reduce_hook, function or group.reduce_function
    if group.gradient_buffer is not None:
        group.gradient_buffer.reduction.hook, group.gradient_buffer.reduction.function = (
            group.reduce_hook,
            group.reduce_function,
        )


# ---------------------------------------------------------------- where parameters are registered


def make_module_infos(
    owned: Sequence[OwnedParameter], sharded: Sequence[nn.Parameter], unsharded: Sequence[nn.Parameter]
) -> ParamModuleInfos:
    """Return the modules and names of parameters, with the sharded and unsharded parameter of each."""
    places: list[Place] = []
    indices: list[int] = []
    modules: list[tuple[weakref.ref[nn.Module], str]] = []
    for index, (parameter, resting, used) in enumerate(zip(owned, sharded, unsharded, strict=True)):
        for info in parameter.param_module_infos:
            places.append((info.module._parameters, info.attribute, resting, used))
            indices.append(index)
            if type(info.module).__setattr__ is not nn.Module.__setattr__:
                modules.append((weakref.ref(info.module), info.attribute))
    return ParamModuleInfos(places, indices, modules)


@contextmanager
def shown_over(params: FSDPParams, values: DBuffer) -> Iterator[None]:
    """Register parameters over another buffer of the same plan, inside the block, in place of the sharded ones."""
    shown = [
        _standing_for(owned, params.wrap(index, values.get_dtensor(index)), param.requires_grad)
        for index, (owned, param) in enumerate(zip(params.owned, params.sharded_params, strict=True))
    ]
    make_module_infos(params.owned, shown, params.unsharded_params).register()
    try:
        yield
    finally:
        params.module_infos.register()


# ---------------------------------------------------------------- what becomes of a unit between steps


def make_unit(
    name: str, modules: Sequence[nn.Module], groups: Sequence[ParameterGroup], policy: MixedPrecisionPolicy
) -> Unit:
    """Return the unit of some modules."""
    unit = Unit(name, modules, groups, policy)
    follow_gradients(unit)
    return unit


def follow_gradients(unit: Unit) -> None:
    """Update the unit after gradient buffers were made or changed (materialization, freezing, unfreezing)."""
    if unit.slots.sizing is not None:
        place_unit(unit)
    unit.count_gradients()
    for buffer in unit.gradient_buffers:
        buffer.listener = UnitGradientListener(unit)
        if isinstance(buffer.reduction, InvariantReduction):
            buffer.reduction.unit = unit.reference


def follow_requires_grad(unit: Unit, group: ParameterGroup, changed: Sequence[int]) -> None:
    """Update the unit after parameters of a group were frozen or unfrozen.

    Args:
        changed: the indices of these parameters.
    Raises:
        StateError: an unfrozen parameter has no main weight of the dtype that the policy wants.
    """
    params, main = group.fsdp_params, group.spec.dtypes.main
    for index in changed:
        owned, trained = group.owned[index], params.sharded_params[index].requires_grad
        if trained and group.gradient_buffer is None:
            wanted = owned.dtypes_for(main, requires_grad=True).stepped
            if wanted is not main:
                raise StateError(
                    f"unit {group.name!r}: parameter {owned.name!r} was frozen when it was sharded, so it has no main "
                    f"weight of {wanted}. fix: call fully_shard while it is trainable, and freeze it afterwards; or "
                    "leave main_params_dtype None"
                )
            make_gradients(group)
        assert group.gradient_buffer is not None
        set_requires_grad(params, index, trained)
        group.gradient_buffer.binding.trained[index] = trained
    follow_gradients(unit)


def leave_taken_gradients(unit: Unit, group: ParameterGroup) -> None:
    """Make another gradient buffer if the user still has a tensor in ``main_grad``, so that it keeps its values."""
    old = group.gradient_buffer
    assert old is not None
    old.binding.release_if_dropped()
    if not old.binding.memory.is_taken or old.binding.sum is not None:
        # A sum under way lies in the same memory, and is refused or dropped first.
        return
    try:
        make_gradients(group)
        follow_gradients(unit)
    except BaseException:
        group.gradient_buffer = old
        unit.count_gradients()
        raise
    old.is_replaced = True


def materialize_unit(unit: Unit) -> None:
    """Allocate the buffers of parameters that were on the meta device."""
    for group in unit.groups:
        materialize_group(group)
    follow_gradients(unit)


def rename_unit(unit: Unit, name: str) -> None:
    """Take the name that the unit has below a (new) root."""
    unit.name = name
    for group in unit.groups:
        group.name = name
        group.weights.rename(name)
        if group.gradient_buffer is not None:
            group.gradient_buffer.rename(name)


def follow_grad_dtypes(unit: Unit) -> None:
    """Lay out a unit's gradients as the ``grad_dtype`` of its sharded parameters says, before the first backward.

    Raises:
        StateError: parameters that share a buffer want different dtypes, or have a gradient.
    """
    if unit.root.backward.number:
        return
    owned = [each for group in unit.groups for each in group.owned]
    params = [param for group in unit.groups for param in group.fsdp_params.sharded_params]
    if all(each.grad_dtype == grad_dtype_of(param) for each, param in zip(owned, params, strict=True)):
        return
    settle_grad_dtypes(owned, unit.policy, params)
    for group in unit.groups:
        first = group.owned[0]
        for other in group.owned:
            if other.grad_dtype != first.grad_dtype:
                raise StateError(
                    f"unit {group.name!r}: parameter {first.name!r} has grad_dtype={first.grad_dtype} and "
                    f"{other.name!r} has {other.grad_dtype}, and their gradients share a buffer. fix: set grad_dtype "
                    "before fully_shard, which makes two buffers then, or set it on both"
                )
        if any(param.grad is not None for param in group.fsdp_params.sharded_params):
            raise StateError(
                f"unit {group.name!r}: grad_dtype of parameter {first.name!r} was changed while it has a gradient. "
                "fix: set it before the first forward, or call zero_grad() first"
            )
        if group.gradient_buffer is not None:
            group.spec = replace(group.spec, dtypes=first.policy.with_gradients(group.spec.dtypes, first.grad_dtype))
            make_gradients(group)
    follow_gradients(unit)
