"""Gradients of sharded parameters that somebody asks for by name, ``torch.autograd.grad`` and ``backward(inputs=...)``.

Forward uses gathered weights in their place: their gradients are asked for instead, and reduced as those of a backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dbuffer import DBuffer
from dbuffer.collectives import all_reduce
from dbuffer.dtensor.autograd import set_leaf_source
from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.grads.packed_gradients import PackedGradients
from megatron_fsdp.runtime.step.gradients import GradientBuffer
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup, group_of_parameter

__all__ = ["refuse_gathered", "serve_asked_gradients"]


def serve_asked_gradients() -> None:
    """Let ``torch.autograd.grad`` and ``backward(inputs=...)`` for sharded parameters give what they ask for."""
    set_leaf_source(_GatheredLeaves())


# Gathered weights, by identity, that a backward under way asks for in the place of sharded ones.
_served: set[int] = set()


def refuse_gathered(groups: Iterable[ParameterGroup]) -> None:
    """Refuse, at the end of a backward, that it was asked for gradients of gathered weights by name.

    Raises:
        StateError: it was: these are this rank's alone.
    """
    for group in groups:
        if math.prod(axis.size for axis in group.main_weight.axes) == 1:
            continue
        for name, param, leaf in zip(
            group.parameters, group.fsdp_params.sharded_params, group.fsdp_params.unsharded_params, strict=True
        ):
            if param.requires_grad and id(leaf) not in _served and _is_captured(leaf):
                raise StateError(
                    f"unit {group.name!r}: torch.autograd.grad was asked for the gradient of parameter {name!r} by its "
                    "gathered weight, which the model shows while it computes: that gradient is this rank's alone. Ask "
                    "for the sharded parameter, taken from model.parameters() before forward, to get the mean over "
                    "ranks; or call backward() and read .grad."
                )


def _is_captured(leaf: torch.Tensor) -> bool:
    if not leaf.requires_grad:
        return False
    # The node is found by a view, which is never read: whoever looks for reads of released storage need not see it.
    with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True  # what it says of leaves whose gradients torch.autograd.grad returns
    return False


class _GatheredLeaves:
    """The gathered weights as the leaves that stand for sharded parameters in graphs."""

    def leaf_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gathered weights of a parameter; None where no unit owns it."""
        group = group_of_parameter(parameter)
        if group is None:
            return None
        leaf: torch.Tensor = group.fsdp_params.unsharded_params[_position(group, parameter)]
        return leaf

    @contextmanager
    def serving(self, leaves: Iterable[torch.Tensor]) -> Iterator[None]:
        """Do not refuse that autograd is asked for the gradients of leaves."""
        asked = {id(leaf) for leaf in leaves} - _served
        _served.update(asked)
        try:
            yield
        finally:
            _served.difference_update(asked)

    def reduce(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of gathered weights as those of the sharded parameters; see ``LeafSource``.

        A group's gradients are packed and reduced together, as at the end of a backward. Every rank calls it.
        """
        asked: dict[int, tuple[ParameterGroup, dict[int, int]]] = {}
        for number, parameter in enumerate(parameters):
            group = group_of_parameter(parameter)
            assert group is not None
            asked.setdefault(id(group), (group, {}))[1][_position(group, parameter)] = number
        results: list[torch.Tensor | None] = [None] * len(parameters)
        for group, numbers in asked.values():
            mine = {index: gradients[number] for index, number in numbers.items()}
            for index, gradient in _reduced(group, mine).items():
                results[numbers[index]] = gradient
        return results


def _position(group: ParameterGroup, parameter: torch.Tensor) -> int:
    return next(index for index, param in enumerate(group.fsdp_params.sharded_params) if param is parameter)


def _reduced(group: ParameterGroup, found: dict[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
    device = group.spec.compute_device
    used = torch.tensor([gradient is not None for gradient in found.values()], dtype=torch.int32, device=device)
    for axis in group.main_weight.axes:
        all_reduce(used, axis, "max")
    if group.gradients is None or not used.any():
        return {}
    final = _AskedGradients(group.gradients).collect(found)
    return {
        index: group.fsdp_params.wrap(index, final.get_dtensor(index))
        for index, is_used in zip(found, used.tolist(), strict=True)
        if is_used
    }


class _AskedGradients(PackedGradients):
    """An empty buffer of the same parameters, strategy and reduction, for gradients that nobody accumulates."""

    def __init__(self, like: GradientBuffer) -> None:
        super().__init__(like._template, replace(like._spec, fuses_weight_gradients=False), like._fsdp_params)
        like.binding.watch()
        self.rename(like.unit)
        self.binding.name += ": gradients asked for"
        self.divide_by(like.divisor)
        self.reduction.hook, self.reduction.function = like.reduction.hook, like.reduction.function

    def _begin_sum(self) -> None:
        """Do nothing: ``.grad`` does not show these."""

    def collect(self, gradients: Mapping[int, torch.Tensor | None]) -> DBuffer:
        """Reduce these gradients of gathered parameters, by index, and return them all."""
        self._begin_once()
        for index, gradient in gradients.items():
            if gradient is not None:
                self._add(index, gradient)
                self._filled[index] = 1
        if self.close(reduce=True):
            self.reduce([self])
        self.wait()
        if self.binding.hold():
            self.main_grad.zero_()
        self.reduction.finish([self.reduction])
        return self.binding.final
