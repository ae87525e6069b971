"""Schedule: when the units of one root are gathered and released, and how forward passes through them.

Nothing else unshards or reshards a parameter group, so that all of it is told (``dbuffer.events``) and every rank's
order of collectives is decided here and in ``backward.py`` (docs/design/order.md).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import profiler

from dbuffer.errors import MeshError
from dbuffer.events import listeners, tell
from megatron_fsdp.engine.outputs import map_tensors, watch_inputs, watch_output
from megatron_fsdp.engine.param_group import start_gathers
from megatron_fsdp.engine.streams import (
    HOST_READS,
    Ticket,
    forget_unused_streams,
    join_captured,
    settle_host,
    wait_for_event,
)
from megatron_fsdp.engine.unit import Call, Unit, WeightState, alive, is_in_backward, units_below
from megatron_fsdp.errors import AgreementError

__all__ = ["Schedule", "after_forward", "before_forward", "caster"]


_NONE: weakref.ref[Any] = weakref.ref(set())
"""A reference to no unit."""

_MAX_LENGTH = 65_536
_innermost_transform = torch._C._functorch.peek_interpreter_stack


class Schedule:
    """Drives the units below one root.

    Each forward pass is recorded and predicts the next one. A pass that takes another way is met by gathers on demand,
    and becomes the next prediction.

    Attributes:
        step_event: recorded after an optimizer step, awaited by the next forward; None for none.
        root_ref: the outermost unit, weakly. pools: of memory slots.
        trail: the units of this forward pass that were left, in order, for each call that backward may come to.
        guards: what a step hands on to when it meets what it does not do itself (``guards/attached.py``).
        prefetch_bytes: how many bytes of gathered weights may be gathered ahead of their use; None counts units.
    """

    # Of rooms above.
    guards: Any
    pools: Any

    def __init__(self) -> None:
        self.step_event: Any = None
        self.prefetch_bytes: int | None = None
        self.trail: list[weakref.ref[Unit]] = []
        self._units: list[weakref.ref[Unit]] = []
        self.root_ref: weakref.ref[Unit] = _NONE
        self._clock = 0
        # The units of this pass and of the last one, in the order of their calls, and where this one is in that.
        self._recorded: list[weakref.ref[Unit]] = []
        self._expected: list[weakref.ref[Unit]] = []
        self._cursor = 0
        # The unit that forward left last, whose weights stay until the next one is needed: backward may be next.
        self._lingering: weakref.ref[Unit] = _NONE
        self._ahead: list[weakref.ref[Unit]] = []

    def adopt(self, root: Unit, units: Iterable[Unit]) -> None:
        """Serve ``units``, of which ``root`` is the outermost."""
        self.root_ref = root.reference
        for unit in units:
            unit.schedule = self
            self._units.append(unit.reference)

    def units(self) -> list[Unit]:
        """Return the units served, in the order in which the root's modules are registered."""
        return alive(self._units)

    def reshards_after_forward(self, unit: Unit) -> bool:
        """Whether a unit gives its gathered weights back between forward and backward.

        One that was not told to does so when the next unit runs, so the last one of a forward keeps its weights.
        """
        if unit.reshard_after_forward is None:
            return unit is not self.root_ref()
        return unit.reshard_after_forward is not False

    # ------------------------------------------------------------------ weights

    def start_gather(self, unit: Unit | None, *, check: bool) -> None:
        """Issue the gather of a unit's weights, unless they are there or on their way.

        Args:
            check: look whether main weights changed since the last gather; backward need not, as nothing steps between.
        """
        if unit is None or unit.weight_state is not WeightState.SHARDED or not unit.groups:
            return
        if not self.guards.first_use.is_over:
            self.guards.first_use.before_gather(unit)
        if listeners:
            tell("gather", unit)
        unit.gather_ticket = start_gathers(unit.groups, check=check, owner=id(unit))
        # Last, so that whatever is raised before (an interrupt, out of memory) leaves nothing that looks gathered.
        unit.weight_state = WeightState.GATHERING

    def gather_ahead(self, units: list[Unit], *, check: bool) -> None:
        """Start predicted gathers, unless another one predicted is still unused: memory is for these alone."""
        for reference in self._ahead:
            ahead = reference()
            if ahead is not None and ahead.weight_state is WeightState.GATHERING and ahead not in units:
                return
        self._ahead = []
        for unit in units:
            if unit.weight_state is WeightState.SHARDED:
                self.start_gather(unit, check=check)
            self._ahead.append(unit.reference)

    def within_budget(self, following: Iterable[Unit]) -> list[Unit]:
        """Return the first of the units that use weights next: one, and more while they fit into ``prefetch_bytes``."""
        assert self.prefetch_bytes is not None
        ahead: list[Unit] = []
        left = self.prefetch_bytes
        for unit in following:
            if not unit.groups or unit in ahead:
                continue
            left -= unit.gathered_bytes
            if ahead and left < 0:
                break
            ahead.append(unit)
        return ahead

    def gathers_ahead(self) -> list[Ticket]:
        """Return the tickets of predicted gathers that are on their way."""
        return [unit.gather_ticket for unit in alive(self._ahead) if unit.gather_ticket is not None]

    def unshard(self, unit: Unit, *, check: bool) -> None:
        """Gather a unit's weights, if need be, and show them in its modules; compute issued afterwards may use them."""
        if unit.weight_state is WeightState.SHARDED:
            self.start_gather(unit, check=check)
        self.finish_gather(unit)

    def finish_gather(self, unit: Unit) -> None:
        """Make compute wait for a gather that was started, and show the weights.

        Raises:
            AgreementError: the gather did not end.
        """
        if unit.weight_state is WeightState.UNSHARDED:
            # They may rest for a while, or ``functional_call`` has put back what it found.
            for group in unit.groups:
                group.fsdp_params.module_infos.show(is_gathered=True)
        if unit.weight_state is not WeightState.GATHERING:
            return
        if listeners:
            tell("use", unit)
        if unit.gather_ticket is not None:
            try:
                unit.gather_ticket.wait()
            except (AgreementError, MeshError, RuntimeError) as error:
                # No use waits for this gather once more.
                unit.weight_state = WeightState.SHARDED
                if not isinstance(error, RuntimeError):
                    raise
                AgreementError.raise_for(unit.name, "the gather of its weights", error)
        for group in unit.groups:
            group.use_gathered()
        unit.gather_ticket = None
        unit.weight_state = WeightState.UNSHARDED
        if listeners:
            tell("unsharded", unit)

    def reshard(self, unit: Unit, *, keep_part: bool = False) -> None:
        """Show the sharded parameters and release the gathered weights, which are there or on their way.

        FSDP2's ``FSDPParamGroup.reshard``.

        Args:
            keep_part: as in ``ParameterGroup.release``.
        """
        if unit.weight_state is WeightState.SHARDED:
            return
        if listeners:
            tell("reshard", unit)
        if unit.weight_state is WeightState.GATHERING:
            self.finish_gather(unit)
        for group in unit.groups:
            group.fsdp_params.module_infos.show(is_gathered=False)
        unit.weight_state = WeightState.SHARDED
        # An error that is being handled is what should be seen; the next reshard finds the change as well.
        is_raising = sys.exc_info()[0] is not None
        changed: Sequence[torch.Tensor] = ()
        for group in unit.groups:
            changed = group.release(keep_part=keep_part, is_raising=is_raising) or changed
        if changed:
            self.guards.refuse_changed(changed)

    # ------------------------------------------------------------------ forward

    def _before_call(self, unit: Unit, module: nn.Module, given: Any) -> None:
        """Gather the unit for its forward, and start the gathers of the units that followed it last time.

        Args:
            given: to the module, tensors in any structure.
        """
        if unit is self.root_ref() and (unit.open_call is None or id(module) not in unit.pending_modules):
            self._start_pass()
        call = self.open_call(unit, module)
        if call is None:
            return
        if unit.weight_state is not WeightState.SHARDED and unit.is_stale():
            self.reshard(unit)
        self.refuse_replaced_params(unit)
        self._release_lingering(unit)
        for group in unit.groups:
            changed, gradients = group.fsdp_params.changed_requires_grad(), group.gradients
            if changed or (gradients is not None and gradients.binding.is_taken):
                self.guards.follow_requires_grad(unit, group, changed)
        self.unshard(unit, check=True)
        following = self._predict(unit)
        if not self.trail and torch.is_grad_enabled():
            # No other unit's outputs tell when backward is through with this one.
            watch_inputs(call, given)
        if unit.forward_prefetch:
            for reference in unit.forward_prefetch:
                self.start_gather(reference(), check=True)
        else:
            self.gather_ahead(following, check=True)

    def _after_call(self, unit: Unit, output: Any) -> Any:
        """Watch what forward left behind for backward, and reshard; return the output, without views of weights."""
        call = unit.open_call
        if call is None:
            return output
        if not (torch.is_grad_enabled() and watch_output(call, output)):
            output = self.guards.without_weights(call, output)
        if unit.pending_modules:
            return output
        if is_in_backward():
            # Computed again inside of a backward.
            self._end_call(unit, call)
            return output
        self._close_call(unit, call)
        if output is None:
            self.reshard(unit)
        if unit is self.root_ref():
            self._end_pass()
        return output

    def refuse_replaced_params(self, unit: Unit) -> None:
        """Refuse whatever is registered in the place of a parameter."""
        for group in unit.groups:
            if group.fsdp_params.module_infos.is_replaced():
                self.guards.refuse_replaced(group)

    def open_call(self, unit: Unit, module: nn.Module) -> Call | None:
        """Note that a module of the unit runs; return the call of the unit that begins with it; None for none."""
        if unit.open_call is not None and id(module) in unit.pending_modules:
            unit.pending_modules.discard(id(module))
            return None
        self._clock += 1
        call = unit.open_call = Call(unit, self._clock)
        unit.pending_modules = set(unit.module_ids)
        unit.pending_modules.discard(id(module))
        return call

    def _predict(self, unit: Unit) -> list[Unit]:
        """Record that a unit runs; return the ones with parameters to gather ahead of their use, where they are known.

        As many as backward has packed buffers, which is as much memory: where it keeps two, the gradients of a trained
        unit are still packed while those of the unit before it come, and its weights take no more in forward.
        """
        if len(self._recorded) < _MAX_LENGTH:
            self._recorded.append(unit.reference)
        # A unit that is not where it was last time moves the cursor to the end.
        while self._cursor < len(self._expected) and self._expected[self._cursor]() is not unit:
            self._cursor += 1
        self._cursor += 1
        if self.prefetch_bytes is not None:
            return self.within_budget(alive(islice(self._expected, self._cursor, None)))
        limit = unit.backward.max_packed_buffers if torch.is_grad_enabled() else 1
        ahead: list[Unit] = []
        for reference in self._expected[self._cursor : self._cursor + 2 * limit]:
            following = reference()
            if following is not None and following.groups:
                if ahead and not following.is_trained:
                    break
                ahead.append(following)
                if len(ahead) == limit:
                    break
        return ahead

    def _end_call(self, unit: Unit, call: Call) -> None:
        unit.open_call = None
        self._clock += 1
        call.end = self._clock

    def _close_call(self, unit: Unit, call: Call) -> None:
        self._end_call(unit, call)
        if unit.calls and unit.calls[-1]() is call:
            if unit.trail is not self.trail:
                unit.trail, unit.first_begin = self.trail, call.begin
            call.first_begin = unit.first_begin
            call.trail, call.position = self.trail, len(self.trail)
            self.trail.append(unit.reference)
        elif unit.num_gradients and torch.is_grad_enabled():
            # This rank used no parameter here. Others may have: the order of gathers is not a rank's own affair.
            self.trail.append(unit.reference)
        root = self.root_ref()
        if unit.reshard_after_forward is None and root is not None and root.open_call is not None:
            # A call below the root: whoever runs next takes its place, and the end of the pass settles the last one.
            self._release_lingering(unit)
            self._lingering = unit.reference
        elif self.reshards_after_forward(unit) or not (torch.is_grad_enabled() or unit.reshard_after_forward is False):
            self.reshard(unit, keep_part=torch.is_grad_enabled())
        if HOST_READS and not torch.is_grad_enabled() and (root is None or root.open_call is None):
            # No backward follows, at whose end the host waits.
            settle_host()

    def _release_lingering(self, unit: Unit) -> None:
        lingering, self._lingering = self._lingering(), _NONE
        if lingering is not None and lingering is not unit and lingering.open_call is None:
            self.reshard(lingering)

    def _start_pass(self) -> None:
        if self.step_event is not None:
            for device in {group.spec.device for unit in self.units() for group in unit.groups}:
                wait_for_event(self.step_event, device)
            self.step_event = None
        forget_unused_streams()
        for unit in self.units():
            unit.open_call = None
        self._expected, self._recorded, self._cursor = self._recorded or self._expected, [], 0
        self.trail = []
        if profiler._is_profiler_enabled:
            self.guards.emit_ranges(self.units())

    def _end_pass(self) -> None:
        for unit in self.units():
            if unit.open_call is not None:
                self._close_call(unit, unit.open_call)
        # Reshard what a wrong prediction or an exception left gathered, and without a backward the last one too.
        last = self._lingering() if torch.is_grad_enabled() else None
        awaited = last if last is not None and last.trail is self.trail else None
        for unit in self.units():
            is_left = unit is not awaited and unit.weight_state is not WeightState.SHARDED
            if is_left and self.reshards_after_forward(unit):
                self.reshard(unit, keep_part=torch.is_grad_enabled())
        if awaited is not None:
            # Whoever asks for parameters between forward and backward gets those that can be trained and changed.
            awaited.show_sharded()
        if not torch.is_grad_enabled():
            # With a backward, its end joins lanes.
            join_captured()

    def end_backward(self) -> None:
        """Release what backward has gathered, and what it need not have kept."""
        self._lingering = _NONE
        if HOST_READS:
            settle_host()
        root = self.root_ref()
        if root is None or root.open_call is None:
            # Where units are called and their root is not, nothing else begins a pass.
            self.trail = []
        for unit in self.units():
            if unit.reshard_after_backward or unit.weight_state is not WeightState.UNSHARDED:
                if unit.weight_state is not WeightState.SHARDED:
                    self.reshard(unit)
            else:
                # Kept for the next forward; whoever zeroes or changes parameters meanwhile means the sharded ones.
                unit.show_sharded()


# ---------------------------------------------------------------- what PyTorch calls when a unit's modules run


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


def before_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Gather a unit's weights for the call of one of its modules; return the arguments, cast, where that is asked."""
    if torch.compiler.is_dynamo_compiling():
        # The compiler would trace hooks into a unit's graph, and with them the switch to unsharded parameters.
        return _untraced_before(unit, module, args, kwargs)  # type: ignore[no-any-return]  # as this
    if _innermost_transform() is not None:
        # It would wrap buffers and what collectives return.
        with temporarily_clear_interpreter_stack():
            _enter(unit, module, ())
    else:
        _enter(unit, module, (args, kwargs))
    policy = unit.policy
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        cast = caster(policy.param_dtype)
        return cast(args), cast(kwargs)
    return None


def _enter(unit: Unit, module: nn.Module, given: Any) -> None:
    schedule: Schedule = unit.schedule
    is_again = is_in_backward()
    if unit is schedule.root_ref():
        if not is_again:
            unit.backward.recover()
        tree = unit.trees[id(module)]
        if tree.is_changed():
            schedule.guards.walk(tree, module, list(units_below(module)))
    if is_again:
        unit.backward.before_recomputation(unit, module)
    else:
        schedule._before_call(unit, module, given)


def after_forward(unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Watch what the call of a module leaves for backward, and reshard; return its output, cast where that is asked."""
    if torch.compiler.is_dynamo_compiling():
        return _untraced_after(unit, module, args, output)
    if unit.policy.output_dtype is not None:
        output = caster(unit.policy.output_dtype)(output)
    return unit.schedule._after_call(unit, output)


_untraced_before: Any = _disable_dynamo(before_forward)
_untraced_after: Any = _disable_dynamo(after_forward)
