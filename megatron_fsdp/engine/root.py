"""pre_forward and post_forward: what PyTorch calls when the modules of a unit run, in order of time.

Every rank's order of collectives is decided here and in ``backward.py`` (docs/design/order.md). FSDP2 has the same two
functions in ``FSDPState``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from megatron_fsdp.engine.backward import after_call, pre_backward, pre_recomputation, recover
from megatron_fsdp.engine.outputs import map_tensors, watch_inputs, watch_output, without_weights
from megatron_fsdp.engine.streams import (
    HOST_READS,
    forget_unused_streams,
    join_captured,
    settle_host,
    wait_for_event,
)
from megatron_fsdp.engine.unit import Call, Root, Unit, WeightState, alive, is_in_backward
from megatron_fsdp.errors import StateError

__all__ = ["caster", "post_forward", "pre_forward"]


_MAX_LENGTH = 65_536
_innermost_transform = torch._C._functorch.peek_interpreter_stack


def pre_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Gather a unit's weights for the call of one of its modules; return the arguments, cast, where that is asked."""
    if torch.compiler.is_dynamo_compiling():
        if torch.compiler.is_exporting():
            raise StateError(
                f"unit {unit.name!r} is sharded, and torch.export cannot record the hooks that gather its weights. "
                "fix: export a plain model with these weights: "
                "plain.load_state_dict(megatron_fsdp.full_state_dict(model)) on every rank, then "
                "torch.export.export(plain, inputs)"
            )
        # The compiler would trace hooks into a unit's graph, and with them the switch to unsharded parameters.
        return _untraced_pre_forward(unit, module, args, kwargs)  # type: ignore[no-any-return]  # as this
    if _innermost_transform() is not None:
        # It would wrap buffers and what collectives return.
        with temporarily_clear_interpreter_stack():
            _pre_forward(unit, module, ())
    else:
        _pre_forward(unit, module, (args, kwargs))
    policy = unit.policy
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        cast = caster(policy.param_dtype)
        return cast(args), cast(kwargs)
    return None


def _pre_forward(unit: Unit, module: nn.Module, given: Any) -> None:  # noqa: C901  # in order of time
    """Gather the unit for its forward, and start the gathers of the units that followed it last time.

    Args:
        given: to the module, tensors in any structure.
    """
    root = unit.root
    is_again = is_in_backward()
    is_root = unit is root.outermost()
    if is_root:
        if not is_again:
            recover(root)
        for hook in root.hooks:
            hook.on_root_forward(unit, module)
    if is_again:
        # A checkpoint computes again.
        pre_recomputation(unit, module)
        return
    if is_root and (unit.open_call is None or id(module) not in unit.pending_modules):
        _start_pass(root)
    call = unit.begin_call(module)
    if call is None:
        # The next module of a unit that was given several.
        return
    if root.order is not None:
        root.order.before_call(unit)
    # What users changed since the last forward.
    if unit.weight_state is not WeightState.SHARDED and unit.is_stale():
        for hook in root.hooks if unit.num_holds else ():
            hook.on_stale_hold(unit)
        unit.reshard()
    unit.refuse_replaced_params()
    root.release_lingering(unit)
    for group in unit.groups:
        changed, gradients = group.fsdp_params.changed_requires_grad(), group.gradients
        if changed or (gradients is not None and gradients.binding.memory.is_taken):
            for hook in root.hooks:
                hook.on_changed(unit, group, changed)
    # This unit's weights, and then those of the next ones.
    unit.unshard(check=True)
    unit.wait_for_unshard()
    following = _record(root, unit)
    if not root.trail and torch.is_grad_enabled():
        # No other unit's outputs tell when backward is through with this one.
        watch_inputs(call, given, after_call)
    if unit.forward_prefetch and root.order is None:
        for reference in unit.forward_prefetch:
            other = reference()
            if other is not None:
                other.unshard(check=True)
    else:
        root.prefetch(following, check=True)


def _start_pass(root: Root) -> None:
    """Begin a forward pass: the last one is the prediction."""
    if root.step_event is not None:
        for device in {group.spec.device for unit in root.units() for group in unit.groups}:
            wait_for_event(root.step_event, device)
        root.step_event = None
    forget_unused_streams()
    for unit in root.units():
        unit.open_call = None
    root.expected, root.recorded, root.cursor = root.recorded or root.expected, [], 0
    root.trail = [] if root.order is None else root.order.begin_pass()


def _record(root: Root, unit: Unit) -> list[Unit]:
    """Record that a unit runs; return the ones with parameters to gather ahead of their use, where they are known.

    As many as backward has packed buffers, which is as much memory: where it keeps two, the gradients of a trained
    unit are still packed while those of the unit before it come, and its weights take no more in forward.
    """
    if unit.num_holds:
        # It needs no gather here, and ranks may call it in any order.
        return []
    if len(root.recorded) < _MAX_LENGTH:
        root.recorded.append(unit.reference)
    # A unit that is not where it was last time moves the cursor to the end.
    while root.cursor < len(root.expected) and root.expected[root.cursor]() is not unit:
        root.cursor += 1
    root.cursor += 1
    limit = root.backward.max_packed_buffers if torch.is_grad_enabled() else 1
    if root.order is not None:
        return root.order.following(limit)
    if root.prefetch_bytes is not None:
        return root.within_budget(alive(root.expected[root.cursor :]))
    ahead: list[Unit] = []
    for reference in root.expected[root.cursor : root.cursor + 2 * limit]:
        following = reference()
        if following is not None and following.groups:
            if ahead and not following.is_trained:
                break
            ahead.append(following)
            if len(ahead) == limit:
                break
    return ahead


def post_forward(unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Watch what the call of a module leaves for backward, and reshard; return its output, cast where that is asked.

    Views of gathered weights are returned as copies.
    """
    if torch.compiler.is_dynamo_compiling():
        return _untraced_post_forward(unit, module, args, output)
    if unit.policy.output_dtype is not None:
        output = caster(unit.policy.output_dtype)(output)
    call = unit.open_call
    if call is None:
        return output
    # The hooks on outputs by which backward comes here.
    if not (torch.is_grad_enabled() and watch_output(call, output, pre_backward)):
        output = without_weights(call, output, pre_backward)
    if unit.root.order is not None and torch.is_grad_enabled() and unit is unit.root.outermost():
        output = unit.root.order.lead_backward(call, output)
    if unit.pending_modules:
        return output
    if is_in_backward():
        # Computed again inside of a backward.
        unit.end_call(call)
        return output
    _close_call(unit, call)
    if output is None:
        # Forward raised, or returned nothing.
        unit.reshard()
    if unit is unit.root.outermost():
        _end_pass(unit.root)
    return output


def _close_call(unit: Unit, call: Call) -> None:
    """Note for backward where the call was in its pass, and reshard, unless the weights stay."""
    unit.end_call(call)
    root, has_grad = unit.root, torch.is_grad_enabled()
    if unit.calls and unit.calls[-1]() is call:
        if unit.trail is not root.trail:
            unit.trail, unit.first_begin = root.trail, call.begin
        call.first_begin = unit.first_begin
        call.trail, call.position = root.trail, len(root.trail)
        root.trail.append(unit.reference)
        if root.order is not None:
            root.order.after_call(unit)
    elif unit.num_gradients and has_grad:
        # This rank used no parameter here. Others may have: the order of gathers is not a rank's own affair.
        root.trail.append(unit.reference)
    outermost = root.outermost()
    if unit.reshard_after_forward is None and outermost is not None and outermost.open_call is not None:
        # A call below the root: whoever runs next takes its place, and the end of the pass settles the last one.
        root.release_lingering(unit)
        root.lingering = unit.reference
    elif unit.reshards_after_forward() or not (has_grad or unit.reshard_after_forward is False):
        unit.reshard(keep_part=has_grad)
    if HOST_READS and not has_grad and (outermost is None or outermost.open_call is None):
        # No backward follows, at whose end the host waits.
        settle_host()


def _end_pass(root: Root) -> None:
    """End a forward pass: reshard what a wrong prediction or an exception left gathered."""
    for unit in root.units():
        if unit.open_call is not None:
            _close_call(unit, unit.open_call)
    # Without a backward the last one too.
    has_grad = torch.is_grad_enabled()
    last = root.lingering() if has_grad and root.lingering is not None else None
    awaited = last if last is not None and last.trail is root.trail else None
    if root.order is not None:
        awaited = root.order.end_pass()
    for unit in root.units():
        is_left = unit is not awaited and unit.weight_state is not WeightState.SHARDED
        if is_left and unit.reshards_after_forward():
            unit.reshard(keep_part=has_grad)
    if awaited is not None:
        # Whoever asks for parameters between forward and backward gets those that can be trained and changed.
        awaited.show_sharded()
    if not has_grad:
        # With a backward, its end joins lanes.
        join_captured()


# ---------------------------------------------------------------- dtypes of inputs and outputs


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
