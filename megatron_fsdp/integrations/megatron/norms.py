"""Numbers over all gradients or main weights of a model, each element once: what Megatron logs and clips by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from dbuffer import DBuffer, Flat
from megatron_fsdp.integrations.megatron.groups import ModelGroups, reduce_over
from megatron_fsdp.integrations.megatron.module import MegatronFSDP
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.step.unit import units_below

__all__ = ["any_nonfinite", "gradient_norm", "gradient_zeros", "weight_norm"]

Choice = Callable[[ParameterGroup], DBuffer | None]


def gradient_norm(chunks: Sequence[MegatronFSDP], groups: ModelGroups) -> torch.Tensor:
    """Return the norm of the whole gradient: 0-d FP32, equal on all ranks, which call it together.

    Every element is counted on one rank, the first of those that hold it, so one sum over all of them serves dense
    weights and experts alike, whatever their groups.

    Args:
        chunks: this rank's parts of the model.
    Raises:
        StateError: gradients are not final.
    """
    return _sum(chunks, groups, _final_gradients, _square).sqrt().float()


def weight_norm(chunks: Sequence[MegatronFSDP], groups: ModelGroups) -> torch.Tensor:
    """Return the norm of all main weights, as ``gradient_norm`` does that of gradients."""
    return _sum(chunks, groups, lambda group: group.main_weight, _square).sqrt().float()


def gradient_zeros(chunks: Sequence[MegatronFSDP], groups: ModelGroups) -> float:
    """Return how many elements of the whole gradient are zero; see ``gradient_norm``."""
    return float(_sum(chunks, groups, _final_gradients, lambda rows: rows.numel() - torch.count_nonzero(rows)))


def any_nonfinite(chunks: Sequence[MegatronFSDP], groups: ModelGroups) -> bool:
    """Return whether any gradient of any rank is infinite or not a number; all ranks of the model call it together."""
    return float(_sum(chunks, groups, _final_gradients, lambda rows: (~rows.isfinite()).any())) > 0


def _final_gradients(group: ParameterGroup) -> DBuffer | None:
    return None if group.gradients is None else group.gradients.binding.settled()


def _square(rows: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dtype=torch.float32)
    return norm.double().square()


def _sum(
    chunks: Sequence[MegatronFSDP],
    groups: ModelGroups,
    choose: Choice,
    measure: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the sum of a measure of all rows, each counted once, over all ranks: 0-d FP64."""
    device = next(group.spec.device for chunk in chunks for unit in units_below(chunk) for group in unit.groups)
    found = [measure(rows).to(device, torch.float64) for rows in _counted(chunks, groups, choose)]
    total = torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64, device=device)
    for scope in groups.scopes():
        reduce_over(total, scope, "sum")
    return total


def _counted(chunks: Sequence[MegatronFSDP], groups: ModelGroups, choose: Choice) -> Iterator[torch.Tensor]:
    for unit in (unit for chunk in chunks for unit in units_below(chunk)):
        unit.schedule.settle_replaced_params(unit)
        for group in unit.groups:
            buffer = choose(group)
            # Of replicas, the first counts.
            if buffer is None or any(
                axis.rank for axis, placed in zip(buffer.axes, buffer.placements, strict=True) if placed != Flat()
            ):
                continue
            for index, param in enumerate(group.fsdp_params.sharded_params):
                rows = buffer.get_local_tensor(index)
                if rows.numel() and groups.counts(param):
                    yield rows
