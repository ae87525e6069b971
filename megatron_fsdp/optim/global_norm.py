"""The norm of the gradients that an optimizer over flat memory steps with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dbuffer.collectives import all_reduce
from dbuffer.mesh import MeshAxis
from dbuffer_kernels import sum_of_squares
from megatron_fsdp.optim.adamw_state import GroupGradients
from megatron_fsdp.optim.adamw_update import PlainParameter, _sum_on
from megatron_fsdp.optim.exact_norm import exact_norm

__all__ = ["global_norm"]


def global_norm(gradients: Iterable[tuple[GroupGradients | PlainParameter, torch.Tensor]]) -> torch.Tensor:
    """Return the norm of all gradients of a step over all ranks: 0-d fp32, on the device of the first.

    Every rank calls it with gradients of the same groups. One pass over each gradient, and one all-reduce of a scalar
    for each set of axes over which gradients are spread; those of plain parameters count as they are on this rank.
    With ``MixedPrecisionPolicy(reduction="invariant")`` it is the exact norm.

    Args:
        gradients: 1-D, with what each belongs to.
    """
    gradients = list(gradients)
    if any(isinstance(owner, GroupGradients) and owner.is_invariant for owner, _ in gradients):
        return _exact(gradients)
    spread: dict[tuple[int, ...], tuple[tuple[MeshAxis, ...], torch.device, list[torch.Tensor]]] = {}
    for owner, gradient in gradients:
        total = sum_of_squares(gradient)[0]
        axes: tuple[MeshAxis, ...] = ()
        device = total.device
        if isinstance(owner, GroupGradients):
            axes, device = owner.axes, owner.device
        spread.setdefault(tuple(id(axis.gather_group) for axis in axes), (axes, device, []))[2].append(total)
    totals: list[torch.Tensor] = []
    for axes, device, squares in spread.values():
        total = _sum_on(device, squares)
        for axis in axes:
            all_reduce(total, axis, "sum")
        totals.append(total)
    if not totals:
        return torch.zeros(())
    return _sum_on(totals[0].device, totals).sqrt().float()


def _exact(gradients: Sequence[tuple[GroupGradients | PlainParameter, torch.Tensor]]) -> torch.Tensor:
    spread: dict[tuple[int, ...], tuple[list[MeshAxis], list[torch.Tensor]]] = {}
    for owner, gradient in gradients:
        axes = list(owner.axes) if isinstance(owner, GroupGradients) else []
        spread.setdefault(tuple(id(axis.gather_group) for axis in axes), (axes, []))[1].append(gradient)
    device = next(owner.device for owner, _ in gradients if isinstance(owner, GroupGradients))
    return exact_norm(list(spread.values()), 2.0, device)
