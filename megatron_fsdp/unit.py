"""Unit: the state of one ``fully_shard`` call, shared by the modules it was given."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from megatron_fsdp.errors import StateError
from megatron_fsdp.gradients import GradientBuffer
from megatron_fsdp.parameter_group import ParameterGroup, WeightState
from megatron_fsdp.precision import MixedPrecisionPolicy

__all__ = ["Call", "Driver", "Unit", "watchers"]


class Driver(Protocol):
    """What a unit and its hooks ask of the schedule that serves it."""

    is_last_backward: bool
    requires_all_reduce: bool

    def before_forward(self, unit: Unit, module: nn.Module) -> None:
        """A module of the unit is about to run."""

    def after_forward(self, unit: Unit, module: nn.Module, output: Any) -> None:
        """A module of the unit has run."""

    def before_backward(self, call: Call) -> None:
        """Backward has reached an output of a call."""

    def gradient_arrived(self, unit: Unit) -> None:
        """One more gradient of the unit is packed."""

    def drain(self) -> None:
        """Make room for a packed gradient buffer."""


class Call:
    """One forward call of a unit, kept alive by the autograd hooks on its outputs.

    Attributes:
        begin, end: ticks of the schedule's clock; calls nest or follow each other, so these intervals do too.
        position: place in the schedule's list of finished calls of that forward pass.
        entered: the number of the last backward that reached its outputs; 0 for none so far.
    """

    __slots__ = ("__weakref__", "_unit", "begin", "end", "entered", "position", "trail")

    def __init__(self, unit: Unit, begin: int) -> None:
        self._unit = unit.reference
        self.begin = begin
        self.end = begin
        self.position = 0
        self.trail: list[weakref.ref[Unit]] = []
        self.entered = 0

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


class Unit:
    """Modules that are gathered, resharded and reduced together.

    Attributes:
        name: path of the (first) module below the root, for messages.
        groups: the parameter groups; empty for a module without parameters of its own.
        reshard_after_forward: as asked; None means yes, but no for the root.
        requires_gradient_sync: False keeps gradients here, unreduced, until a backward with True.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        groups: Sequence[ParameterGroup],
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.name = name
        self.groups = tuple(groups)
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.forward_prefetch: list[weakref.ref[Unit]] = []
        self.backward_prefetch: list[weakref.ref[Unit]] = []
        self.schedule: Driver
        self.modules = [weakref.ref(module) for module in modules]
        self.calls: list[weakref.ref[Call]] = []
        self.pending_modules: set[int] = set()
        self.open_call: Call | None = None
        self.gradients: tuple[GradientBuffer, ...] = tuple(
            group.gradients for group in self.groups if group.gradients is not None
        )
        self.num_gradients = sum(buffer.num_parameters for buffer in self.gradients)
        for buffer in self.gradients:
            buffer.observe(self)

    def awaits(self, module: nn.Module) -> bool:
        """Whether a call of the unit is under way in which this module of it has still to run."""
        return self.open_call is not None and id(module) in self.pending_modules

    def has_state(self, state: WeightState) -> bool:
        """Whether any of its groups is in ``state``."""
        return any(group.weight_state is state for group in self.groups)

    @property
    def reference(self) -> weakref.ref[Unit]:
        """A weak reference to the unit, for whoever it must not be kept alive by."""
        return weakref.ref(self)

    @property
    def is_sharded(self) -> bool:
        """Whether nothing of it is gathered or being gathered."""
        return all(group.weight_state is WeightState.SHARDED for group in self.groups)

    @property
    def num_arrived(self) -> int:
        """How many of its parameters got a gradient in this backward."""
        return sum(buffer.num_arrived for buffer in self.gradients)

    def outstanding_calls(self) -> Iterator[Call]:
        """Yield the forward calls whose backward may still come, oldest first."""
        alive = [(reference, call) for reference in self.calls if (call := reference()) is not None]
        self.calls = [reference for reference, _ in alive]
        for _, call in alive:
            yield call

    def before_packing(self) -> None:
        """Make room for a packed gradient buffer."""
        self.schedule.drain()

    def gradient_arrived(self) -> None:
        """Tell the schedule that one more gradient is packed."""
        self.schedule.gradient_arrived(self)

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
        self.calls = [
            reference for reference in self.calls if (call := reference()) is not None and call.entered != backward
        ]

    def expect(self, call: Call) -> None:
        """Expect a backward of ``call``, as long as the hooks on its outputs keep it alive."""
        if not any(reference() is call for reference in self.calls):
            self.calls.append(weakref.ref(call))
            self.calls.sort(key=_begin)

    def rename(self, name: str) -> None:
        """Take the name that the unit has below a (new) root."""
        self.name = name
        for group in self.groups:
            group.rename(name)


def watchers(tensor: torch.Tensor) -> list[Call]:
    """Return the calls that a tensor is an output of, which a hook on it enters.

    There are several where a unit returns its very input, or its last child's output: backward has to enter the later
    call first, while hooks of their own would run in the order of registration.
    """
    calls: list[Call] | None = getattr(tensor, "_fsdp_calls", None)
    if calls is None:
        calls = []
        tensor._fsdp_calls = calls  # type: ignore[attr-defined]  # lives and dies with the tensor
        tensor.register_hook(functools.partial(_enter_backward, calls))
    elif tensor.is_leaf:
        # A leaf outlives its graphs, and so would the calls of earlier steps.
        calls[:] = [call for call in calls if not call.entered]
    return calls


def _enter_backward(calls: list[Call], gradient: torch.Tensor) -> None:
    for call in reversed(calls):
        call.unit.schedule.before_backward(call)


def _begin(reference: weakref.ref[Call]) -> int:
    call = reference()
    return 0 if call is None else call.begin
