"""Unit and Root: the state of one ``fully_shard`` call, and what the units of one model share.

A unit unshards and reshards its parameter groups together (FSDP2's ``FSDPState`` and ``FSDPParamGroup``). Nothing else
does, so that all of it is told (``dbuffer.events``). When, is decided in ``root.py`` and ``backward.py``.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from dbuffer.errors import MeshError
from dbuffer.events import listeners, tell
from megatron_fsdp.engine.freshness import MOMENTS
from megatron_fsdp.engine.grads import GradientBuffer, LanePacker
from megatron_fsdp.engine.hooks import SharedOrder, StepHooks, sees_collectives
from megatron_fsdp.engine.param_group import ParameterGroup, start_gathers
from megatron_fsdp.engine.streams import Event, Ticket, turns
from megatron_fsdp.engine.unsharded_param import refuse_change
from megatron_fsdp.errors import AgreementError, StateError
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.policy.slots import SlotChoice

__all__ = [
    "BackwardState", "Call", "Root", "Tree", "Unit", "WeightState", "alive", "is_in_backward", "units_below",
]  # fmt: skip


class WeightState(enum.Enum):
    """Where a unit's compute weights are: at rest alone; on their way, as a gather was issued; usable."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


_next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Call:
    """One forward call of a unit, kept alive by the autograd hooks on its outputs.

    Attributes:
        begin, end: ticks of the root's clock; calls nest or follow each other, so these intervals do too.
        trail, position: the root's list of finished calls of that forward pass, and the place in it.
        first_begin: when the unit's first watched call in the same pass began.
        entered: the number of the last backward that reached its outputs; 0 for none so far. task: autograd's number of
            the graph in which it did; that of one inside of another is higher.
        moment: of optimizers' steps when it began (``freshness.MOMENTS``).
        first_node: autograd's sequence number of the first node that the call's thread made in it.
        is_expected: whether the unit has it among the calls whose backward may still come. is_due: whether it was
            computed in a backward for that backward alone, by a reentrant checkpoint.
    """

    __slots__ = (
        "__weakref__", "_unit", "begin", "end", "entered", "first_begin", "first_node", "is_due", "is_expected",
        "moment", "position", "task", "trail",
    )  # fmt: skip

    def __init__(self, unit: Unit, begin: int) -> None:
        self._unit = unit.reference
        self.begin = self.first_begin = begin
        self.end = begin
        self.position = 0
        self.trail: list[weakref.ref[Unit]] = []
        self.entered = self.task = 0
        self.moment = MOMENTS[0]
        self.first_node = _next_sequence_number()
        self.is_due = self.is_expected = False

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


_values: Callable[[dict[str, Any]], Iterable[Any]] = dict.values


@dataclass(eq=False)
class Tree:
    """The modules and the places of parameters below one module of a unit, as ``added_params.py`` found them last.

    Attributes:
        ignored: where the parameters are that the caller asked to leave alone: a dictionary's identity and a name.
        modules, parameters: the dictionaries of all modules below. children, absent: what was in these, None
            before the first look, and whether.
        frozen: places of parameters that nobody shards and nobody trains.
    """

    ignored: dict[tuple[int, str], Any]
    modules: list[dict[str, nn.Module | None]] = field(default_factory=list)
    children: list[nn.Module | None] | None = None
    parameters: list[dict[str, nn.Parameter | None]] = field(default_factory=list)
    absent: list[bool] = field(default_factory=list)
    frozen: list[tuple[dict[str, nn.Parameter | None], str]] = field(default_factory=list)

    def is_changed(self) -> bool:
        """Whether modules or parameters were added since the last look, or what was frozen is trained."""
        modules = list(chain.from_iterable(map(_values, self.modules)))
        absent = list(map(operator.is_, chain.from_iterable(map(_values, self.parameters)), repeat(None)))
        if modules != self.children or absent != self.absent:
            return True
        found = (registry.get(name) for registry, name in self.frozen)
        return any(parameter is not None and parameter.requires_grad for parameter in found)


class Unit:
    """Modules that are gathered, resharded and reduced together.

    Attributes:
        name: path of the (first) module below the root, for messages.
        reference: weak, for whoever must not keep the unit alive.
        groups: the parameter groups; empty for a module without parameters of its own.
        root: what it shares with the other units of its model.
        reshard_after_forward: as asked; None means when the next unit runs, but not for the root. Groups that keep a
            part for backward know it themselves.
        rests_final: whether no axis is left to reduce when the last backward has closed it.
        requires_all_reduce: whether the last backward also reduces over axes that hold partial sums.
        requires_gradient_sync: False keeps gradients here, unreduced, until a backward with True.
        weight_state: where its weights are; changed by ``unshard``, ``wait_for_unshard`` and ``reshard`` alone.
        num_holds: how many ``unsharded()`` blocks keep its weights gathered; ``reshard`` leaves them there then.
            held_version: what ``main_version`` was when the first of them began.
        gather_ticket: of the gather under way, None where all weights rest whole.
        slots: where the memory of gathered weights and packed gradients comes from.
        inner: units inside of this one, all of which were made before it.
        calls: whose backward may still come. trail, first_begin: the pass of its last watched call, and when its first
            one in that pass began.
        open_call: that runs; pending_modules: which modules, by identity, have still to run in it.
        trees: by the id of the module.
    """

    root: Root

    def __init__(
        self, name: str, modules: Sequence[nn.Module], groups: Sequence[ParameterGroup], policy: MixedPrecisionPolicy
    ) -> None:
        self.name = name
        self.reference: weakref.ref[Unit] = weakref.ref(self)
        self.policy = policy
        self.modules = [weakref.ref(module) for module in modules]
        self.hold(groups)
        self.module_ids = frozenset(map(id, modules))
        self.trees: dict[int, Tree] = {}
        self.inner: list[weakref.ref[Unit]] = []
        self.slots = SlotChoice()
        self.reshard_after_forward: bool | None = None
        self.reshard_after_backward = self.unshards_in_backward = True
        self.requires_gradient_sync = self.requires_all_reduce = True
        self.forward_prefetch: list[weakref.ref[Unit]] = []
        self.backward_prefetch: list[weakref.ref[Unit]] = []
        self.weight_state = WeightState.SHARDED
        self.num_holds = self.held_version = 0
        self.gather_ticket: Ticket | None = None
        self.gradients: tuple[GradientBuffer, ...] = ()
        self.num_gradients, self.rests_final, self.is_trained = 0, True, False
        self.calls: list[weakref.ref[Call]] = []
        self.trail: list[weakref.ref[Unit]] | None = None
        self.first_begin = 0
        self.open_call: Call | None = None
        self.pending_modules: set[int] = set()

    def hold(self, groups: Sequence[ParameterGroup]) -> None:
        """Have these parameter groups from now on."""
        self.groups = tuple(groups)
        for group in groups:
            group.unit, group.module = id(self), self.modules[0]

    def count_gradients(self) -> None:
        """Take notice of gradient buffers that were made, and of parameters that were frozen or unfrozen."""
        self.gradients = tuple(group.gradients for group in self.groups if group.gradients is not None)
        self.num_gradients = sum(sum(buffer.binding.trained) for buffer in self.gradients)
        self.is_trained = self.num_gradients == sum(len(group.parameters) for group in self.groups)
        self.rests_final = all(buffer.rests_final for buffer in self.gradients)

    @property
    def gathered_bytes(self) -> int:
        """The bytes of the weights that are released between uses, while they are gathered."""
        return sum(group.gathered.nbytes for group in self.groups if not group.rests_whole)

    def show_sharded(self) -> None:
        """Show the sharded parameters, while gathered weights may stay for the backward that follows."""
        if self.num_holds:
            return
        for group in self.groups:
            group.fsdp_params.module_infos.show(is_gathered=False)

    def is_stale(self) -> bool:
        """Whether weights that are gathered, or on their way, are older than the main weights, or were changed."""
        for group in self.groups:
            is_changed = self.weight_state is WeightState.UNSHARDED and group.fsdp_params.changed_in_place()
            if is_changed or group.freshness.is_stale():
                return True
        return False

    def main_version(self) -> int:
        """Return a number that every change of the main weights that PyTorch counts makes larger."""
        return sum(tensor._version for group in self.groups for tensor in group.fsdp_params.counted)

    def refuse_replaced_params(self) -> None:
        """Refuse whatever is registered in the place of a parameter."""
        for group in self.groups:
            if group.fsdp_params.module_infos.is_replaced():
                for hook in self.root.hooks:
                    hook.on_replaced(group)

    def reshards_after_forward(self) -> bool:
        """Whether the unit gives its gathered weights back between forward and backward.

        One that was not told to does so when the next unit runs, so the last one of a forward keeps its weights.
        """
        if self.reshard_after_forward is None:
            return self is not self.root.outermost()
        return self.reshard_after_forward is not False

    # ------------------------------------------------------------------ weights

    def unshard(self, *, check: bool) -> None:
        """Issue the gather of the weights, unless they are there or on their way; ``wait_for_unshard`` shows them.

        Args:
            check: look whether main weights changed since the last gather; backward need not, as nothing steps between.
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
            # On a CPU the host waits for weights at rest that a step has changed.
            AgreementError.raise_for(self.name, "the gather of its weights", error)
        # Last, so that whatever is raised before (an interrupt, out of memory) leaves nothing that looks gathered.
        self.weight_state = WeightState.GATHERING

    def wait_for_unshard(self) -> None:
        """Make compute wait for a gather that was issued, and show the gathered weights in the modules.

        Raises:
            AgreementError: the gather did not end.
        """
        if self.weight_state is WeightState.UNSHARDED:
            # They may rest for a while, or ``functional_call`` has put back what it found.
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
                # No use waits for this gather once more.
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
        """Show the sharded parameters and release the gathered weights, which are there or on their way.

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
        # An error that is being handled is what should be seen; the next reshard finds the change as well.
        is_raising = sys.exc_info()[0] is not None
        changed: Sequence[torch.Tensor] = ()
        for group in self.groups:
            changed = group.release(keep_part=keep_part, is_raising=is_raising) or changed
        if changed:
            refuse_change(changed)

    # ------------------------------------------------------------------ calls

    def begin_call(self, module: nn.Module) -> Call | None:
        """Note that a module of the unit runs; return the call of the unit that begins with it; None for none."""
        if self.open_call is not None and id(module) in self.pending_modules:
            self.pending_modules.discard(id(module))
            return None
        self.root.clock += 1
        call = self.open_call = Call(self, self.root.clock)
        self.pending_modules = set(self.module_ids)
        self.pending_modules.discard(id(module))
        return call

    def end_call(self, call: Call) -> None:
        """Note that the last module of a call has run."""
        self.open_call = None
        self.root.clock += 1
        call.end = self.root.clock

    def calls_not_entered(self, backward: int, end: float = math.inf) -> list[Call]:
        """Return the calls that a backward has not entered and may still enter, or not, that began until ``end``."""
        return [
            call
            for reference in self.calls
            if (call := reference()) is not None and call.entered != backward and call.begin <= end
        ]

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
                self.calls = sorted((reference for reference in self.calls if reference() is not None), key=_begin)


class BackwardState:
    """How far the backwards of one root are; ``backward.py`` changes it. FSDP2's ``FSDPStateContext``.

    Attributes:
        is_last: whether the next backward ends an optimizer step's gradient accumulation.
        number: how many backwards there were so far. is_under_way: whether the last one of them has not ended.
        has_streams: whether a unit's device has them. max_packed_buffers: how many units' packed gradients may live at
            once.
        is_manual: whether a backward leaves it to a ``final_callback`` outside of it to complete the gradients.
        is_unfinished: whether that is still to come. awaited: identity of the handle to be waited for.
        active: units that this backward is in, or whose weights it has gathered once more. Weak, so that a model whose
            backward raised is freed when it is deleted. entered: the oldest call of each unit that it has come to.
            repeated: the last one of each unit that it has computed again. All by identity.
        closed: units whose gradients it has done with. deferred: those that were closed when nothing had a gradient
            yet.
        has_gradients: whether anything has a gradient, or will have. task: autograd's number of the graph that it
            began in.
        ending: what autograd calls at the end; dead when the backward has raised, None where none is under way.
        has_sums: whether ``.grad`` of a parameter may show a sum under way.
        num_flags_set: ``NUM_FLAGS_SET`` when the last backward began.
        reducing: units whose gradients are being reduced, in the order of issue.
        lenders: whose gradients a lane still reads, oldest first.
        wired: of the reduction issued last whose wire has memory until the host has waited.
    """

    def __init__(self, units: Iterable[Unit]) -> None:
        self.is_last = True
        self.number = 0
        self.is_under_way = False
        devices = {group.spec.compute_device for unit in units for group in unit.groups}
        self.has_streams = any(turns(device) is not None for device in devices)
        self.max_packed_buffers = 2 if self.has_streams else 1
        self.is_manual = self.is_unfinished = False
        self.awaited = 0
        self.active: dict[int, weakref.ref[Unit]] = {}
        self.entered: dict[int, Call] = {}
        self.repeated: dict[int, Call] = {}
        self.closed: set[int] = set()
        self.deferred: list[weakref.ref[Unit]] = []
        self.has_gradients = False
        self.task = -1
        self.ending: weakref.ref[functools.partial[None]] | None = None
        self.has_sums = False
        self.num_flags_set = -1
        self.reducing: list[weakref.ref[Unit]] = []
        self.lenders: list[weakref.ref[LanePacker]] = []
        self.wired: Ticket | None = None


class Root:
    """What the units below one root share: the order in which they run, and who is told of it.

    Each forward pass is recorded and predicts the next one. A pass that takes another way is met by gathers on demand,
    and becomes the next prediction.

    Args:
        outermost: the root unit. units: all units that are served, with that one.

    Attributes:
        outermost: weakly.
        hooks: what is told of the steps; empty for none. collective_hooks: those of them that see each collective.
        order: an order of collectives that all ranks share (``set_forward_order``); None for the order of calls.
        backward: how far backward is.
        step_event: recorded after an optimizer step, awaited by the next forward; None for none.
        prefetch_bytes: of gathered weights that may be gathered ahead of their use; None counts units instead.
        trail: the units of this forward pass that were left, in order, for each call that backward may come to.
        clock: counts beginnings and ends of calls.
        recorded, expected: the units of this pass and of the last one, in the order of their calls. cursor: where this
            pass is in ``expected``.
        lingering: the unit that forward left last, whose weights stay until the next one is needed: backward may be
            next.
        ahead: the units that were gathered ahead of their use last.
    """

    def __init__(self, outermost: Unit, units: Iterable[Unit]) -> None:
        units = list(units)
        self.outermost = outermost.reference
        self._units = [unit.reference for unit in units]
        self.hooks: tuple[StepHooks[Unit, Call], ...] = ()
        self.collective_hooks: tuple[StepHooks[Unit, Call], ...] = ()
        self.order: SharedOrder[Unit, Call] | None = None
        self.backward = BackwardState(units)
        self.step_event: Event | None = None
        self.prefetch_bytes: int | None = None
        self.trail: list[weakref.ref[Unit]] = []
        self.clock = 0
        self.recorded: list[weakref.ref[Unit]] = []
        self.expected: list[weakref.ref[Unit]] = []
        self.cursor = 0
        self.lingering: weakref.ref[Unit] | None = None
        self.ahead: list[weakref.ref[Unit]] = []
        for unit in units:
            unit.root = self

    def attach(self, hooks: Iterable[StepHooks[Unit, Call]]) -> None:
        """Tell these objects of the steps from now on, and no others."""
        self.hooks = tuple(hooks)
        self.collective_hooks = tuple(hook for hook in self.hooks if sees_collectives(hook))

    def units(self) -> list[Unit]:
        """Return the units served, in the order in which the root's modules are registered."""
        return alive(self._units)

    def prefetch(self, units: Sequence[Unit], *, check: bool) -> None:
        """Issue predicted gathers, unless another one predicted is still unused: memory is for these alone."""
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
        """Return the first of the units that use weights next: one, and more while they fit into ``prefetch_bytes``."""
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

    def prefetched(self) -> list[Ticket]:
        """Return the tickets of predicted gathers that are on their way."""
        return [unit.gather_ticket for unit in alive(self.ahead) if unit.gather_ticket is not None]

    def release_lingering(self, unit: Unit | None = None) -> None:
        """Reshard the unit that forward left last, now that another one runs."""
        if self.lingering is not None:
            lingering, self.lingering = self.lingering(), None
            if lingering is None or lingering is unit or lingering.open_call is not None:
                return
            if self.order is None or not self.order.stays(lingering):
                lingering.reshard()


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


task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Autograd's number of the graph that it is going through in this thread; -1 for none."""


def is_in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return task_id() != -1


def _begin(reference: weakref.ref[Call]) -> int:
    call = reference()
    return 0 if call is None else call.begin
