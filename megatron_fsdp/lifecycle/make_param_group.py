"""Make a parameter group, with its buffers, its parameters and their hooks, and change it between steps."""

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
from megatron_fsdp.build.ownership import OwnedParameter, mark_owned
from megatron_fsdp.engine.freshness import Freshness
from megatron_fsdp.engine.grads import GradientBuffer
from megatron_fsdp.engine.lane_packer import LanePacker, should_pack_on_lane
from megatron_fsdp.engine.param_group import ParameterGroup, record_group
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
from megatron_fsdp.engine.unsharded_param import KINDS, UnshardedParam
from megatron_fsdp.engine.weight_buffers import WeightBuffers
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.lifecycle.replaced_params import replace_original
from megatron_fsdp.policy.precision import grad_dtype_of, set_grad_dtype
from megatron_fsdp.variants.gather_hooks import ExtensionHooks, extension_weights
from megatron_fsdp.variants.hooked_weights import packed_weights
from megatron_fsdp.variants.invariant_reduction import invariant_gradients

__all__ = [
    "forget_originals",
    "make_gradients",
    "make_over",
    "make_param_group",
    "make_weights",
    "materialize_group",
    "rebuild",
    "restore_group",
    "set_divisor",
    "set_reduction",
    "set_requires_grad",
    "shown_over",
]


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
    group.spec = spec
    if weights is None:
        weights = make_weights(group.owned, group.plan, spec, group.name)
    weights.keeps_gathered = spec.keeps_gathered
    group.weights = weights
    group.main_weight, group.model_weight, group.gathered = weights.main, weights.model, weights.gathered
    params = group.fsdp_params = _make_params(group, weights, known)
    record_params(group)
    for index, owned in enumerate(group.owned):
        set_requires_grad(params, index, owned.parameter.requires_grad)
    if weights.remainder is not None:
        weights.remainder.watch(params.sharded_params)
    if not group.weights.rests_whole:
        # Not earlier, because PyTorch makes views on allocated memory only.
        params.forbid_reads()
        group.weights.release()
    group.gradient_buffer = None
    if any(param.requires_grad for param in params.sharded_params):
        make_gradients(group)
    group.freshness = Freshness(params.counted, group.freshness.num_changes)


def _make_params(group: ParameterGroup, weights: WeightBuffers, known: Sequence[nn.Parameter]) -> FSDPParams:
    extension = weights.gather_hooks if isinstance(weights.gather_hooks, ExtensionHooks) else None
    sharded = [
        _sharded_param(
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


def _sharded_param(owned: OwnedParameter, value: torch.Tensor, requires_grad: bool) -> nn.Parameter:
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
    params.last_requires_grad[index] = requires_grad
    if requires_grad and not used._post_accumulate_grad_hooks:
        group, compute = handle_of(used).group, compute_of(used.device)
        if compute is None:
            hook = gradient_hook(group, index, params.begun if params.is_small[index] else NEVER, params.came)
        else:
            begun = params.begun if params.is_small[index] else params.begun_on_lane
            current = partial(compute.streams.current_id, compute.device)
            hook = gradient_hook_on_streams(group, index, begun, params.came, params.last_turn, current)
        torch.Tensor.register_post_accumulate_grad_hook(used, hook)  # type: ignore[no-untyped-call]  # torch's stub


def record_params(group: ParameterGroup) -> None:
    """Register the sharded parameters under their names, and their group; refuse uses that would have no effect."""
    params = group.fsdp_params
    params.module_infos = make_module_infos(params.owned, params.sharded_params, params.unsharded_params)
    # Every in-place operator on a sharded parameter changes the version of the rows below it.
    locals_ = [param._local_tensor for param in params.sharded_params if isinstance(param, DTensor)]
    params.counted[:] = [params.main_weight.local_buffer, *locals_]
    group.parameters = dict(zip((each.name for each in group.owned), params.sharded_params, strict=True))
    for owned, param, weight in zip(group.owned, params.sharded_params, params.unsharded_params, strict=True):
        record_group(param, group)
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
    if group.spec.is_meta:
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
    record_params(group)
    if group.gradient_buffer is not None:
        make_gradients(group)


def forget_originals(group: ParameterGroup) -> None:
    """Free the original parameters, which take the memory of the whole unit, and make later uses raise."""
    for owned, param in zip(group.owned, group.fsdp_params.sharded_params, strict=True):
        mark_owned(owned.parameter, group.name, owned.name)
        words = f"unit {group.name!r}, parameter {owned.name!r}"
        if owned.parameter.requires_grad:
            owned.parameter.register_post_accumulate_grad_hook(partial(_refuse_original, words))
        if not group.spec.is_meta and owned.extension is None:
            replace_original(owned.parameter, param, words)
        if not group.spec.is_meta:
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
        _sharded_param(owned, params.wrap(index, values.get_dtensor(index)), param.requires_grad)
        for index, (owned, param) in enumerate(zip(params.owned, params.sharded_params, strict=True))
    ]
    make_module_infos(params.owned, shown, params.unsharded_params).register()
    try:
        yield
    finally:
        params.module_infos.register()
