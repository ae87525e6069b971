"""How sharded and unsharded parameters are made, laid out, and replaced by what users register or load."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer
from dbuffer.dtensor.flat_dtensor import FlatDTensor, rebind, refuse_uses
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.lifecycle.param_registry import make_module_infos, register, registered
from megatron_fsdp.runtime.step.cuda_lane import turns
from megatron_fsdp.runtime.step.fsdp_params import FSDPParams, gradient_hook
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.step.weight_handle import WeightHandle, handle_of
from megatron_fsdp.runtime.weights.gathered_weight import KINDS, GatheredWeight
from megatron_fsdp.runtime.weights.param_layout import is_laid_out_like, laid_out
from megatron_fsdp.runtime.weights.stale_weights import STALE, mark_gathered, mark_replaced

__all__ = [
    "adopt",
    "attach_params",
    "copy_attributes",
    "make_fsdp_params",
    "readopt",
    "set_requires_grad",
    "shown_over",
]


def make_fsdp_params(
    owned: Sequence[OwnedParameter], main_weight: DBuffer, gathered: DBuffer, known: Sequence[nn.Parameter] = ()
) -> FSDPParams:
    """Return the parameters of a group, for ``attach_params``.

    Args:
        main_weight: what the sharded ones lie in. gathered: what the unsharded ones are views of.
        known: sharded parameters that stay the same objects, over other memory.
    """
    resting = partial(_resting, owned, main_weight)
    sharded = []
    for index, each in enumerate(owned):
        param = nn.Parameter(resting(index), requires_grad=each.parameter.requires_grad)
        copy_attributes(each.parameter, param)
        sharded.append(param)
    if known:
        sharded = [_rebound(param, new) for param, new in zip(known, sharded, strict=True)]
    unsharded = [_unsharded_param(each, gathered, index) for index, each in enumerate(owned)]
    return FSDPParams(owned, main_weight, sharded, unsharded, resting, KINDS)


def attach_params(params: FSDPParams, receiver: ParameterGroup) -> None:
    """Let the gathered parameters belong to a group, which gets their gradients, and find where they are registered."""
    group = weakref.ref(receiver)
    for owned, weight in zip(params.owned, params.unsharded_params, strict=True):
        weight._fsdp_handle = WeightHandle(group, owned.name)  # type: ignore[attr-defined]
    params.module_infos = make_module_infos(params.owned, params.sharded_params, params.unsharded_params)
    refuse_uses_of(params)
    follow_locals(params)
    for index, owned in enumerate(params.owned):
        set_requires_grad(params, index, owned.parameter.requires_grad)


def set_requires_grad(params: FSDPParams, index: int, requires_grad: bool) -> None:
    """Make the unsharded parameter require a gradient, and hear of it, or not."""
    used = params.unsharded_params[index]
    used.requires_grad_(requires_grad)
    params.required[index] = requires_grad
    if requires_grad and not used._post_accumulate_grad_hooks:
        # Streams take turns: there each one has to be seen.
        can_wait = params.waits[index] and turns(used.device) is None
        hook = gradient_hook(handle_of(used).group, index, params.begun if can_wait else [False], params.came)
        torch.Tensor.register_post_accumulate_grad_hook(used, hook)  # type: ignore[no-untyped-call]  # torch's stub


def follow_locals(params: FSDPParams) -> None:
    """Count changes of the tensors that the sharded parameters lie in now."""
    # Every in-place operator on a sharded parameter changes the version of the rows below it.
    locals_ = [param._local_tensor for param in params.sharded_params if isinstance(param, DTensor)]
    params.counted[:] = [params.main_weight.local_buffer, *locals_]


def _resting(owned: Sequence[OwnedParameter], main_weight: DBuffer, index: int) -> DTensor:
    rows, split = main_weight.get_dtensor(index), owned[index].split
    return rows if split is None else split.resting(rows)


def _unsharded_param(owned: OwnedParameter, gathered: DBuffer, index: int) -> nn.Parameter:
    # .data gives the view a version counter of its own. Gathering again must not look to autograd like a change of
    # the tensors it saved: the values are the same.
    view = gathered.get_local_tensor(index).data
    if owned.split is None:
        param: nn.Parameter = GatheredWeight(view, requires_grad=False)
    else:
        param = nn.Parameter(owned.split.gathered(view), requires_grad=False)
    copy_attributes(owned.parameter, param)
    mark_gathered(param, owned.name)
    return param


@contextmanager
def shown_over(params: FSDPParams, values: DBuffer) -> Iterator[None]:
    """Register parameters over another buffer of the same plan, inside the block, in place of the sharded ones."""
    shown = []
    for index, owned in enumerate(params.owned):
        param = nn.Parameter(params.wrap(index, values.get_dtensor(index)), params.sharded_params[index].requires_grad)
        copy_attributes(owned.parameter, param)
        shown.append(param)
    register(make_module_infos(params.owned, shown, params.unsharded_params))
    try:
        yield
    finally:
        register(params.module_infos)


def readopt(params: FSDPParams, unit: str) -> bool:
    """Copy values back where somebody replaced a registered parameter or its tensor; tell whether any was.

    Raises:
        StateError: the replacement has another shape, dtype or device.
    """
    is_changed = False
    for index, param in enumerate(params.sharded_params):
        current = registered(params.module_infos, index)
        if current is None:
            continue
        if params.subclass and current is not param:
            raise StateError(
                f"unit {unit!r}: parameter {params.owned[index].name!r}, a {params.subclass}, was replaced; "
                "replace it before fully_shard, or copy values into it"
            )
        if params.subclass:
            continue
        local = current.to_local() if isinstance(current, DTensor) else current.data
        wanted = params.main_weight.get_local_tensor(index)
        if current is param and local.data_ptr() == wanted.data_ptr():
            continue
        _take_values(params, index, current, unit)
        if current is not param:
            param.grad = None  # A parameter that is loaded by assign=True brings no gradient.
        is_changed = True
    register(params.module_infos)
    return is_changed


def _take_values(params: FSDPParams, index: int, current: torch.Tensor, unit: str) -> None:
    buffer, param, owned = params.main_weight, params.sharded_params[index], params.owned[index]
    if current.shape != param.shape or current.dtype != buffer.dtype or current.device != buffer.device:
        raise StateError(
            f"unit {unit!r}: parameter {owned.name!r} was replaced by {current.dtype} {tuple(current.shape)} on "
            f"{current.device}; its buffer holds {buffer.dtype} {tuple(param.shape)} on {buffer.device}. "
            "Change dtype or device before fully_shard, or use MixedPrecisionPolicy."
        )
    with torch.no_grad():
        mine = buffer.get_local_tensor(index)
        if isinstance(current, DTensor) and is_laid_out_like(current, param):
            mine.view(-1).copy_(current.to_local().reshape(-1))
        else:
            whole = current.full_tensor() if isinstance(current, DTensor) else current
            buffer.write_tensor(index, whole if owned.split is None else owned.split.local_part(whole))
        param.data = params.resting(index)
        follow_locals(params)


def adopt(params: FSDPParams, index: int, value: FlatDTensor) -> None:
    """Let a sharded tensor that a user registered be parameter ``index``, over this group's memory."""
    old, resting = params.sharded_params[index], params.resting(index)
    assert isinstance(old, FlatDTensor)
    assert isinstance(resting, FlatDTensor)
    with torch.no_grad():
        values = value if is_laid_out_like(value, old) else laid_out(params, old, value.detach())
        # Who kept the old parameter keeps its values.
        rebind(old, old.with_local(old._local_tensor.clone()))
        resting._local_tensor.copy_(values._local_tensor)
        rebind(value, resting)
    mark_replaced(old, params.owned[index].name)
    params.sharded_params[index] = value  # type: ignore[call-overload]  # a DTensor that says that it is a parameter
    refuse_uses_of(params)
    follow_locals(params)
    params.module_infos = make_module_infos(params.owned, params.sharded_params, params.unsharded_params)


def refuse_uses_of(params: FSDPParams) -> None:
    """Refuse hooks on the sharded parameters that nobody would call, and conversions of one of them."""
    for param, weight in zip(params.sharded_params, params.unsharded_params, strict=True):
        handle = handle_of(weight)
        refuse_uses(param, hook=partial(_no_hooks, handle), convert=partial(_no_conversion, handle))


def _no_hooks(handle: WeightHandle) -> str:
    return (
        f"{handle.words}: register_hook on a sharded parameter would never be called, as autograd knows the gathered "
        "weights alone. Use register_post_accumulate_grad_hook(hook): it gets the parameter when .grad, the gradient "
        "averaged over ranks, is there, and may change that in place."
    )


def _no_conversion(handle: WeightHandle) -> str:
    return (
        f"{handle.words}: .to(), .float(), .half() and the like of a module inside of the unit, whose parameters share "
        "one buffer, so one of them cannot have another dtype or device than the rest. Convert the module before "
        "fully_shard, or the whole model after it; MixedPrecisionPolicy chooses the dtypes of compute and gradients; a "
        "fully_shard of its own makes the module a unit."
    )


def _rebound(param: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """Return ``param``, which stands for what ``new`` stands for from here on."""
    assert isinstance(param, FlatDTensor)
    assert isinstance(new, FlatDTensor)
    rebind(param, new)
    return param


def copy_attributes(source: nn.Parameter, target: nn.Parameter) -> None:
    """Give a parameter the attributes that users set on the one that it stands for."""
    for name, value in vars(source).items():
        if name != STALE:
            setattr(target, name, value)
