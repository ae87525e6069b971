"""``weight_version``: a number that grows with every change of a model's weights; steps of open streams are refused."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_fsdp.checkpoint.model_state import unwrapped
from megatron_fsdp.engine.optimizer_steps import STEP_CHECKS
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import units_below
from megatron_fsdp.errors import StateError

__all__ = ["WeightTracker", "groups_replaced", "is_being_sent", "refuse_steps", "tracker_of", "weight_version"]


def weight_version(model: nn.Module) -> int:
    """Return the version of a model's weights: 0 at the first call, and higher after every change of them.

    Every step of an optimizer that has parameters of the model adds 1. Other changes of sharded parameters that PyTorch
    counts (a load, an in-place operator) add 1 together, at the next call. Changes of buffers of modules, and changes
    through ``.data``, do not count. All ranks get the same number if they made the same changes.

    Example:
        version = weight_version(model)
        optimizer.step()
        assert weight_version(model) == version + 1
    """
    return tracker_of(model).current()


class WeightTracker:
    """The version of one model's weights.

    The model's units and parameters are looked up each time: ``fully_shard``, ``reshard_`` and the user change them.

    Attributes:
        num_steps: of optimizers that step any parameter of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(unwrapped(model))
        self.num_steps = 0
        self._version = self._steps_seen = 0
        self._counted = self._counters()

    def current(self) -> int:
        """Return the version, after a look at the counters of changes."""
        counted, steps = self._counters(), self.num_steps - self._steps_seen
        if steps or any(self._counted.get(group) != count for group, count in counted.items()):
            self._version += max(steps, 1)
        self._counted, self._steps_seen = counted, self.num_steps
        return self._version

    def accept_groups(self) -> None:
        """Take the parameter groups that the model has now as unchanged."""
        self._counted = self._counters()

    def has_any(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has any parameter of the model."""
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return any(id(parameter) in stepped for parameter in self._parameters())

    def _parameters(self) -> Iterator[nn.Parameter]:
        """Yield the model's parameters, sharded and plain ones; those of the first unit first."""
        for group in self._groups():
            yield from group.parameters.values()
        model = self._model()
        if model is not None:
            yield from model.parameters()

    def _groups(self) -> Iterator[ParameterGroup]:
        model = self._model()
        for unit in units_below(model) if model is not None else ():
            yield from unit.groups

    def _counters(self) -> weakref.WeakKeyDictionary[ParameterGroup, int]:
        """Return the sum of version counters of each group's main weights; -1 for weights without memory."""
        found: weakref.WeakKeyDictionary[ParameterGroup, int] = weakref.WeakKeyDictionary()
        for group in self._groups():
            found[group] = -1
            if not group.spec.is_meta and group.weights.main.storage.is_allocated:
                counted = (group.weights.main.local_buffer, *group.fsdp_params.counted)
                found[group] = sum(tensor._version for tensor in counted)
        return found


_TRACKERS: weakref.WeakKeyDictionary[nn.Module, WeightTracker] = weakref.WeakKeyDictionary()
_hook: list[Any] = []


def tracker_of(model: nn.Module) -> WeightTracker:
    """Return the tracker of a model, which counts steps from the first call on."""
    key = unwrapped(model)
    known = _TRACKERS.get(key)
    if known is None:
        known = _TRACKERS[key] = WeightTracker(model)
        if not _hook:
            _hook.append(register_optimizer_step_post_hook(_count_step))
    return known


@contextmanager
def groups_replaced() -> Iterator[None]:
    """Let the block give models other parameter groups of the same weights: no version changes by that."""
    for tracker in list(_TRACKERS.values()):
        tracker.current()
    yield
    for tracker in list(_TRACKERS.values()):
        tracker.accept_groups()


@_disable_dynamo
def _count_step(optimizer: Optimizer, *_: object) -> None:
    for tracker in list(_TRACKERS.values()):
        if tracker.has_any(optimizer):
            tracker.num_steps += 1


# ---------------------------------------------------------------- no steps while a stream is open

_CLOSED_TO_STEPS: weakref.WeakKeyDictionary[object, WeightTracker] = weakref.WeakKeyDictionary()


def refuse_steps(holder: object, tracker: WeightTracker | None) -> None:
    """Refuse steps of a tracker's model while ``holder`` lives; None allows them again."""
    if tracker is None:
        _CLOSED_TO_STEPS.pop(holder, None)
    else:
        _CLOSED_TO_STEPS[holder] = tracker
    if _CLOSED_TO_STEPS and _refuse_step not in STEP_CHECKS:
        STEP_CHECKS.append(_refuse_step)
    elif not _CLOSED_TO_STEPS and _refuse_step in STEP_CHECKS:
        STEP_CHECKS.remove(_refuse_step)


def is_being_sent(model: nn.Module) -> bool:
    """Return whether a weight stream of a model is open."""
    tracker = _TRACKERS.get(unwrapped(model))
    return any(each is tracker for each in _CLOSED_TO_STEPS.values()) if tracker is not None else False


def _refuse_step(optimizer: Optimizer) -> None:
    for tracker in list(_CLOSED_TO_STEPS.values()):
        if tracker.has_any(optimizer):
            raise StateError(
                f"{type(optimizer).__name__}.step() while a weight_stream of the same model is open: the receiver "
                "would get weights of two steps. Nothing was stepped. fix: iterate the stream to its end "
                "before the step, or call stream.close()"
            )
