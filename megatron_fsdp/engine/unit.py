"""Unit: the state of one ``fully_shard`` call, shared by the modules it was given; FSDP2's ``FSDPState``."""

from __future__ import annotations

import enum
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from megatron_fsdp.engine.freshness import MOMENTS
from megatron_fsdp.engine.grads import GradientBuffer
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.streams import Ticket
from megatron_fsdp.errors import StateError
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.policy.slots import SlotChoice

__all__ = ["Call", "Tree", "Unit", "WeightState", "alive", "is_in_backward", "units_below"]


class WeightState(enum.Enum):
    """Where a unit's compute weights are: at rest alone; on their way, as a gather was issued; usable."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


_next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Call:
    """One forward call of a unit, kept alive by the autograd hooks on its outputs.

    Attributes:
        begin, end: ticks of the schedule's clock; calls nest or follow each other, so these intervals do too.
        position: place in the schedule's list of finished calls of that forward pass.
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
        schedule, backward: the ``Schedule`` and the ``Backward`` that drive it, with the other units of its root.
        reshard_after_forward: as asked; None means when the next unit runs, but not for the root. Groups that keep a
            part for backward know it themselves.
        rests_final: whether no axis is left to reduce when the last backward has closed it.
        requires_all_reduce: whether the last backward also reduces over axes that hold partial sums.
        requires_gradient_sync: False keeps gradients here, unreduced, until a backward with True.
        weight_state: where its weights are; changed by its ``Schedule`` alone.
        gather_ticket: of the gather under way, None where all weights rest whole.
        slots: where the memory of gathered weights and packed gradients comes from.
        inner: units inside of this one, all of which were made before it.
        calls: whose backward may still come. trail, first_begin: the pass of its last watched call, and when its first
            one in that pass began.
        open_call: that runs; pending_modules: which modules, by identity, have still to run in it.
        trees: by the id of the module.
    """

    # Of files above: nothing here calls them.
    schedule: Any
    backward: Any

    def __init__(
        self, name: str, modules: Sequence[nn.Module], groups: Sequence[ParameterGroup], policy: MixedPrecisionPolicy
    ) -> None:
        self.name = name
        self.reference: weakref.ref[Unit] = weakref.ref(self)
        self.groups, self.policy = tuple(groups), policy
        self.modules = [weakref.ref(module) for module in modules]
        for group in groups:
            group.unit, group.module = id(self), self.modules[0]
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
        self.gather_ticket: Ticket | None = None
        self.gradients: tuple[GradientBuffer, ...] = ()
        self.num_gradients, self.rests_final, self.is_trained = 0, True, False
        self.calls: list[weakref.ref[Call]] = []
        self.trail: list[weakref.ref[Unit]] | None = None
        self.first_begin = 0
        self.open_call: Call | None = None
        self.pending_modules: set[int] = set()

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
        for group in self.groups:
            group.fsdp_params.module_infos.show(is_gathered=False)

    def is_stale(self) -> bool:
        """Whether weights that are gathered, or on their way, are older than the main weights, or were changed."""
        for group in self.groups:
            is_changed = self.weight_state is WeightState.UNSHARDED and group.fsdp_params.changed_in_place()
            if is_changed or group.freshness.is_stale():
                return True
        return False

    # ------------------------------------------------------------------ calls

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
