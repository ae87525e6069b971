"""The collectives of a training step, one tensor at a time.

``collectives_together`` combines several tensors in one collective. ``collectives_rare`` has those outside a step.

Every function works in place where the input is this rank's slice of the output. On an axis of one rank it issues
nothing. It either completes in stream order or, when ``works`` is given, appends a handle to wait for. The caller must
issue collectives on a communicator in the same order on every rank (docs/design/order.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from dbuffer import gloo
from dbuffer.events import CollectiveCall, Transfer, listeners, tell
from dbuffer.mesh import MeshAxis
from dbuffer.whereabouts import SOON, wait_longer
from dbuffer_kernels.switches import is_off

# torch 2.13 renames two methods of process groups and warns on the old names; torch 2.11 has only the old names.
_HAS_SINGLE = hasattr(dist.ProcessGroup, "all_gather_single")
_COPIES = is_off("in-place")

waiters: list[Callable[[dist.Work], None]] = []
"""Functions that wait for collectives on CPU tensors (``wait_with``). The last one is used; empty: wait normally."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One tensor of a combined all-gather or reduce-scatter.

    Attributes:
        axis: the mesh axis of the collective. whole: 1-D, ``axis.size`` shards in rank order. shard: 1-D, this rank's
            shard; it may be this rank's slice of ``whole``.
        op: "sum" or "avg" for a reduction; empty for an all-gather.
    """

    axis: MeshAxis
    whole: torch.Tensor
    shard: torch.Tensor
    op: str = ""


def wait_for(work: dist.Work, written: torch.Tensor | None = None) -> None:
    """Wait for a collective, with the innermost ``collectives_rare.wait_with`` function if one is set.

    Args:
        written: the tensor that the collective writes; None: CPU memory. On a GPU, waiting only orders streams. No
            wait function is called then: it would need timed waits, which block the host, and NCCL aborts the
            communicator when a timed wait expires.
    """
    if written is not None and not written.is_cpu:
        work.wait()
    elif waiters:
        waiters[-1](work)
    elif type(work) is not dist.Work:
        # A user's own handle may not accept a timeout.
        work.wait()
    else:
        try:
            work.wait(SOON)
        except RuntimeError as error:
            wait_longer(work, error)


def all_gather(output: torch.Tensor, shard: torch.Tensor, axis: MeshAxis, works: list[dist.Work] | None = None) -> None:
    """Fill ``output`` (1-D, ``axis.size * shard.numel()`` elements) with every rank's shard, in rank order.

    Args:
        shard: 1-D, this rank's part; may be its slice of ``output``.
        works: when given, the call returns at once and appends its handle; both tensors must live until it completes.
    """
    if axis.size == 1:
        gloo.copy(output, shard)
        return
    if type(shard) is not torch.Tensor and is_traced(shard):
        whole = torch.ops._c10d_functional.all_gather_into_tensor(shard, axis.size, axis.gather_group.group_name)
        output.copy_(torch.ops._c10d_functional.wait_tensor(whole))
        return
    if output.dtype.is_complex:
        output, shard = torch.view_as_real(output).view(-1), torch.view_as_real(shard).view(-1)
    group: Any = axis.gather_group
    told = begin("all_gather", axis, group, (output,), (shard,), (output,)) if listeners else None
    if output.is_cpu and axis.gathers_by_gloo:
        work = gloo.all_gather(output, shard, axis)
    else:
        options = AllgatherOptions()
        options.asyncOp = works is not None or (waiters != [] and output.is_cpu)
        source = shard.clone() if _COPIES else shard
        work = (group.all_gather_single if _HAS_SINGLE else group._allgather_base)(output, source, options)
    finish(work, works, output, told)


def reduce_scatter(
    output: torch.Tensor, full: torch.Tensor, axis: MeshAxis, op: str, works: list[dist.Work] | None = None
) -> None:
    """Reduce ``full`` over the ranks of the axis and keep this rank's slice in ``output``.

    Args:
        output: 1-D, ``full.numel() / axis.size`` elements; may be this rank's slice of ``full``. If its dtype is
            wider than ``full``'s, each rank computes the sum in that dtype itself. The result then does not depend on
            the backend's rounding or summation order.
        full: 1-D; its content outside ``output`` is undefined afterwards.
        op: "sum" or "avg".
    """
    if axis.size == 1:
        gloo.copy(output, full)
        return
    group: Any = axis.reduce_group
    told = begin("reduce_scatter", axis, group, (full,), (full,), (full, output)) if listeners else None
    if output.dtype is not full.dtype or (full.is_cpu and axis.reduces_by_gloo):
        work = gloo.reduce_scatter(output, full, axis, op)
    else:
        options: Any = ReduceScatterOptions()
        options.reduceOp = gloo.REDUCE_OPS[op]
        options.asyncOp = works is not None or (waiters != [] and output.is_cpu)
        source = full.clone() if _COPIES else full
        work = (group.reduce_scatter_single if _HAS_SINGLE else group._reduce_scatter_base)(output, source, options)
    finish(work, works, output, told)


def all_reduce(tensor: torch.Tensor, axis: MeshAxis, op: str, works: list[dist.Work] | None = None) -> None:
    """Reduce ``tensor`` over the ranks of the axis, in place on all of them. ``op`` is "sum", "avg" or "max"."""
    if axis.size == 1:
        return
    if type(tensor) is not torch.Tensor and is_traced(tensor):
        reduced = torch.ops._c10d_functional.all_reduce(tensor, op, axis.reduce_group.group_name)
        tensor.copy_(torch.ops._c10d_functional.wait_tensor(reduced))
        return
    group = axis.reduce_group
    told = begin("all_reduce", axis, group, (tensor,), (tensor,), (tensor,)) if listeners else None
    if tensor.is_cpu and axis.reduces_by_gloo:
        work = gloo.start(dist.all_reduce, tensor, op=gloo.REDUCE_OPS[op], group=group)
    else:
        is_async = works is not None or (waiters != [] and tensor.is_cpu)
        work = dist.all_reduce(tensor, op=gloo.REDUCE_OPS[op], group=group, async_op=is_async)
    finish(work, works, tensor, told)


def is_traced(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` belongs to a compiler trace, which needs functional collectives instead of in-place."""
    return type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter)


def begin(
    kind: str,
    axis: MeshAxis,
    group: dist.ProcessGroup,
    wholes: Sequence[torch.Tensor],
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
) -> Transfer:
    """Tell listeners which collective is about to be issued; ``finish`` tells them that it was issued."""
    transfer = Transfer(kind, group, tuple(reads), tuple(writes))
    tell("collective", CollectiveCall(kind, axis.name, axis.size, sum(whole.nbytes for whole in wholes)))
    tell("transfer", transfer)
    return transfer


def finish(
    work: dist.Work | None, works: list[dist.Work] | None, written: torch.Tensor, told: Transfer | None = None
) -> None:
    """Wait for an issued collective, or append its handle to ``works``. ``work`` is None if it already completed."""
    if work is not None and works is not None:
        works.append(work)
    elif work is not None:
        wait_for(work, written)
    if told is not None:
        tell("transferred", told)
