"""What a step hands on when it meets what it does not do itself; ``guards/attached.py`` attaches it to each root."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.step.unit import Call, Tree, Unit

__all__ = ["FirstUse", "Guards", "LastReductions", "MissingGradients"]


class FirstUse(Protocol):
    """The moment before the first collective of a root's units: ``guards/agreement.py``.

    Attributes:
        is_over: whether it has passed.
    """

    is_over: bool

    def before_gather(self, unit: Unit) -> None:
        """A unit is about to be gathered."""

    def before_reduction(self, unit: Unit) -> None:
        """Gradients of a unit are about to be reduced, or kept."""


class LastReductions(Protocol):
    """What is left to reduce when the last backward has closed a unit: ``grads/last_reduction.py``.

    Attributes:
        closed: the unit that was closed last, whose reduction the host would have to wait for; None for none.
    """

    closed: weakref.ref[Unit] | None

    def close(self, unit: Unit, backward: int) -> None:
        """Issue what is left to reduce of a unit that the last backward of a step, of this number, has closed."""

    def flush(self) -> None:
        """Issue what is left to reduce of the unit closed last."""

    def finish(self, units: Sequence[Sequence[ParameterGroup]]) -> None:
        """Issue what is left to reduce of these groups, by units, and make compute wait."""

    def finish_here(self, units: Sequence[Sequence[ParameterGroup]]) -> None:
        """Reduce, on compute, what is left to reduce that no lane can."""


class MissingGradients(Protocol):
    """Whether parameters that got no gradient on this rank got one on any: ``guards/missing_gradients.py``.

    Attributes:
        number: how many accumulations were reduced. has_question: something is to be found out at its end.
    """

    number: int
    has_question: bool

    def say(self, groups: Iterable[ParameterGroup]) -> None:
        """Tell the other ranks, before gradients are reduced, if some are missing here."""

    def settle(self, final: Sequence[ParameterGroup], units: Iterable[Unit]) -> None:
        """Leave in ``missing`` of reduced buffers what no rank has."""


class Guards(Protocol):
    """What is asleep in an undisturbed step. What refuses, or cannot do what it is for, raises a StateError.

    Attributes:
        first_use, last, missing: see there. armed: units whose inner modules' outputs are watched.
    """

    armed: list[weakref.ref[Unit]]

    @property
    def first_use(self) -> FirstUse:
        """When ranks agree on what the units are."""

    @property
    def last(self) -> LastReductions:
        """What is reduced once a step."""

    @property
    def missing(self) -> MissingGradients:
        """What ranks know of each other's missing gradients."""

    def arm(self) -> None:
        """Watch what modules inside of the units return, until that is seen to be of no use."""

    def disarm(self) -> None:
        """Watch it no more, where that was seen."""

    def admit(self, unit: Unit, group: ParameterGroup) -> None:
        """Decide what becomes, in a call, of what may be registered in the places of a group's parameters."""

    def settle(self, unit: Unit, group: ParameterGroup) -> None:
        """Decide that for good."""

    def follow_requires_grad(self, unit: Unit, group: ParameterGroup, changed: Sequence[int]) -> None:
        """Take notice of parameters that were frozen or unfrozen, or of gradients that users have kept."""

    def walk(self, tree: Tree, module: nn.Module, units: Sequence[Unit]) -> None:
        """Look through everything below a module for parameters that no unit shards."""

    def refuse_changed(self, weight: torch.Tensor) -> None:
        """Refuse that a gathered weight was changed in place."""

    def note_reads(self, call: Call, output: Any) -> None:
        """Note which weight the backward of a call would read."""

    def emit_ranges(self, units: Sequence[Unit]) -> None:
        """Emit ranges for a profiler that records."""

    def refuse_recorded(self, unit: Unit) -> None:
        """Refuse a backward that is itself recorded."""

    def refuse_stepped(self, call: Call) -> None:
        """Refuse the backward of a call whose weights changed after it."""

    def refuse_reads(self, call: Call) -> None:
        """Refuse the backward of a call that reads weights which were given back."""

    def refuse_gathered(self, groups: Iterable[ParameterGroup]) -> None:
        """Refuse that a backward was asked for gradients of gathered weights by name."""

    def before_recomputation(self, unit: Unit, module: nn.Module) -> None:
        """Gather a unit for a forward inside of backward."""

    def is_to_come(
        self, calls: Sequence[Call], unit: Unit, end: float, entered: Mapping[int, Call], units: Iterable[Unit]
    ) -> bool:
        """Whether the graph that autograd is going through leads to one of these calls of a unit."""

    def brings_gradients(self, units: Iterable[Unit]) -> bool:
        """Whether that graph brings a gradient of any unit that has not come yet."""
