"""pre_forward and post_forward: the hooks that PyTorch calls before and after the modules of a unit run.

This file and ``backward.py`` decide in which order a rank issues collectives (docs/design/order.md). FSDP2 has
``_pre_forward`` and ``_post_forward`` in ``FSDPState``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from megatron_fsdp.engine.backward import leave_call, pre_backward, pre_recomputation
from megatron_fsdp.engine.outputs import map_tensors, watch_inputs, watch_output, without_weights
from megatron_fsdp.engine.recovery import recover
from megatron_fsdp.engine.streams import (
    HOST_READS,
    forget_unused_streams,
    join_captured,
    wait_for_event,
    wait_for_host_reads,
)
from megatron_fsdp.engine.unit import Call, Root, Unit, WeightState, alive, is_in_backward
from megatron_fsdp.errors import StateError

__all__ = ["caster", "post_forward", "pre_forward"]


_innermost_transform = torch._C._functorch.peek_interpreter_stack


def pre_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Gather a unit's weights for the call of one of its modules.

    Returns:
        The arguments, cast to the compute dtype if the policy asks for it, and moved to the GPU of the weights if the
        unit is the root (as FSDP2 does); None if they are neither cast nor moved.
    """
    if torch.compiler.is_dynamo_compiling():
        if torch.compiler.is_exporting():
            raise StateError(
                f"unit {unit.name!r} is sharded, and torch.export cannot record the hooks that gather its weights. "
                "fix: export a plain model with these weights: "
                "plain.load_state_dict(megatron_fsdp.full_state_dict(model)) on every rank, then "
                "torch.export.export(plain, inputs)"
            )
        # The compiler must not trace these hooks into the unit's graph: they switch to unsharded parameters.
        return _untraced_pre_forward(unit, module, args, kwargs)  # type: ignore[no-any-return]  # as this
    if _innermost_transform() is not None:
        # A transform of torch.func would wrap the buffers, and the tensors that collectives return.
        with temporarily_clear_interpreter_stack():
            _gather_for_forward(unit, module, ())
    else:
        _gather_for_forward(unit, module, (args, kwargs))
    policy, root = unit.policy, unit.root
    is_moved = root.device is not None and unit is root.outermost()
    if is_moved:
        # After the gathers were issued, because a copy from memory that is not pinned blocks the host.
        args, kwargs = map_tensors(_mover(root.device), (args, kwargs))
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        cast = caster(policy.param_dtype)
        return cast(args), cast(kwargs)
    return (args, kwargs) if is_moved else None


def _gather_for_forward(unit: Unit, module: nn.Module, given: Any) -> None:  # noqa: C901  # in order of time
    """Gather the unit for its forward, and start the gathers of the units that followed it in the last pass.

    Args:
        given: the module's arguments; empty inside a transform of ``torch.func``.
    """
    root = unit.root
    is_recomputed = is_in_backward()
    is_root = unit is root.outermost()
    if is_root:
        if not is_recomputed:
            recover(root)
        for hook in root.hooks:
            hook.on_root_forward(unit, module)
    if is_recomputed:
        pre_recomputation(unit, module)
        return
    if is_root and (unit.open_call is None or id(module) not in unit.pending_modules):
        _start_pass(root)
    call = unit.begin_call(module)
    if call is None:
        # The call began with another module of this unit.
        return
    if root.order is not None:
        root.order.before_call(unit)
    # 1. Look for changes that users made since the last forward.
    if unit.weight_state is not WeightState.SHARDED and unit.has_old_weights():
        if unit.num_holds:
            for hook in root.hooks:
                hook.on_stale_hold(unit)
        unit.reshard()
    unit.check_replaced_params()
    root.release_lingering(unit)
    for group in unit.groups:
        changed, gradients = group.fsdp_params.changed_requires_grad(), group.gradient_buffer
        if gradients is not None and gradients.binding.memory.is_held:
            for hook in root.hooks:
                hook.on_main_grad_held(unit, group)
        if changed:
            for hook in root.hooks:
                hook.on_requires_grad_changed(unit, group, changed)
    # 2. Gather this unit's weights.
    unit.unshard(check=True)
    unit.wait_for_unshard()
    # The steps above have counted all changes so far (``Unit.count_changes``). Backward refuses a larger number.
    for group in unit.groups:
        call.num_changes += group.freshness.num_changes
    following = _record_beginning(unit)
    if not root.forward_pass.ended and torch.is_grad_enabled():
        # No unit ended before this one, so no outputs of another unit tell when backward leaves it.
        watch_inputs(call, given, leave_call)
    # 3. Issue the gathers of the next units.
    if root.order is not None:
        root.order.prefetch(unit)
    elif unit.forward_prefetch:
        for other in alive(unit.forward_prefetch):
            other.unshard(check=True)
    else:
        root.prefetch(following, check=True)


def _start_pass(root: Root) -> None:
    """Begin a forward pass of the root; the last pass predicts its order."""
    if root.step_event is not None:
        for device in {group.spec.device for unit in root.units() for group in unit.groups}:
            wait_for_event(root.step_event, device)
        root.step_event = None
    forget_unused_streams()
    for unit in root.units():
        unit.open_call = None
    root.forward_pass = root.forward_pass.next()
    if root.order is not None:
        root.order.begin_pass()


def _record_beginning(unit: Unit) -> list[Unit]:
    """Record that a call of a unit begins, and return the units to gather ahead of their use.

    Forward gathers as many units ahead as backward has packed buffers, so that forward needs no more memory than
    backward (docs/design/order.md, "Streams").
    """
    if unit.num_holds:
        # The unit needs no gather inside ``unsharded()``, and ranks may call it in any order there.
        return []
    root, current = unit.root, unit.root.forward_pass
    current.record_begin(unit.reference)
    limit = root.backward.max_packed_buffers if torch.is_grad_enabled() else 1
    if root.prefetch_bytes is not None:
        return root.within_budget(alive(current.predicted[current.cursor :]))
    return current.following(limit)


def post_forward(unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Put hooks for backward on the output of a module, and reshard the unit after its last module.

    Returns:
        The output, cast if the policy has an ``output_dtype``; views of gathered weights are copied.
    """
    if torch.compiler.is_dynamo_compiling():
        return _untraced_post_forward(unit, module, args, output)
    if unit.policy.output_dtype is not None:
        output = caster(unit.policy.output_dtype)(output)
    call = unit.open_call
    if call is None:
        return output
    # Backward calls ``pre_backward`` through these hooks.
    if not (torch.is_grad_enabled() and watch_output(call, output, pre_backward)):
        output = without_weights(call, output, pre_backward)
    if unit.root.order is not None and torch.is_grad_enabled() and unit is unit.root.outermost():
        output = unit.root.order.lead_backward(call, output)
    if unit.pending_modules:
        return output
    if is_in_backward():
        # A checkpoint recomputed it in a backward, which reshards the unit.
        unit.end_call(call)
        return output
    _close_call(unit, call)
    if output is None:
        # Forward raised, or returned None.
        unit.reshard()
    if unit is unit.root.outermost():
        _end_pass(unit.root)
    return output


def _close_call(unit: Unit, call: Call) -> None:
    """Record for backward the place of the call in its pass, and reshard the unit unless its weights stay."""
    unit.end_call(call)
    root, has_grad = unit.root, torch.is_grad_enabled()
    if call.is_pending:
        root.forward_pass.record_end(unit.reference, call)
        if root.order is not None:
            root.order.refuse_call(unit)
    elif unit.num_trained and has_grad:
        # This rank used no parameter of the unit, but other ranks may have, and all ranks gather it in backward.
        root.forward_pass.record_end(unit.reference, None)
    outermost = root.outermost()
    if unit.reshard_after_forward is None and outermost is not None and outermost.open_call is not None:
        # The weights stay until the next unit runs, because backward begins with the last unit of forward.
        root.release_lingering(unit)
        root.lingering = unit.reference
        # Modules show the sharded parameters meanwhile: what other modules read of them must not end with this unit.
        unit.show_sharded()
    elif unit.reshards_after_forward() or (not has_grad and unit.reshard_after_forward is not False):
        # If no backward follows, the root is resharded too, unless the user has set False.
        unit.reshard(keep_part=has_grad if root.order is None else root.order.has_grad)
    if HOST_READS and not has_grad and (outermost is None or outermost.open_call is None):
        # No backward follows, so the host waits now.
        wait_for_host_reads()


def _end_pass(root: Root) -> None:
    """End a forward pass: reshard the units that a wrong prediction or an exception left gathered."""
    for unit in root.units():
        if unit.open_call is not None:
            _close_call(unit, unit.open_call)
    # A backward that follows begins with the unit that ran last, so that one stays.
    has_grad = torch.is_grad_enabled()
    last = root.lingering() if has_grad and root.lingering is not None else None
    awaited = last if last is not None and last.reference in root.forward_pass.first_begins else None
    if root.order is not None:
        awaited = root.order.end_pass()
    for unit in root.units():
        is_left = unit is not awaited and unit.weight_state is not WeightState.SHARDED
        if is_left and unit.reshards_after_forward():
            unit.reshard(keep_part=has_grad)
    if awaited is not None:
        # Between forward and backward users find the sharded parameters, which can be trained and changed.
        awaited.show_sharded()
    if not has_grad:
        # No backward follows, whose end would join the lanes.
        join_captured()


# ---------------------------------------------------------------- devices and dtypes of inputs and outputs


@functools.cache
def _mover(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that moves a tensor to ``device``."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == device else tensor.to(device)

    return move


@functools.cache
def caster(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return a function that casts every floating-point tensor in a nested structure to ``dtype``."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not dtype else tensor

    def cast_all(value: Any) -> Any:
        if type(value) is tuple or (type(value) is dict and not value):
            for each in value:
                if type(each) is not torch.Tensor or each.dtype is not dtype:
                    break
            else:
                return value
        return map_tensors(cast, value)

    return cast_all


_untraced_pre_forward: Any = _disable_dynamo(pre_forward)
_untraced_post_forward: Any = _disable_dynamo(post_forward)
