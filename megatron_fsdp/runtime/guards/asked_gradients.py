"""Gradients of sharded parameters that somebody asks for by name, ``torch.autograd.grad`` and ``backward(inputs=...)``.

Forward uses gathered weights in their place: their gradients are asked for instead, and reduced as those of a backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from dbuffer import DBuffer
from dbuffer.collectives import all_reduce
from dbuffer.dtensor.autograd import set_leaf_source
from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.guards.calls_to_come import is_run
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
            if param.requires_grad and id(leaf) not in _served and leaf.requires_grad and is_run(leaf) is None:
                raise StateError(
                    f"unit {group.name!r}: torch.autograd.grad was asked for the gradient of parameter {name!r} by its "
                    "gathered weight, which the model shows while it computes: that gradient is this rank's alone. Ask "
                    "for the sharded parameter, taken from model.parameters() before forward, to get the mean over "
                    "ranks; or call backward() and read .grad."
                )


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

        Every rank calls it.
        """
        buffers: dict[ParameterGroup, DBuffer] = {}
        results: list[torch.Tensor | None] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            group = group_of_parameter(parameter)
            assert group is not None
            index = _position(group, parameter)
            total = _sum(group, index, gradient)
            if total is None:
                results.append(None)
                continue
            if group not in buffers:
                buffers[group] = _empty_like_gradients(group)
            buffers[group].write_tensor(index, total.div_(group.spec.divisor))
            results.append(group.fsdp_params.wrap(index, buffers[group].get_dtensor(index)))
        return results


def _position(group: ParameterGroup, parameter: torch.Tensor) -> int:
    return next(index for index, param in enumerate(group.fsdp_params.sharded_params) if param is parameter)


def _empty_like_gradients(group: ParameterGroup) -> DBuffer:
    spec = group.spec
    if group.reduce_hook is not None or spec.dtypes.reduction is not None:
        raise StateError(
            f"unit {group.name!r}: torch.autograd.grad or backward(inputs=...) for sharded parameters, with "
            "set_all_reduce_hook or reduction='invariant', which only a whole backward does: call backward() and read "
            ".grad"
        )
    device = spec.resting_device
    return DBuffer.from_plan(group.plan, spec.mesh, spec.placements.optimizer, spec.dtypes.main_grad, device)


def _sum(group: ParameterGroup, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient added up over ranks, None where no rank has one."""
    shape, spec = group.plan.shapes[index], group.spec
    dtype = torch.promote_types(spec.dtypes.reduce, torch.float32)
    # The last element counts the ranks that have one.
    total = torch.zeros(math.prod(shape) + 1, dtype=dtype, device=spec.compute_device)
    if gradient is not None:
        split = group.owned[index].split
        mine = gradient if split is None else split.local_gradient(gradient)
        total[:-1].copy_((mine if mine.layout is torch.strided else mine.to_dense()).reshape(-1))
        total[-1] = 1
    for axis in group.main_weight.axes:
        all_reduce(total, axis, "sum")
    return total[:-1].view(shape) if total[-1] else None
