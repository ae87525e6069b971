"""Unit and Root: the state of one ``fully_shard`` call, and the state that all units of a model share.

A unit unshards and reshards its parameter groups together (FSDP2's ``FSDPState`` and ``FSDPParamGroup``), and announces
both as events (``dbuffer.events``). ``forward.py``, ``backward.py``, ``post_backward.py`` and ``final_callback.py``
decide when.
"""

from __future__ import annotations

import enum
import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from dbuffer.errors import MeshError
from dbuffer.events import listeners, tell
from megatron_fsdp.engine.grads import GradientBuffer
from megatron_fsdp.engine.hooks import SharedOrder, StepHooks, sees_collectives
from megatron_fsdp.engine.lane_packer import LanePacker
from megatron_fsdp.engine.param_group import ParameterGroup, start_gathers
from megatron_fsdp.engine.streams import Event, Ticket, turns
from megatron_fsdp.engine.unsharded_param import refuse_change
from megatron_fsdp.errors import AgreementError, StateError
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.policy.slots import SlotChoice

__all__ = [
    "BackwardState", "Call", "ForwardPass", "Root", "Unit", "WeightState", "alive", "is_in_backward",
    "units_below",
]  # fmt: skip


class WeightState(enum.Enum):
    """The weights of a unit: sharded; GATHERING, from the issue of a gather until compute waits for it; unsharded."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


_MAX_CALLS = 65_536
"""How many calls a ``ForwardPass`` records, where units run without their root and no pass ends."""
_next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class ForwardPass:
    """The order of calls in one forward of the root, and in calls outside of the root until a backward has ended.

    Units are weak references (``Unit.reference``), so that a recording keeps no model alive.

    Attributes:
        begun: the units in the order of the beginnings of calls; the next pass gathers ahead in this order.
        predicted: ``begun`` of an earlier pass. cursor: how many units of ``predicted`` this pass has run or skipped.
        ended: the units in the order of the ends of calls, without calls that backward does not come to. Backward
            gathers ahead from the last to the first.
        first_begins: the clock when the first call of each unit began, of the calls with a ``position`` here.
    """

    __slots__ = ("__weakref__", "begun", "cursor", "ended", "first_begins", "predicted")

    def __init__(
        self, predicted: list[weakref.ref[Unit]], begun: list[weakref.ref[Unit]] | None = None, cursor: int = 0
    ) -> None:
        self.predicted, self.cursor = predicted, cursor
        self.begun: list[weakref.ref[Unit]] = [] if begun is None else begun
        self.ended: list[weakref.ref[Unit]] = []
        self.first_begins: dict[weakref.ref[Unit], int] = {}

    def record_begin(self, unit: weakref.ref[Unit]) -> None:
        """Record that a call of a unit begins, and move the cursor behind the unit."""
        if len(self.begun) < _MAX_CALLS:
            self.begun.append(unit)
        # A unit that is not predicted moves the cursor to the end, so the rest of the pass has no prediction.
        while self.cursor < len(self.predicted) and self.predicted[self.cursor] is not unit:
            self.cursor += 1
        self.cursor += 1

    def following(self, limit: int) -> list[Unit]:
        """Return the units with parameters that are predicted next, at most ``limit``, which is 1 or more.

        From the second unit on all parameters must be trained (docs/design/order.md, "Streams").
        """
        ahead: list[Unit] = []
        for reference in self.predicted[self.cursor : self.cursor + 2 * limit]:
            unit = reference()
            if unit is not None and unit.groups:
                if ahead and not unit.is_trained:
                    break
                ahead.append(unit)
                if len(ahead) == limit:
                    break
        return ahead

    def record_end(self, unit: weakref.ref[Unit], call: Call | None) -> None:
        """Record that a call of a unit has ended, which backward may come to.

        Args:
            call: None if backward comes to the call on other ranks only.
        """
        position = len(self.ended)
        if position == _MAX_CALLS:
            return
        if call is not None:
            if unit not in self.first_begins:
                self.first_begins[unit] = call.begin
            call.forward_pass, call.position = self, position
        self.ended.append(unit)

    def next(self) -> ForwardPass:
        """Return the pass after this one, as the root's next forward begins."""
        return ForwardPass(self.begun or self.predicted)

    def after_backward(self) -> ForwardPass:
        """Return a pass for calls outside of the root after a backward, until the root's next forward."""
        return ForwardPass(self.predicted, self.begun, self.cursor)


class Call:
    """A forward call of a unit; the autograd hooks on the outputs keep it alive.

    The root's clock counts the beginnings and ends of calls (docs/design/order.md, "The clock").

    Attributes:
        begin: the clock when the call began. end: when it ended; ``begin`` until then.
        num_changes: ``Unit.count_changes`` when the call got its weights.
        first_node: autograd's sequence number for the first node that the call's thread made after its beginning.
        forward_pass: the pass that the call ended in; None if the call ran in a backward, or if backward does not
            come through its outputs. position: the place of the call in ``forward_pass.ended``.
        is_pending: True while the call is in ``Unit.pending_calls``.
        is_expected: True for a call that a reentrant checkpoint made in a backward, which will come to this call.
        entered_in: the number of the last backward that reached its outputs; 0 for none so far. task: autograd's
            number of the graph in which it did; a graph inside of another has the higher number.
    """

    __slots__ = (
        "__weakref__", "_unit", "begin", "end", "entered_in", "first_node", "forward_pass", "is_expected", "is_pending",
        "num_changes", "position", "task",
    )  # fmt: skip

    def __init__(self, unit: Unit, begin: int) -> None:
        self._unit = unit.reference
        self.begin = self.end = begin
        self.first_node = _next_sequence_number()
        self.forward_pass: ForwardPass | None = None
        self.position = 0
        self.is_pending = self.is_expected = False
        self.entered_in = self.task = 0
        self.num_changes = 0

    @property
    def unit(self) -> Unit:
        """The unit that was called; graphs do not keep models alive.

        Raises:
            StateError: the unit was deleted.
        """
        unit = self._unit()
        if unit is None:
            raise StateError(
                "backward through the output of a sharded model that was deleted. fix: keep the model until backward "
                "has ended"
            )
        return unit

    def units_before(self) -> Iterator[Unit]:
        """Yield the units whose calls ended before this one in the same forward pass, the latest first."""
        if self.forward_pass is not None:
            for position in range(self.position - 1, -1, -1):
                unit = self.forward_pass.ended[position]()
                if unit is not None:
                    yield unit

    def first_begin(self) -> int:
        """Return when the unit's first call in the same forward pass began."""
        return self.begin if self.forward_pass is None else self.forward_pass.first_begins[self._unit]


class Unit:
    """Modules that are gathered, resharded and reduced together.

    Attributes:
        name: the path of the unit's (first) module below the root, for messages.
        reference: a weak reference to the unit, for objects that must not keep it alive.
        groups: the parameter groups; empty if other units have all parameters of the module.
        root: the state that all units of the model share.
        inner: the units inside of this unit, which were made before it.

    Attributes that the user sets:
        reshard_after_forward: None reshards a unit below the root when the next unit runs, and does not reshard the
            root. An int above 1 is True here, and the groups keep a part of the weights (``PostForwardShard``).
        reshard_after_backward: False keeps the weights gathered for the next forward.
        unshards_in_backward: False if the module's backward does not read its weights, so they are not gathered.
        requires_all_reduce: True if the last backward also reduces over axes that hold partial sums.
        requires_gradient_sync: False keeps gradients unreduced on this rank until a backward with True.
        forward_prefetch, backward_prefetch: units to gather ahead; if empty, the last pass predicts them.
        slots: the source of memory for gathered weights and packed gradients.

    Attributes that follow from the groups (``count_trained``):
        gradient_buffers: of the groups that have one.
        num_trained: the number of trained parameters. is_trained: all parameters are trained.
        rests_final: True if the reductions in backward leave no axis to reduce once per step.

    Attributes that a step changes:
        weight_state: changed only by ``unshard``, ``wait_for_unshard`` and ``reshard``.
        num_holds: how many ``unsharded()`` blocks the unit is in; ``reshard`` does nothing then.
        num_changes_held: ``count_changes`` when the first of these blocks began.
        gather_ticket: the ticket of a gather that compute has not waited for; None without a gather, or if all weights
            rest whole.
        pending_calls: weak references to the calls that a backward may still enter, the oldest first.
        open_call: the call that runs, or None. pending_modules: the ids of the modules that have still to run in it.
    """

    root: Root

    def __init__(
        self, name: str, modules: Sequence[nn.Module], groups: Sequence[ParameterGroup], policy: MixedPrecisionPolicy
    ) -> None:
        self.name = name
        self.reference: weakref.ref[Unit] = weakref.ref(self)
        self.policy = policy
        self.modules = [weakref.ref(module) for module in modules]
        self.set_groups(groups)
        self.module_ids = frozenset(map(id, modules))
        self.inner: list[weakref.ref[Unit]] = []
        self.slots = SlotChoice()
        self.reshard_after_forward: bool | None = None
        self.reshard_after_backward = self.unshards_in_backward = True
        self.requires_gradient_sync = self.requires_all_reduce = True
        self.forward_prefetch: list[weakref.ref[Unit]] = []
        self.backward_prefetch: list[weakref.ref[Unit]] = []
        self.weight_state = WeightState.SHARDED
        self.num_holds = self.num_changes_held = 0
        self.gather_ticket: Ticket | None = None
        self.gradient_buffers: tuple[GradientBuffer, ...] = ()
        self.num_trained, self.rests_final, self.is_trained = 0, True, False
        self.pending_calls: list[weakref.ref[Call]] = []
        self.open_call: Call | None = None
        self.pending_modules: set[int] = set()

    def set_groups(self, groups: Sequence[ParameterGroup]) -> None:
        """Replace the parameter groups of the unit."""
        self.groups = tuple(groups)
        for group in groups:
            group.unit_id, group.module = id(self), self.modules[0]

    def count_trained(self) -> None:
        """Update the attributes that depend on which parameters are trained and which groups have gradient buffers."""
        self.gradient_buffers = tuple(
            group.gradient_buffer for group in self.groups if group.gradient_buffer is not None
        )
        self.num_trained = sum(sum(buffer.binding.trained) for buffer in self.gradient_buffers)
        self.is_trained = self.num_trained == sum(len(group.parameters) for group in self.groups)
        self.rests_final = all(buffer.rests_final for buffer in self.gradient_buffers)

    @property
    def backward_reads_weights(self) -> bool:
        """True while a backward is in the unit and may read the gathered weights."""
        state = self.root.backward
        return is_in_backward() and self.reference in state.active and self.reference not in state.closed

    @property
    def is_in_forward(self) -> bool:
        """True while a forward of the unit runs, also one that a checkpoint recomputes in backward."""
        shows_gathered = any(group.fsdp_params.module_infos.shows_gathered for group in self.groups)
        return self.open_call is not None or (self.backward_reads_weights and shows_gathered)

    @property
    def gathered_bytes(self) -> int:
        """The bytes that a gather of the unit allocates; weights that rest whole do not count."""
        return sum(group.gathered.nbytes for group in self.groups if not group.weights.rests_whole)

    def show_sharded(self) -> None:
        """Register the sharded parameters in the modules without releasing the gathered weights."""
        if self.num_holds:
            return
        for group in self.groups:
            group.fsdp_params.module_infos.show(is_gathered=False)

    def has_old_weights(self) -> bool:
        """Return whether the gathered weights are older than the main weights, or were changed in place."""
        for group in self.groups:
            is_changed = self.weight_state is WeightState.UNSHARDED and group.fsdp_params.changed_in_place()
            if is_changed or group.freshness.gathered_are_old():
                return True
        return False

    def count_changes(self) -> int:
        """Look for changes of the main weights; return how many were found so far."""
        number = 0
        for group in self.groups:
            group.freshness.notice_changes()
            number += group.freshness.num_changes
        return number

    def check_replaced_params(self) -> None:
        """Call ``on_replaced`` of the hooks if a module has another tensor registered under a parameter's name."""
        for group in self.groups:
            if group.fsdp_params.module_infos.is_replaced():
                for hook in self.root.hooks:
                    hook.on_replaced(group)

    def reshards_after_forward(self) -> bool:
        """Return whether the unit releases its gathered weights between forward and backward.

        By default a unit below the root does so when the next unit runs; the last unit of a forward keeps its weights.
        """
        if self.reshard_after_forward is None:
            return self is not self.root.outermost()
        return self.reshard_after_forward is not False

    # ------------------------------------------------------------------ weights

    def unshard(self, *, check: bool) -> None:
        """Issue the gather of the weights, unless they are gathered or a gather was issued.

        ``wait_for_unshard`` shows the weights in the modules.

        Args:
            check: look whether main weights changed since the last gather. False in backward, except for a
                recomputation whose main weights have changed.
        """
        if self.weight_state is not WeightState.SHARDED or not self.groups:
            return
        for hook in self.root.collective_hooks:
            hook.before_gather(self)
        if listeners:
            tell("gather", self)
        try:
            self.gather_ticket = start_gathers(self.groups, check=check, owner=id(self))
        except RuntimeError as error:
            # On a CPU the host waits for the refresh of resting weights that a step has changed.
            AgreementError.raise_for(self.name, "the gather of its weights", error)
        # Last: after an error above (an interrupt, out of memory) the unit must not look gathered.
        self.weight_state = WeightState.GATHERING

    def wait_for_unshard(self) -> None:
        """Make compute wait for the gather that was issued, and show the gathered weights in the modules.

        Raises:
            AgreementError: the gather failed or timed out.
        """
        if self.weight_state is WeightState.UNSHARDED:
            # Modules may show the sharded parameters, after ``show_sharded`` or ``functional_call``.
            for group in self.groups:
                group.fsdp_params.module_infos.show(is_gathered=True)
        if self.weight_state is not WeightState.GATHERING:
            return
        if listeners:
            tell("use", self)
        if self.gather_ticket is not None:
            try:
                self.gather_ticket.wait()
            except (AgreementError, MeshError, RuntimeError) as error:
                # The next use must issue another gather.
                self.weight_state = WeightState.SHARDED
                if not isinstance(error, RuntimeError):
                    raise
                AgreementError.raise_for(self.name, "the gather of its weights", error)
        for group in self.groups:
            group.use_gathered()
        self.gather_ticket = None
        self.weight_state = WeightState.UNSHARDED
        if listeners:
            tell("unsharded", self)

    def reshard(self, *, keep_part: bool = False) -> None:
        """Show the sharded parameters, and release the gathered weights.

        Args:
            keep_part: as in ``ParameterGroup.release``.
        """
        if self.weight_state is WeightState.SHARDED or self.num_holds:
            return
        if listeners:
            tell("reshard", self)
        if self.weight_state is WeightState.GATHERING:
            self.wait_for_unshard()
        for group in self.groups:
            group.fsdp_params.module_infos.show(is_gathered=False)
        self.weight_state = WeightState.SHARDED
        # The user must see the error that is being handled. The next reshard reports the change in place.
        is_raising = sys.exc_info()[0] is not None
        changed: Sequence[torch.Tensor] = ()
        for group in self.groups:
            changed = group.release(keep_part=keep_part, is_raising=is_raising) or changed
        if changed:
            refuse_change(changed)

    # ------------------------------------------------------------------ calls

    def begin_call(self, module: nn.Module) -> Call | None:
        """Record that a module of the unit runs.

        Returns:
            The unit's call that begins with this module; None if the call began with another module.
        """
        if self.open_call is not None and id(module) in self.pending_modules:
            self.pending_modules.discard(id(module))
            return None
        self.root.clock += 1
        call = self.open_call = Call(self, self.root.clock)
        self.pending_modules = set(self.module_ids)
        self.pending_modules.discard(id(module))
        return call

    def end_call(self, call: Call) -> None:
        """Record that the last module of a call has run."""
        self.open_call = None
        self.root.clock += 1
        call.end = self.root.clock

    def calls_to_come(self, end: float = math.inf) -> list[Call]:
        """Return the pending calls that began at or before ``end`` and that this backward has not entered."""
        backward = self.root.backward.number
        return [
            call
            for reference in self.pending_calls
            if (call := reference()) is not None and call.entered_in != backward and call.begin <= end
        ]

    def drop_entered(self) -> None:
        """Drop the pending calls that this backward has entered; with a retained graph another may enter them again."""
        backward, kept = self.root.backward.number, []
        for reference in self.pending_calls:
            call = reference()
            if call is not None:
                call.is_pending = call.entered_in != backward
                if call.is_pending:
                    kept.append(reference)
        self.pending_calls = kept

    def add_pending(self, call: Call) -> None:
        """Add a call to the pending ones, where it stays as long as the hooks on its outputs keep it alive."""
        if not call.is_pending:
            call.is_pending = True
            self.pending_calls.append(weakref.ref(call))
            if len(self.pending_calls) > 1:
                living = [reference for reference in self.pending_calls if reference() is not None]
                self.pending_calls = sorted(living, key=_begin_of)


class BackwardState:
    """The state of the backwards of one root (FSDP2's ``FSDPStateContext``).

    Attributes that the user's settings determine:
        is_last: True if the next backward is the last of an optimizer step; ``set_is_last_backward``.
        is_manual: True if ``finalize_backward`` completes the gradients, and not the backward itself.
        max_packed_buffers: how many units may have packed gradients at once.

    Attributes that belong to one backward, from ``begin_backward`` to ``final_callback``:
        ending: a weak reference to the callback that autograd calls at the end; None outside of a backward. The
            callback dies with a backward that raises.
        task: autograd's number for the graph that the backward began with.
        has_gradients: True once a parameter has got a gradient, or will get one for certain.
        active: the units that backward is in, and units gathered again after backward left them. The references are
            weak: a model is freed when it is deleted, even if its backward raised.
        oldest_calls: for each unit, the oldest call that this backward has reached.
        repeated: for each unit, the last call that a checkpoint made in this backward.
        closed: the units that were reduced, or need not be.
        deferred: the units that were closed before any parameter had a gradient, and are not reduced yet.

    Attributes that go from one backward to the next:
        number: how many backwards have begun.
        is_unfinished: True if ``finalize_backward`` has still to complete gradients. open_handle: the id of the
            ``GradientReductionHandle`` that was not waited for; 0 for none.
        has_sums: True if ``.grad`` of a parameter may show a sum that is not final.
        num_requires_grad_writes: ``REQUIRES_GRAD_WRITES.number`` when the last backward began.
        reducing: the units whose reductions compute has not waited for, oldest first.
        lenders: the packers that hold gradients which a lane reads, oldest first.
        wire_ticket: without streams, the ticket of the last reduction that uses the buffer in the reduce dtype.
    """

    def __init__(self, max_packed_buffers: int) -> None:
        self.is_last = True
        self.number = 0
        self.max_packed_buffers = max_packed_buffers
        self.is_manual = self.is_unfinished = False
        self.open_handle = 0
        self.active: dict[weakref.ref[Unit], None] = {}
        self.oldest_calls: dict[weakref.ref[Unit], Call] = {}
        self.repeated: dict[weakref.ref[Unit], Call] = {}
        self.closed: set[weakref.ref[Unit]] = set()
        self.deferred: list[weakref.ref[Unit]] = []
        self.has_gradients = False
        self.task = -1
        self.ending: weakref.ref[functools.partial[None]] | None = None
        self.has_sums = False
        self.num_requires_grad_writes = -1
        self.reducing: list[weakref.ref[Unit]] = []
        self.lenders: list[weakref.ref[LanePacker]] = []
        self.wire_ticket: Ticket | None = None


class Root:
    """The state that all units below one root share.

    Each forward pass is recorded and predicts the next pass. A unit that was not predicted is gathered when it runs.

    Args:
        outermost: the root unit.
        units: all units of the root, the root unit included.

    Attributes:
        outermost: a weak reference to the root unit.
        hooks: the attached checks and variants. collective_hooks: the hooks that are called for each collective.
        order: an order of collectives that all ranks share (``set_forward_order``); None for the order of calls.
        backward: the state of backwards.
        device: the device with streams on which units compute; None without one, as on a CPU.
        step_event: recorded after an optimizer step; the next forward waits for it. None if no step was recorded.
        prefetch_bytes: the limit on weights gathered ahead; None limits the number of units instead.
        forward_pass: the forward pass that runs, or ran last.
        clock: how many beginnings and ends of calls there were (docs/design/order.md, "The clock").
        lingering: the unit that ran last in forward. The weights stay until the next unit runs, because backward may be
            next.
        ahead: the units of the last prefetch.
    """

    def __init__(self, outermost: Unit, units: Iterable[Unit]) -> None:
        units = list(units)
        self.outermost = outermost.reference
        self.adopt(units)
        self.hooks: tuple[StepHooks[Unit, Call], ...] = ()
        self.collective_hooks: tuple[StepHooks[Unit, Call], ...] = ()
        self.order: SharedOrder[Unit, Call] | None = None
        # Of a model on the meta device: where its memory will be.
        devices = {group.spec.device for unit in units for group in unit.groups}
        self.device = next((device for device in devices if turns(device) is not None), None)
        self.backward = BackwardState(1 if self.device is None else 2)
        self.step_event: Event | None = None
        self.prefetch_bytes: int | None = None
        self.forward_pass = ForwardPass([])
        self.clock = 0
        self.lingering: weakref.ref[Unit] | None = None
        self.ahead: list[weakref.ref[Unit]] = []

    def adopt(self, units: Iterable[Unit]) -> None:
        """Become the root of these units, and of no others."""
        units = list(units)
        self._units = [unit.reference for unit in units]
        for unit in units:
            unit.root = self

    def take_over(self, earlier: Root) -> None:
        """Take units from the root that they had before, which keeps the others, and continue its numbers.

        Its settings are taken too if it keeps none.
        """
        mine, theirs = self.backward, earlier.backward
        earlier._units = [reference for reference in earlier._units if reference not in self._units]
        self.clock = max(self.clock, earlier.clock)
        if mine.reducing is not theirs.reducing:
            # One list from now on: ``drain`` of either root waits for the reductions of all units.
            theirs.reducing += mine.reducing
            mine.reducing = theirs.reducing
        mine.number = max(mine.number, theirs.number)
        mine.has_sums = mine.has_sums or theirs.has_sums
        if not earlier._units:
            mine.is_last, mine.is_manual = mine.is_last and theirs.is_last, mine.is_manual or theirs.is_manual
            mine.is_unfinished = mine.is_unfinished or theirs.is_unfinished
            mine.max_packed_buffers = max(mine.max_packed_buffers, theirs.max_packed_buffers)
            self.prefetch_bytes = self.prefetch_bytes or earlier.prefetch_bytes
            self.step_event = self.step_event or earlier.step_event

    def set_hooks(self, hooks: Iterable[StepHooks[Unit, Call]]) -> None:
        """Replace the hooks."""
        self.hooks = tuple(hooks)
        self.collective_hooks = tuple(hook for hook in self.hooks if sees_collectives(hook))

    def units(self) -> list[Unit]:
        """Return the units in the registration order of the root's modules."""
        return alive(self._units)

    def gradient_buffers(self) -> list[GradientBuffer]:
        """Return the gradient buffers of all units."""
        return [buffer for unit in self.units() for buffer in unit.gradient_buffers]

    def prefetch(self, units: Sequence[Unit], *, check: bool) -> None:
        """Issue gathers ahead of use, in this order.

        Does nothing while weights of an earlier prefetch are unused, so that their memory and these never add up. The
        caller gathers the unit that it needs now in any case, later.
        """
        for reference in self.ahead:
            ahead = reference()
            if ahead is not None and ahead.weight_state is WeightState.GATHERING and ahead not in units:
                return
        self.ahead = []
        for unit in units:
            if unit.weight_state is WeightState.SHARDED:
                unit.unshard(check=check)
            self.ahead.append(unit.reference)

    def within_budget(self, following: Iterable[Unit]) -> list[Unit]:
        """Return the leading units of ``following``, as many as fit into ``prefetch_bytes``, and at least one."""
        assert self.prefetch_bytes is not None
        units: list[Unit] = []
        left = self.prefetch_bytes
        for unit in following:
            if not unit.groups or unit in units:
                continue
            left -= unit.gathered_bytes
            if units and left < 0:
                break
            units.append(unit)
        return units

    def prefetch_tickets(self) -> list[Ticket]:
        """Return the tickets of the last prefetch's gathers that compute has not waited for."""
        return [unit.gather_ticket for unit in alive(self.ahead) if unit.gather_ticket is not None]

    def release_lingering(self, unit: Unit | None = None) -> None:
        """Reshard the unit that ran last in forward, because ``unit`` runs now."""
        if self.lingering is not None:
            lingering, self.lingering = self.lingering(), None
            if lingering is None or lingering is unit or lingering.open_call is not None:
                return
            if self.order is None or not self.order.stays(lingering):
                lingering.reshard()


def alive(references: Iterable[weakref.ref[Unit]]) -> list[Unit]:
    """Return the units that were not deleted."""
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


task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Return autograd's number for the graph that this thread is running; -1 outside of backward."""


def is_in_backward() -> bool:
    """Return whether autograd is running a backward in this thread."""
    return task_id() != -1


def _begin_of(reference: weakref.ref[Call]) -> int:
    call = reference()
    return 0 if call is None else call.begin
