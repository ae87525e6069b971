"""Broadcast: one rank's tensor replaces that of the others."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dbuffer.collectives.gloo_messages import start
from dbuffer.collectives.waits import begin, finish, waiters
from dbuffer.events import listeners
from dbuffer.mesh import MeshAxis


def broadcast(tensor: torch.Tensor, axis: MeshAxis, source: int = 0) -> None:
    """Copy ``tensor`` from the rank at position ``source`` of the axis to all others, in place."""
    if axis.size == 1:
        return
    group = axis.gather_group
    told = begin("broadcast", axis, group, (tensor,), (tensor,), (tensor,)) if listeners else None
    if tensor.is_cpu and axis.gathers_by_gloo:
        work: dist.Work | None = start(dist.broadcast, tensor, group=group, group_src=source)
    else:
        is_async = waiters != [] and tensor.is_cpu
        work = dist.broadcast(tensor, group=group, async_op=is_async, group_src=source)
    finish(work, None, tensor, told)
