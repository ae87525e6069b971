"""Gradients of sharded parameters that somebody asks for by name, ``torch.autograd.grad`` and ``backward(inputs=...)``.

Forward uses gathered weights in their place: their gradients are asked for instead, and reduced as those of a backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dbuffer.collectives import all_reduce
from dbuffer.ragged_backward import set_leaf_source
from megatron_fsdp.parameter_group import ParameterGroup, group_of_parameter

__all__ = ["serve_asked_gradients"]


def serve_asked_gradients() -> None:
    """Let ``torch.autograd.grad`` and ``backward(inputs=...)`` for sharded parameters give what they ask for."""
    set_leaf_source(_GatheredLeaves())


class _GatheredLeaves:
    """The gathered weights as the leaves that stand for sharded parameters in graphs."""

    def leaf_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gathered weights of a parameter; None where no unit owns it."""
        group = group_of_parameter(parameter)
        return None if group is None else group.faces.gathered[_position(group, parameter)]

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
    return next(index for index, face in enumerate(group.faces.sharded) if face is parameter)


def _reduced(group: ParameterGroup, found: dict[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
    device = group.spec.compute_device
    used = torch.tensor([gradient is not None for gradient in found.values()], dtype=torch.int32, device=device)
    for axis in group.main_weight.axes:
        all_reduce(used, axis, "max")
    if group.gradients is None or not used.any():
        return {}
    final = group.gradients.twin().collect(found)
    return {
        index: group.faces.wrap(index, final.get_dtensor(index))
        for index, is_used in zip(found, used.tolist(), strict=True)
        if is_used
    }
