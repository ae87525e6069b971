"""Convert, save and load sharded parameters between steps.

``nn.Module.to``, similar calls and ``load_state_dict(assign=True)`` change the values of sharded parameters, which
remain views of the flat buffer. Any other tensor registered as a parameter raises an error (docs/design/facade.md).
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from dbuffer import FlatDTensor
from megatron_fsdp.build.ownership import owner_words
from megatron_fsdp.engine.hooks import StepHooks
from megatron_fsdp.engine.param_group import ParameterGroup, group_of_parameter
from megatron_fsdp.engine.params import handle_of, is_laid_out_like, laid_out
from megatron_fsdp.engine.streams import wait_for_host_reads
from megatron_fsdp.engine.unit import Call, Unit, units_below
from megatron_fsdp.engine.unsharded_param import UnshardedParam
from megatron_fsdp.errors import CheckpointError, StateError
from megatron_fsdp.lifecycle.make_param_group import materialize_group, rebuild
from megatron_fsdp.lifecycle.unit_changes import apply_requires_grad, materialize_unit, replace_held_gradients
from megatron_fsdp.lifecycle.unwritten_buffers import allocate_buffers

__all__ = [
    "InnerApply", "KeptParametrizations", "ParamChanges", "apply_in_forward", "apply_to_group",
    "before_load_state_dict", "before_state_dict", "refuse_sharded_save",
]  # fmt: skip

# ---------------------------------------------------------------- conversion


def apply_to_group(
    group: ParameterGroup, function: Callable[[torch.Tensor], torch.Tensor], *, is_awaited: bool
) -> None:
    """Apply a function to the main weights of a group.

    Another dtype makes other buffers under the same parameters, of the dtypes that the policy derives from it.
    ``to_empty`` materializes a group that is on the meta device.

    Args:
        is_awaited: whether a pending backward still needs the current weights.
    Raises:
        StateError: the function changes the device, or the dtype at a time when it cannot, or shares the memory with
            other processes.
    """
    current = group.main_weight.local_buffer
    # A function that moves memory would have moved it before it could be refused.
    probe = torch.empty(1, dtype=current.dtype, device=current.device)
    with torch.no_grad():
        found = function(probe)
    # FSDP2 asks for ``to_empty(device="cpu")`` where weights are offloaded.
    is_resting = group.spec.is_offloaded and found.device.type == "cpu"
    if group.spec.is_meta and (found.device == group.spec.device or is_resting):
        materialize_group(group)
    elif found.device != current.device or (probe.device.type == "cpu" and probe.is_shared()):
        what = "go into shared memory" if found.device == current.device else f"move to {found.device}"
        raise StateError(
            f"{_words(group)} rest in a flat buffer on {current.device}, of which they are views, and cannot {what}. "
            "fix: do so before fully_shard; offload_policy=CPUOffloadPolicy() keeps weights in CPU memory; "
            "model.state_dict() or parameter.full_tensor() gives copies to move or to share."
        )
    elif found.dtype != current.dtype:
        _convert(group, found.dtype, is_awaited=is_awaited)
    else:
        with torch.no_grad():
            result = function(current)
            if result is not current:
                current.copy_(result)
                group.freshness.has_changed = True


def apply_in_forward(
    unit: Unit,
    places: Sequence[tuple[dict[str, Any], str]],
    function: Callable[[torch.Tensor], torch.Tensor],
    apply_to_others: Callable[[], nn.Module],
) -> nn.Module:
    """Apply a function to everything below a module while its unit's forward runs and weights are gathered.

    Models call ``self.router.to(torch.float32)`` in forward, which changes nothing if that is the dtype of compute.

    Args:
        places: of the gathered weights below the module: a module's dictionary of parameters, and the name in it.
        apply_to_others: applies the function to everything else below the module.
    Raises:
        StateError: the function would change one of the gathered weights.
    """
    held = [(registry, name, registry[name]) for registry, name in places]
    for _, _, weight in held:
        with torch.no_grad():
            found = function(weight)
        if found is not weight:
            raise StateError(
                f"{handle_of(weight).words}: .to(), .float(), .cpu() or the like, called while the unit's forward "
                f"runs, would change the gathered weight from {weight.dtype} on {weight.device} to {found.dtype} on "
                f"{found.device}. fix: convert the module before fully_shard; MixedPrecisionPolicy(param_dtype=...) "
                "chooses the dtype of compute, and a fully_shard of its own gives the module a policy of its own."
            )
    try:
        for registry, name, _ in held:
            registry[name] = None
        return apply_to_others()
    finally:
        for registry, name, weight in held:
            registry[name] = weight
        for group in unit.groups:
            group.fsdp_params.module_infos.tell_modules()


class InnerApply:
    """``module._apply`` of a module inside of a unit: ``.to()``, ``.cpu()``, ``.float()`` and the like.

    The parameters are views of the unit's buffer, and PyTorch would replace them with other objects. A function that
    keeps dtype and device is applied to the values; any other raises a StateError.
    """

    def __init__(self, unit: Unit, module: nn.Module, owned: Mapping[str, ParameterGroup]) -> None:
        self._unit, self._module = unit.reference, weakref.ref(module)
        self._groups = {name: weakref.ref(group) for name, group in owned.items()}

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Apply a function to everything below the module.

        Raises:
            StateError: it would change the dtype or the device of one parameter of a unit.
        """
        unit, module = self._unit(), self._module()
        assert module is not None
        apply: Callable[..., nn.Module] = type(module)._apply
        # The unit's own _apply has taken its parameters out, for as long as it applies the function to all else.
        if unit is None or all(module._parameters.get(name) is None for name in self._groups):
            return apply(module, function, recurse)
        unit.check_replaced_params()
        if unit.is_in_forward:
            places = [(module._parameters, name) for name in self._groups]
            return apply_in_forward(unit, places, function, lambda: apply(module, function, recurse))
        unit.reshard()
        wait_for_host_reads()
        held = {name: module._parameters[name] for name in self._groups}
        for name, reference in self._groups.items():
            _refuse_change(reference(), held[name], function)
        try:
            for name in held:
                module._parameters[name] = None
            apply(module, function, recurse)
            with torch.no_grad():
                for parameter in held.values():
                    assert parameter is not None
                    result = function(parameter)
                    if result is not parameter:
                        parameter.copy_(result)
        finally:
            module._parameters.update(held)
            for group in unit.groups:
                group.fsdp_params.module_infos.tell_modules()
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the method of the copied module, whose parameters are no unit's."""
        return _plain_apply(memo[id(self._module())])

    def __reduce__(self) -> Any:
        return _plain_apply, (self._module(),)


def _plain_apply(module: nn.Module) -> Any:
    return types.MethodType(type(module)._apply, module)


def _refuse_change(
    group: ParameterGroup | None, parameter: nn.Parameter | None, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    if group is None or parameter is None:
        return
    current = group.main_weight.local_buffer
    probe = torch.empty(1, dtype=current.dtype, device=current.device)
    with torch.no_grad():
        found = function(probe)
    is_shared = probe.device.type == "cpu" and probe.is_shared()
    if found.dtype is not current.dtype or found.device != current.device or is_shared:
        what = f"{found.dtype} on {found.device}" + (", in shared memory" if is_shared else "")
        raise StateError(
            f"{_words(group)}: .to(), .cpu(), .float(), to_empty() or the like of a module inside of the unit would "
            f"make {owner_words(parameter)} {what}. All parameters of the unit share one buffer, {current.dtype} on "
            f"{current.device}. fix: convert the module before fully_shard, or the whole model after it; "
            "MixedPrecisionPolicy chooses the dtypes of compute and gradients; offload_policy=CPUOffloadPolicy() keeps "
            "weights in CPU memory; parameter.full_tensor() or model.state_dict() gives copies to move; a fully_shard "
            "of its own makes the module a unit."
        )


def _words(group: ParameterGroup) -> str:
    return f"unit {group.name!r}: parameters {', '.join(map(repr, group.parameters))}"


def _convert(group: ParameterGroup, dtype: torch.dtype, *, is_awaited: bool) -> None:
    """Hold and use the parameters, which stay the same objects, in the dtypes that belong to another own one."""
    weights, values, params = group.weights, group.main_weight.local_buffer, group.fsdp_params.sharded_params
    obstacles = {
        "main weights are split": weights.remainder is not None,
        "they are sharded over further axes": group.fsdp_params.has_tensor_parallel,
        "they have gradients (zero_grad() first)": any(param.grad is not None for param in params),
        "a backward of an earlier forward may still come (delete its outputs)": is_awaited,
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise StateError(
                f"{_words(group)} cannot become {dtype}: {obstacle}. fix: change the dtype before fully_shard, or "
                "between steps."
            )
    dtypes = group.owned[0].dtypes_for(dtype, requires_grad=any(param.requires_grad for param in params))
    rebuild(group, replace(group.spec, dtypes=dtypes))
    group.main_weight.local_buffer.copy_(values)
    group.weights.gather_function = weights.gather_function
    if weights.post_forward is not None:
        group.weights.keep_part_for(weights.post_forward.axis.size)


# ---------------------------------------------------------------- replacement


class KeptParametrizations(nn.ModuleDict):
    """``module.parametrizations`` of a module with sharded originals, which raises when PyTorch would remove one.

    ``remove_parametrizations`` begins with ``name in module.parametrizations``. Later it is too late: it swaps the
    original for its result, deletes the property, and registers a parameter that belongs to no unit.
    """

    def __contains__(self, name: str) -> bool:
        found = super().__contains__(name)
        # The caller is parametrize.is_parametrized, whose caller is the function that the user called.
        called: types.FrameType | None = sys._getframe(1).f_back
        if found and called is not None and called.f_code is parametrize.remove_parametrizations.__code__:
            self._refuse_removal(called.f_locals["module"], name)
        return found

    def _refuse_removal(self, module: nn.Module, name: str) -> None:
        originals = list(self[name].parameters(recurse=False))
        gathered = [handle_of(original).words for original in originals if isinstance(original, UnshardedParam)]
        found = [*gathered, *filter(None, map(owner_words, originals))]
        # fully_shard changed the module's class to a subclass, on which PyTorch would look up the property of a buffer.
        if not found and name not in vars(type(module)):
            found = [type(module).__name__]
        if found:
            raise StateError(
                f"{found[0]}: the parametrization of {name!r} cannot be removed after fully_shard. fix: call "
                f"torch.nn.utils.parametrize.remove_parametrizations(module, {name!r}) before fully_shard"
            )

    def _get_name(self) -> str:
        return nn.ModuleDict.__name__


class ParamChanges(StepHooks[Unit, Call]):
    """Apply users' changes of parameters to their group; raise for changes that cannot be applied."""

    def on_requires_grad_changed(self, unit: Unit, group: ParameterGroup, changed: Sequence[int]) -> None:
        """Train or freeze parameters of the group."""
        apply_requires_grad(unit, group, changed)

    def on_main_grad_held(self, unit: Unit, group: ParameterGroup) -> None:
        """Make another gradient buffer for the group, unless the user has released the tensors since."""
        replace_held_gradients(unit, group)

    def on_replaced(self, group: ParameterGroup) -> None:
        """Raise ``StateError`` if another tensor replaced a sharded parameter in its module."""
        _refuse_replaced(group)


def _refuse_replaced(group: ParameterGroup) -> None:
    """Raise if a module's parameter is neither the sharded nor the gathered one of this group.

    Raises:
        StateError: another tensor, or None, is registered under the parameter's name.
    """
    infos = group.fsdp_params.module_infos
    for index, (registry, attribute, resting, used) in zip(infos.indices, infos.places, strict=True):
        value = registry.get(attribute)
        if value is resting or value is used:
            continue
        if torch.compiler.is_exporting():
            raise StateError(
                f"unit {group.name!r}: parameter {list(group.parameters)[index]!r} is sharded, and torch.export cannot "
                "record the hooks that gather it. fix: export a plain model with these weights: "
                "plain.load_state_dict(megatron_fsdp.full_state_dict(model)) on every rank, then "
                "torch.export.export(plain, inputs)"
            )
        kind = "another Parameter" if isinstance(value, nn.Parameter) else "a tensor"
        what = "None" if value is None else owner_words(value) or f"{kind} of shape {tuple(value.shape)}"
        raise StateError(
            f"unit {group.name!r}: parameter {list(group.parameters)[index]!r} was replaced by {what} after "
            "fully_shard, by an assignment or torch.func.functional_call; its gradients would not be averaged over "
            "ranks. fix: copy the values instead (load_state_dict, or parameter.copy_(...) under torch.no_grad(), "
            "with a DTensor); tie parameters before fully_shard, and give both modules to one unit: "
            "fully_shard([first, second]); replace or remove parameters before fully_shard, or freeze them at zero"
        )


# ---------------------------------------------------------------- state dictionaries


def before_state_dict(unit: Unit, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Show sharded parameters.

    Raises:
        CheckpointError: Hugging Face's ``save_pretrained`` asks, of a model that is no unit itself.
        StateError: called inside ``unsharded()``, or in a backward of the unit.
    """
    saved = _saved_by_save_pretrained()
    if saved is not None:
        refuse_sharded_save(saved, f"no state_dict, and {unit.name!r} is one of its units")
    if unit.num_holds:
        raise StateError(
            f"unit {unit.name!r}: state_dict() inside unsharded() would return weights whose memory goes when the "
            "block ends. fix: call model.state_dict() or full_state_dict(model) outside of the block; inside, "
            "{name: p.detach().clone() for name, p in model.named_parameters()} copies whole weights"
        )
    if unit.backward_reads_weights:
        raise StateError(
            f"unit {unit.name!r}: state_dict() in a backward of the unit, which needs the gathered weights. fix: call "
            "it after backward() has returned"
        )
    unit.reshard()


def _saved_by_save_pretrained() -> nn.Module | None:
    """Return the model whose ``save_pretrained`` waits for a state dictionary; None where none does."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "save_pretrained" and isinstance(model := frame.f_locals.get("self"), nn.Module):
            return model
        frame = frame.f_back
    return None


def refuse_sharded_save(model: nn.Module, found: str) -> NoReturn:
    """Refuse ``save_pretrained`` without whole weights: files of sharded tensors would hold one rank's rows.

    Reading full weights needs all ranks, and each of them would write the same files.
    """
    raise CheckpointError(
        f"save_pretrained(...) of the sharded {type(model).__name__} was given {found}; it saves whole weights only. "
        "fix: call on every rank\n    state = megatron_fsdp.full_state_dict(model)\n"
        "    if torch.distributed.get_rank() == 0: model.save_pretrained(folder, state_dict=state)"
    )


def before_load_state_dict(
    unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Cut loaded values to the rows of this rank: full tensors, and DTensors with PyTorch's own layout.

    With ``assign=True`` the values are copied into the existing parameters, and gradients are dropped; buffers stay on
    their device.
    """
    is_assigned = metadata.get("assign_to_params_buffers", False)
    for below in units_below(module):
        below.check_replaced_params()
        below.reshard()
    wait_for_host_reads()
    _materialize_for(module, prefix, state_dict)
    if is_assigned:
        _move_assigned_buffers(module, prefix, state_dict)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value, owner = state_dict.get(prefix + name), group_of_parameter(parameter)
        if owner is None or not isinstance(value, torch.Tensor) or value.shape != parameter.shape or value is parameter:
            continue
        if is_assigned and (owner.fsdp_params.subclass or value.dtype is not parameter.dtype):
            raise StateError(
                f"unit {owner.name!r}: parameter {prefix + name!r} of {parameter.dtype} cannot be assigned a tensor of "
                f"{value.dtype} ({type(value).__name__}) after fully_shard, because it is part of a buffer. fix: load "
                "without assign=True, which copies values; or choose dtypes before fully_shard, or by "
                "MixedPrecisionPolicy"
            )
        if not is_laid_out_like(value, parameter):
            state_dict[prefix + name] = laid_out(owner.fsdp_params, parameter, value)
        elif isinstance(parameter, FlatDTensor) and isinstance(value, DTensor) and not isinstance(value, FlatDTensor):
            # PyTorch made a plain DTensor with the parameter's placements. Its operators, even detach in torch 2.14,
            # assume the rows of Shard(0), which this rank does not have.
            state_dict[prefix + name] = parameter.with_local(value.to_local())
        if is_assigned:
            assert isinstance(parameter, DTensor)
            # Row by row: what PyTorch cut may have another local shape.
            rows = state_dict[prefix + name].to_local().detach()
            parameter.to_local().detach().view(-1).copy_(rows.reshape(-1))
            state_dict[prefix + name], parameter.grad = parameter, None


def _move_assigned_buffers(module: nn.Module, prefix: str, state_dict: dict[str, Any]) -> None:
    """Copy the buffers that the state dictionary assigns to the device where the model has them."""
    for name, buffer in module.named_buffers(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and not buffer.is_meta and not value.is_meta:
            state_dict[prefix + name] = value.to(buffer.device)


def _materialize_for(module: nn.Module, prefix: str, state_dict: dict[str, Any]) -> None:
    """Allocate meta-device units that the state dictionary fills completely; missing values must not become zeros."""
    names = {id(parameter): prefix + name for name, parameter in module.named_parameters()}
    is_loaded = False
    for unit in units_below(module):
        params = [param for group in unit.groups for param in group.parameters.values()]
        if any(group.spec.is_meta for group in unit.groups) and all(
            names.get(id(param)) in state_dict for param in params
        ):
            materialize_unit(unit)
            is_loaded = True
    if is_loaded:
        device = next(group.spec.device for unit in units_below(module) for group in unit.groups)
        allocate_buffers(module, state_dict.keys(), prefix, device)
