"""Weights that data-parallel ranks drew differently are made the first rank's before they are sharded."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer.collectives import all_reduce
from dbuffer.collectives_rare import broadcast
from dbuffer.mesh import mesh_axes
from megatron_fsdp.integrations.megatron.groups import is_expert
from megatron_fsdp.policy.mesh import buffer_device

__all__ = ["make_alike"]


@torch.no_grad()
def make_alike(model: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh | None = None) -> list[str]:
    """Give every rank of a mesh the first rank's parameters, in place, where they differ; return the names of these.

    Experts have a mesh of their own (None: the same): other ranks hold other experts.

    A rank's shard comes from its own copy of the model, so unequal copies would be mixed. Megatron's DDP broadcasts the
    first rank's under ``--data-parallel-random-init``, and else trains unequal copies, which sharding has no place for.
    Where all are alike it takes one sum per parameter and one reduction.
    Parameters on the meta device get their values later, alike on all ranks.
    """
    found = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.is_meta]
    if expert_mesh is None:
        return _make_alike(found, mesh)
    experts = [pair for pair in found if is_expert(pair[1])]
    return _make_alike([pair for pair in found if not is_expert(pair[1])], mesh) + _make_alike(experts, expert_mesh)


def _make_alike(found: Sequence[tuple[str, nn.Parameter]], mesh: DeviceMesh) -> list[str]:
    if not found:
        return []
    device, axes = buffer_device(mesh), mesh_axes(mesh)
    # Bits, not numbers: NaN compares with itself. The complement of x is largest where x is smallest.
    sums = [parameter.detach().sum(dtype=torch.float64).to(device) for _, parameter in found]
    bits = torch.stack(sums).view(torch.int64)
    extremes = torch.stack([bits, ~bits])
    for axis in axes:
        all_reduce(extremes, axis, "max")
    is_alike = (extremes[0] == ~extremes[1]).tolist()
    differing = [pair for pair, alike in zip(found, is_alike, strict=True) if not alike]
    for _, parameter in differing:
        staged = parameter.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        for axis in axes:
            broadcast(staged, axis)
        parameter.copy_(staged)
    if differing and dist.get_rank() == 0:
        logging.getLogger(__name__).warning(
            "%d parameters differed between data-parallel ranks, %r the first of them: the first rank's count, for a "
            "sharded model has one copy of each. Megatron's DDP does so under --data-parallel-random-init alone, and "
            "else trains copies that differ (drawing other experts on each rank can leave dense weights unequal): give "
            "it that flag to compare with it",
            len(differing),
            differing[0][0],
        )
    return [name for name, _ in differing]
