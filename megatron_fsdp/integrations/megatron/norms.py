"""Norms and zeros of a model that is spread over data, tensor, expert and pipeline ranks: each element once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed import ProcessGroup

from dbuffer import DBuffer, Flat
from megatron_fsdp.integrations.megatron.groups import ModelGroups, reduce_over
from megatron_fsdp.integrations.megatron.module import MegatronFSDP
from megatron_fsdp.runtime.parameter_group import ParameterGroup
from megatron_fsdp.runtime.unit import units_below

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
    return _norm(_counted(chunks, groups, final_gradients), groups, chunks)


def weight_norm(chunks: Sequence[MegatronFSDP], groups: ModelGroups) -> torch.Tensor:
    """Return the norm of all main weights, as ``gradient_norm`` does that of gradients."""
    return _norm(_counted(chunks, groups, lambda group: group.main_weight), groups, chunks)


def gradient_zeros(chunks: Sequence[MegatronFSDP], groups: ModelGroups) -> float:
    """Return how many elements of the whole gradient are zero; see ``gradient_norm``."""
    found = list(_counted(chunks, groups, final_gradients))
    zeros = torch.zeros((), dtype=torch.float64, device=_device(chunks))
    for rows in found:
        zeros += (rows.numel() - torch.count_nonzero(rows)).to(zeros.device)
    return float(_summed(zeros, groups.scopes()).item())


def any_nonfinite(chunks: Sequence[MegatronFSDP], groups: ModelGroups) -> bool:
    """Return whether any gradient of any rank is infinite or not a number; all ranks of the model call it together."""
    found = torch.zeros((), dtype=torch.float32, device=_device(chunks))
    for rows in _counted(chunks, groups, final_gradients):
        found += (~rows.isfinite()).any().to(found)
    return bool(_summed(found, groups.scopes()).item() > 0)


def final_gradients(group: ParameterGroup) -> DBuffer | None:
    """Return the gradients that an optimizer would step with."""
    return None if group.gradients is None else group.gradients.binding.settled()


def _counted(chunks: Sequence[MegatronFSDP], groups: ModelGroups, choose: Choice) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        for unit in units_below(chunk):
            unit.settle_replaced_params()
            for group in unit.groups:
                buffer = choose(group)
                if buffer is None or not _is_first_replica(buffer):
                    continue
                for index, param in enumerate(group.fsdp_params.sharded_params):
                    rows = buffer.get_local_tensor(index)
                    if rows.numel() and groups.counts(param):
                        yield rows


def _is_first_replica(buffer: DBuffer) -> bool:
    placed = zip(buffer.axes, buffer.placements, strict=True)
    return all(axis.rank == 0 for axis, placement in placed if placement != Flat())


def _norm(found: Iterator[torch.Tensor], groups: ModelGroups, chunks: Sequence[MegatronFSDP]) -> torch.Tensor:
    device = _device(chunks)
    squares = [torch.linalg.vector_norm(rows, dtype=torch.float32).double().square().to(device) for rows in found]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    return _summed(total, groups.scopes()).sqrt().float()


def _device(chunks: Sequence[MegatronFSDP]) -> torch.device:
    return next(group.spec.device for chunk in chunks for unit in units_below(chunk) for group in unit.groups)


def _summed(total: torch.Tensor, scopes: Sequence[ProcessGroup]) -> torch.Tensor:
    for scope in scopes:
        reduce_over(total, scope, "sum")
    return total
