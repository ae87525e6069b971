"""Unit: the state of one ``fully_shard`` call, shared by the modules it was given."""

from __future__ import annotations

import collections
import enum
import functools
import math
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_fsdp.errors import AgreementError, StateError
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.policy.slots import SlotChoice
from megatron_fsdp.runtime.guards.replaced_params import admit, settle
from megatron_fsdp.runtime.lifecycle.fsdp2_view import StateNames
from megatron_fsdp.runtime.lifecycle.make_param_group import (
    follow_requires_grad,
    leave_gradients,
    materialize_group,
    rename_group,
)
from megatron_fsdp.runtime.step.freshness import MOMENTS
from megatron_fsdp.runtime.step.gradients import GradientBuffer
from megatron_fsdp.runtime.step.lane_types import Ticket
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup, start_gathers
from megatron_fsdp.runtime.weights.gathered_weight import handle_of
from megatron_fsdp.runtime.weights.memory_slots import place_unit

if TYPE_CHECKING:
    from megatron_fsdp.runtime.guards.inner_outputs import InnerOutputs
    from megatron_fsdp.runtime.step.backward import Backward
    from megatron_fsdp.runtime.step.hooks import Tree
    from megatron_fsdp.runtime.step.schedule import Schedule

__all__ = ["WATCHERS", "Call", "Unit", "WeightState", "alive", "is_in_backward", "units_below", "watchers"]

WATCHERS = "_fsdp_watchers"
"""Under this and its output's number a node's metadata has the calls that a tensor is an output of."""


class WeightState(enum.Enum):
    """Where a unit's compute weights are: at rest alone; on their way, as a gather was issued; usable."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class Call:
    """One forward call of a unit, kept alive by the autograd hooks on its outputs.

    Attributes:
        begin, end: ticks of the schedule's clock; calls nest or follow each other, so these intervals do too.
        position: place in the schedule's list of finished calls of that forward pass.
        first_begin: when the unit's first watched call in the same pass began.
        entered: the number of the last backward that reached its outputs; 0 for none so far. task: autograd's number of
            the graph in which it did; that of one inside of another is higher.
        moment: of optimizers' steps when it began (``freshness.MOMENTS``).
        first_node: autograd's nodes that were made since it began have this number or a higher one.
        reads: a weight that its backward reads, where it was looked for (``refusals.note_reads``); None for none.
        is_expected: whether the unit has it among the calls whose backward may still come.
    """

    __slots__ = (
        "__weakref__", "_unit", "begin", "end", "entered", "first_begin", "first_node", "is_expected", "moment",
        "position", "reads", "task", "trail",
    )  # fmt: skip

    def __init__(self, unit: Unit, begin: int) -> None:
        self._unit = unit.reference
        self.begin = self.first_begin = begin
        self.end = begin
        self.position = 0
        self.trail: list[weakref.ref[Unit]] = []
        self.entered = self.task = 0
        self.reads: str | None = None
        self.moment = MOMENTS[0]
        self.is_expected = False
        self.first_node: int = torch._C._autograd._get_sequence_nr()

    @property
    def unit(self) -> Unit:
        """The unit that was called; graphs do not keep models alive.

        Raises:
            StateError: it is gone.
        """
        unit = self._unit()
        if unit is None:
            raise StateError(
                "backward through the output of a sharded model that was deleted; keep the model until then"
            )
        return unit


class Unit(StateNames):
    """Modules that are gathered, resharded and reduced together.

    Attributes:
        name: path of the (first) module below the root, for messages.
        reference: weak, for whoever must not keep the unit alive.
        groups: the parameter groups; empty for a module without parameters of its own.
        reshard_after_forward: as asked; None means when the next unit runs, but not for the root. Groups that keep a
            part for backward know it themselves.
        rests_final: whether no axis is left to reduce when the last backward has closed it.
        requires_all_reduce: whether the last backward also reduces over axes that hold partial sums.
        requires_gradient_sync: False keeps gradients here, unreduced, until a backward with True.
        weight_state: where its weights are; changed by ``start_gather``, ``finish_gather`` and ``reshard`` alone.
        gather_ticket: of the gather under way, None where all weights rest whole.
        slots: where the memory of gathered weights and packed gradients comes from.
        releases_weights: whether any of its weights are gathered and released; others are whole on every rank all the
            time.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        groups: Sequence[ParameterGroup],
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.name = name
        self.reference: weakref.ref[Unit] = weakref.ref(self)
        self.groups = tuple(groups)
        for group in self.groups:
            group.unit = id(self)
        self.policy = policy
        self.weight_state = WeightState.SHARDED
        self.gather_ticket: Ticket | None = None
        self.reshard_after_forward: bool | None = None
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.slots = SlotChoice()
        self.forward_prefetch: list[weakref.ref[Unit]] = []
        self.backward_prefetch: list[weakref.ref[Unit]] = []
        self.schedule: Schedule
        self.backward: Backward
        self.modules = [weakref.ref(module) for module in modules]
        # Units inside of this one, all of which were made before it.
        self.inner: list[weakref.ref[Unit]] = []
        self.calls: list[weakref.ref[Call]] = []
        # The pass of its last watched call, and when its first one in that pass began.
        self.trail: list[weakref.ref[Unit]] | None = None
        self.first_begin = 0
        self.pending_modules: set[int] = set()
        self.open_call: Call | None = None
        # The call that backward has come to, while the weights are there for it, and autograd's number of the graph.
        self.entered: Call | None = None
        self.entered_task = -1
        # By the id of the module.
        self.trees: dict[int, Tree] = {}
        self.inner_outputs: InnerOutputs
        self.unshards_in_backward = True
        self.gradients: tuple[GradientBuffer, ...] = ()
        self.num_gradients, self.rests_final = 0, True
        self.releases_weights = False
        self.follow_gradients()

    def follow_gradients(self) -> None:
        """Take notice of gradient buffers that were made or changed: after materialization, freezing, unfreezing."""
        if self.slots.sizing is not None:
            place_unit(self)
        self.gradients = tuple(group.gradients for group in self.groups if group.gradients is not None)
        self.num_gradients = sum(buffer.num_trained for buffer in self.gradients)
        self.rests_final = all(buffer.rests_final for buffer in self.gradients)
        for buffer in self.gradients:
            buffer.observe(self)
        for group in self.groups:
            if not group.rests_whole:
                for weight in group.fsdp_params.unsharded_params:
                    handle_of(weight).unit = self.reference
                self.releases_weights = True

    def follow_requires_grad(self) -> None:
        """Take notice of parameters that were frozen or unfrozen since the last forward."""
        is_changed = False
        for group in self.groups:
            if group.gradients is not None and group.gradients.binding.is_taken:
                is_changed = leave_gradients(group) or is_changed
            changed = group.fsdp_params.changed_requires_grad()
            if changed:
                follow_requires_grad(group, changed)
                is_changed = True
        if is_changed:
            self.follow_gradients()

    def admit_replaced_params(self) -> None:
        """Decide what becomes of what somebody else registered in the places of the unit's parameters.

        Raises:
            StateError: it cannot be used for what follows.
        """
        for group in self.groups:
            replaced = group.fsdp_params.module_infos.replaced()
            if replaced:
                was_meta = group.is_meta
                admit(group, replaced)
                if was_meta:
                    self.follow_gradients()

    def settle_replaced_params(self) -> None:
        """Let sharded parameters that were assigned take their places for good, and refuse whatever else is there.

        Raises:
            StateError: something else is registered in the place of a parameter.
        """
        for group in self.groups:
            replaced = group.fsdp_params.module_infos.replaced()
            if replaced:
                was_meta = group.is_meta
                settle(group, replaced)
                if was_meta:
                    self.follow_gradients()

    def places(self) -> Iterator[tuple[dict[str, nn.Parameter | None], str]]:
        """Yield where its parameters are registered: a module's dictionary, and the name in it."""
        for group in self.groups:
            yield from group.fsdp_params.module_infos.places()

    def show_sharded(self) -> None:
        """Show the sharded parameters, while gathered weights stay for the backward that follows."""
        for group in self.groups:
            group.fsdp_params.module_infos.show_sharded()

    def materialize(self) -> None:
        """Allocate the buffers of parameters that were on the meta device."""
        for group in self.groups:
            materialize_group(group)
        self.follow_gradients()

    def awaits(self, module: nn.Module) -> bool:
        """Whether a call of the unit is under way in which this module of it has still to run."""
        return self.open_call is not None and id(module) in self.pending_modules

    # ------------------------------------------------------------------ weights

    def start_gather(self, *, check: bool) -> None:
        """Issue the gather of the weights, which are SHARDED; ``check`` as in ``start_gathers``."""
        self.gather_ticket = start_gathers(self.groups, check=check, owner=id(self))
        # Last, so that whatever is raised before (an interrupt, out of memory) leaves nothing that looks gathered.
        self.weight_state = WeightState.GATHERING

    def finish_gather(self) -> None:
        """Make compute wait for the gather under way, and show the gathered weights.

        Raises:
            AgreementError: the gather did not end.
        """
        if self.gather_ticket is not None:
            try:
                self.gather_ticket.wait()
            except AgreementError:
                # Found by a watch: nobody is to wait for this gather once more.
                self.weight_state = WeightState.SHARDED
                raise
            except RuntimeError as error:
                self.weight_state = WeightState.SHARDED
                AgreementError.raise_for(self.name, "the gather of its weights", error)
        for group in self.groups:
            group.use_gathered()
        self.gather_ticket = None
        self.weight_state = WeightState.UNSHARDED

    def reshard(self, *, keep_part: bool = False) -> None:
        """Show the sharded parameters and release the gathered weights, which are there or on their way.

        Args:
            keep_part: as in ``ParameterGroup.release``.
        Raises:
            StateError: somebody changed the gathered weights in place.
        """
        if self.weight_state is WeightState.GATHERING:
            self.finish_gather()
        for group in self.groups:
            group.fsdp_params.module_infos.show_sharded()
        self.weight_state = WeightState.SHARDED
        # An error that is being handled is what should be seen; the next reshard finds the change as well.
        is_raising = sys.exc_info()[0] is not None
        refused = None
        for group in self.groups:
            changed = group.release(keep_part=keep_part, is_raising=is_raising)
            if changed is not None:
                refused = group.fsdp_params, changed
        if refused is not None:
            refused[0].refuse_change(refused[1])

    def is_stale(self) -> bool:
        """Whether weights that are gathered, or on their way, are older than the main weights.

        Raises:
            StateError: somebody changed the gathered weights in place.
        """
        for group in self.groups:
            changed = group.fsdp_params.changed_in_place() if self.weight_state is WeightState.UNSHARDED else None
            if changed is not None:
                group.lose_gathered()
                group.fsdp_params.refuse_change(changed)
            if group.freshness.is_stale():
                return True
        return False

    @property
    def is_unsharded(self) -> bool:
        """Whether compute may use all of its weights."""
        return self.weight_state is WeightState.UNSHARDED or not self.groups

    # ------------------------------------------------------------------ calls

    def outstanding_calls(self) -> Iterator[Call]:
        """Yield the forward calls whose backward may still come, oldest first."""
        alive = [(reference, call) for reference in self.calls if (call := reference()) is not None]
        self.calls = [reference for reference, _ in alive]
        for _, call in alive:
            yield call

    def calls_not_entered(self, backward: int, end: float = math.inf) -> list[Call]:
        """Return the calls that a backward has not entered and may still enter, or not, that began until ``end``."""
        return [call for call in self.outstanding_calls() if call.entered != backward and call.begin <= end]

    def awaits_gradients(self) -> bool:
        """Whether the graph that autograd is going through brings gradients that have not come yet."""
        return any(buffer.awaits_gradients() for buffer in self.gradients)

    def encloses(self, other: Unit) -> bool:
        """Whether a module of ``other`` lies below one of this unit's."""
        inner = {id(module()) for module in other.modules}
        return any(
            id(child) in inner
            for reference in self.modules
            if (module := reference()) is not None
            for child in module.modules()
        )

    def forget(self, backward: int) -> None:
        """Expect no further backward of the calls entered in the given one; a retained graph may bring it anyway."""
        kept = []
        for reference in self.calls:
            call = reference()
            if call is not None:
                call.is_expected = call.entered != backward
                if call.is_expected:
                    kept.append(reference)
        self.calls = kept

    def expect(self, call: Call) -> None:
        """Expect a backward of ``call``, as long as the hooks on its outputs keep it alive."""
        if not call.is_expected:
            call.is_expected = True
            self.calls.append(weakref.ref(call))
            if len(self.calls) > 1:
                self.calls.sort(key=_begin)

    def rename(self, name: str) -> None:
        """Take the name that the unit has below a (new) root."""
        self.name = name
        for group in self.groups:
            rename_group(group, name)


def alive(references: Iterable[weakref.ref[Unit]]) -> list[Unit]:
    """Return the units that still exist."""
    return [unit for reference in references if (unit := reference()) is not None]


def units_below(module: object) -> Iterator[Unit]:
    """Yield the units of a module and of all modules in it, each once, in registration order."""
    assert isinstance(module, nn.Module)
    seen: set[int] = set()
    for child in module.modules():
        unit = child.__dict__.get("_fsdp_unit")
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            yield unit


def is_in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def watchers(tensor: torch.Tensor) -> list[Call]:
    """Return the calls that a tensor is an output of, which a hook on it enters.

    There are several where a unit returns its very input, or its last child's output: backward has to enter the later
    call first, while hooks of their own would run in the order of registration. A tensor that was changed in place
    since has another node, which backward reaches before the old one and its hook.
    """
    node = tensor.grad_fn
    if node is None:
        return _watchers_of_leaf(tensor)
    # With the node, so that the tensor can be pickled as any other: hooks on saved tensors do so.
    known: Any = node.metadata
    key = (WATCHERS, tensor.output_nr)
    calls: list[Call] | None = known.get(key)
    if calls is None:
        calls = known[key] = []
        hook: Any = functools.partial(_enter_backward, calls)
        hook.__torch_unserializable__ = True
        if tensor._backward_hooks is not None or type(tensor) is not torch.Tensor:
            tensor.register_hook(hook)
        else:
            # What ``register_hook`` does first, without a handle.
            tensor._backward_hooks = collections.OrderedDict(fsdp=hook)
            node._register_hook_dict(tensor)
    return calls


def _watchers_of_leaf(leaf: torch.Tensor) -> list[Call]:
    for hook in (leaf._backward_hooks or {}).values():
        if isinstance(hook, functools.partial) and hook.func is _enter_backward:
            calls: list[Call] = hook.args[0]
            # A leaf outlives its graphs, and so would the calls of earlier steps.
            calls[:] = [call for call in calls if not call.entered]
            return calls
    entering: Any = functools.partial(_enter_backward, [])
    entering.__torch_unserializable__ = True
    leaf.register_hook(entering)
    calls = entering.args[0]
    return calls


def _enter_backward(calls: list[Call], gradient: torch.Tensor) -> None:
    for call in calls[::-1]:
        unit = call._unit()
        if unit is None or unit.entered is not call or unit.entered_task != torch._C._current_graph_task_id():
            call.unit.backward.before_backward(call)


def _begin(reference: weakref.ref[Call]) -> int:
    call = reference()
    return 0 if call is None else call.begin
