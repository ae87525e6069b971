"""How parameter groups are made, and what becomes of one between steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from dbuffer import FlatDTensor, Plan
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.ownership import OwnedParameter, mark_owned
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.policy.precision import GradDtype, MixedPrecisionPolicy, grad_dtype_of, set_grad_dtype
from megatron_fsdp.runtime.grads.fuse import fuse_linear_layers
from megatron_fsdp.runtime.grads.invariant_reduction import InvariantGradients
from megatron_fsdp.runtime.grads.late_gradients import LateGradients, packs_late
from megatron_fsdp.runtime.grads.packed_gradients import PackedGradients
from megatron_fsdp.runtime.lifecycle.make_fsdp_params import adopt, attach_params, make_fsdp_params, set_requires_grad
from megatron_fsdp.runtime.lifecycle.param_registry import register
from megatron_fsdp.runtime.step.freshness import Freshness
from megatron_fsdp.runtime.step.lanes import join_lanes
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup, note_group
from megatron_fsdp.runtime.step.reduction import GradientSpec, ReduceFunction
from megatron_fsdp.runtime.weights.extension_hooks import ExtensionWeights, make_extension_params
from megatron_fsdp.runtime.weights.packed_weights import PackedWeights
from megatron_fsdp.runtime.weights.sharded_weights import ShardedWeights

__all__ = [
    "adopt_param",
    "follow_requires_grad",
    "forget_originals",
    "leave_gradients",
    "make_gradients_as",
    "make_param_group",
    "materialize_group",
    "rebuild",
    "rename_group",
    "set_divisor",
    "set_reduction",
]

_WEIGHTS = (ShardedWeights, PackedWeights)


def make_param_group(owned: Sequence[OwnedParameter], plan: Plan, spec: GroupSpec, name: str) -> ParameterGroup:
    """Return the group of some parameters: their buffers, filled with their values, and what modules show of them."""
    if spec.fuses_weight_gradients:
        fuse_linear_layers(owned)
    group = ParameterGroup(owned, plan, spec, name)
    # Before the buffers: their memory goes back to an allocator that knows nothing of lanes.
    weakref.finalize(group, join_lanes).atexit = False
    build(group, spec)
    if not spec.is_meta:
        group.weights.fill([parameter.local_tensor for parameter in owned])
    return group


def build(group: ParameterGroup, spec: GroupSpec, params: Sequence[nn.Parameter] = ()) -> None:
    """Make the buffers and the parameters of a group."""
    group.spec, group.is_meta = spec, spec.is_meta
    if group.owned[0].extension is None:
        weights = _WEIGHTS[spec.dtypes.gather is not None](group.plan, spec, group.name)
        group.fsdp_params = make_fsdp_params(group.owned, weights.main, weights.gathered, params)
    else:
        weights = ExtensionWeights(group.owned[0], group.plan, spec, group.name)
        group.fsdp_params = make_extension_params(group.owned, weights)
    group.weights, group.main_weight = weights, weights.main
    group.model_weight, group.gathered = weights.model, weights.gathered
    attach_params(group.fsdp_params, group)
    group.weights.keeps_gathered = spec.keeps_gathered
    group.parameters = dict(zip((each.name for each in group.owned), group.fsdp_params.sharded_params, strict=True))
    for owned, param in zip(group.owned, group.fsdp_params.sharded_params, strict=True):
        note_group(param, group)
        set_grad_dtype(param, owned.grad_dtype)
        mark_owned(param, group.name, owned.name)
    if group.weights.remainder is not None:
        group.weights.remainder.watch(group.fsdp_params.sharded_params)
    group.rests_whole = group.weights.rests_whole
    if not group.rests_whole:
        # Only now: PyTorch makes views on memory that is there.
        group.fsdp_params.released()
        group.weights.release()
    group.gradients = None
    if any(param.requires_grad for param in group.fsdp_params.sharded_params):
        make_gradients(group)
    register(group.fsdp_params.module_infos)
    group.freshness = Freshness(group.fsdp_params.counted)


def make_gradients(group: ParameterGroup) -> None:
    """Make gradient buffers for parameters that are trained."""
    spec, dtypes = group.spec, group.spec.dtypes
    rest = (
        spec.compute_device, spec.is_offloaded, spec.is_pinned, spec.fuses_weight_gradients, dtypes.accumulate
    )  # fmt: skip
    like = GradientSpec(spec.placements, dtypes.reduce, dtypes.main_grad, spec.divisor, *rest)
    make = LateGradients if packs_late(like, group.fsdp_params) else PackedGradients
    if dtypes.reduction is not None:
        make = InvariantGradients
    group.gradients = make(group.main_weight, like, group.fsdp_params)
    group.gradients.rename(group.name)
    set_reduction(group)
    if dtypes.reduce.itemsize > dtypes.compute.itemsize:
        # What autograd's functions give in more than the compute dtype is not rounded to it.
        for param in group.fsdp_params.unsharded_params:
            param.grad_dtype = None


def make_gradients_as(group: ParameterGroup, policy: MixedPrecisionPolicy, grad_dtype: GradDtype) -> None:
    """Make other gradient buffers, of the dtypes that are asked for; before any gradient came."""
    if group.gradients is not None:
        group.spec = replace(group.spec, dtypes=policy.with_gradients(group.spec.dtypes, grad_dtype))
        make_gradients(group)


def check_main_dtype(group: ParameterGroup, index: int) -> None:
    """Refuse to train a parameter whose main weight has not the dtype that the policy wants.

    Raises:
        StateError: it has not.
    """
    wanted = group.owned[index].trained_main_dtype
    if wanted is not None and wanted is not group.spec.dtypes.main:
        raise StateError(
            f"unit {group.name!r}: parameter {group.owned[index].name!r} was frozen when it was sharded, so it has "
            f"no main weight of {wanted}. Call fully_shard while it is trainable, and freeze it afterwards; or "
            f"leave main_params_dtype None."
        )


def materialize_group(group: ParameterGroup) -> None:
    """Allocate the buffers of a group that was built from meta parameters, with zeros; no-op for any other.

    Like ``nn.Module.to_empty`` this makes new parameter objects: build optimizers afterwards.
    """
    if group.is_meta:
        for owned, param in zip(group.owned, group.fsdp_params.sharded_params, strict=True):
            owned.parameter.requires_grad_(param.requires_grad)
        build(group, replace(group.spec, is_meta=False))


def set_divisor(group: ParameterGroup, divisor: float) -> None:
    """Divide summed gradients by ``divisor`` from now on."""
    group.spec = replace(group.spec, divisor=divisor)
    if group.gradients is not None:
        group.gradients.divide_by(divisor)


def set_reduction(
    group: ParameterGroup, *, hook: Callable[[torch.Tensor], None] | None = None, function: ReduceFunction | None = None
) -> None:
    """Install a hook on reduced gradients, or a replacement of the reduce-scatter; None leaves what is there.

    Raises:
        ConfigError: a replacement, or a hook, where the policy has the engine add up itself.
    """
    if group.spec.dtypes.reduction is not None and (hook is not None or function is not None):
        raise ConfigError(
            f"unit {group.name!r}: a custom reduce-scatter and a hook on reduced gradients have an order of their own, "
            f"but the policy says reduction={group.spec.dtypes.reduction!r}; give one of the two"
        )
    if function is not None and group.spec.dtypes.accumulate is not None:
        raise ConfigError(
            f"unit {group.name!r}: a custom reduce-scatter adds up by itself, but the policy says "
            f"accumulate_dtype={group.spec.dtypes.accumulate}; give one of the two"
        )
    group.reduce_hook, group.reduce_function = hook or group.reduce_hook, function or group.reduce_function
    if group.gradients is not None:
        group.gradients.reduction.hook, group.gradients.reduction.function = group.reduce_hook, group.reduce_function


def forget_originals(group: ParameterGroup) -> None:
    """Let go of the parameters that the group was built from: their memory is the whole unit's."""
    if not group.is_meta:
        for owned, param in zip(group.owned, group.fsdp_params.sharded_params, strict=True):
            owned.parameter = param
            if owned.extension is not None:
                owned.extension = owned.extension.emptied()


def rebuild(group: ParameterGroup, spec: GroupSpec) -> None:
    """Make other buffers, with undefined content, under the parameters, which stay the same objects."""
    build(group, spec, group.fsdp_params.sharded_params)


def rename_group(group: ParameterGroup, name: str) -> None:
    """Take another unit name, for messages."""
    group.name = name
    group.weights.rename(name)
    if group.gradients is not None:
        group.gradients.rename(name)


def adopt_param(group: ParameterGroup, index: int, value: FlatDTensor) -> None:
    """Make a sharded tensor parameter ``index``: its values, and the object itself, over this group's memory."""
    adopt(group.fsdp_params, index, value)
    param = group.fsdp_params.sharded_params[index]
    if grad_dtype_of(param) == "own":
        set_grad_dtype(param, group.owned[index].grad_dtype)
    group.parameters = dict(zip((each.name for each in group.owned), group.fsdp_params.sharded_params, strict=True))
    group.owned[index].parameter = param
    note_group(param, group)
    mark_owned(param, group.name, group.owned[index].name)
    if group.gradients is not None:
        group.gradients.binding.replace(index, param)
    group.freshness.change()


def follow_requires_grad(group: ParameterGroup, changed: Iterable[int]) -> None:
    """Take notice of parameters that were frozen or unfrozen.

    Raises:
        StateError: an unfrozen parameter has no main weight of the dtype that the policy wants.
    """
    for index in changed:
        trained = group.fsdp_params.sharded_params[index].requires_grad
        if trained and group.gradients is None:
            check_main_dtype(group, index)
            make_gradients(group)
        assert group.gradients is not None
        set_requires_grad(group.fsdp_params, index, trained)
        group.gradients.binding.trained[index] = trained


def leave_gradients(group: ParameterGroup) -> bool:
    """Let whoever took gradients before ``zero_grad`` have their memory; return whether somebody did."""
    assert group.gradients is not None
    group.gradients.binding.dropped()
    if group.gradients.binding.is_taken:
        make_gradients(group)
        return True
    return False
