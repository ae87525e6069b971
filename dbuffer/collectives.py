"""The file that spells PyTorch's collectives; those of several tensors at once are in ``collectives_together``.

Every function works in place where the input is this rank's slice of the output, issues nothing on an axis of one
rank, and either completes in stream order or, given ``works``, appends a handle to wait for. Issue order on a
communicator must be the same on every rank; callers own that (docs/design/order.md)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from dbuffer import gloo
from dbuffer.events import listen, listeners, tell
from dbuffer.gloo import (
    _MOST_EXCHANGED_BYTES,
    REDUCE_OPS,
    _gather_from_other,
    _reduce_by_exchange,
    _reduce_in_place,
    _same_memory,
)
from dbuffer.mesh import MeshAxis
from dbuffer_kernels.switches import is_off

__all__ = [
    "CollectiveCall",
    "Part",
    "Transfer",
    "Waiter",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "observe_collectives",
    "reduce_scatter",
    "start_maximum",
    "wait_for",
    "wait_with",
]

_HAS_SINGLE = hasattr(dist.ProcessGroup, "all_gather_single")
_COPIES = is_off("in-place")

Waiter = Callable[[dist.Work], None]

_waiter: list[Waiter] = []


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective as issued: its kind, the axis it ran over, and the bytes of the full (unsharded) side."""

    kind: str
    axis: str
    num_ranks: int
    num_bytes: int


@contextmanager
def observe_collectives(observer: Callable[[CollectiveCall], None]) -> Iterator[None]:
    """Call ``observer`` for every collective that this process issues through this file while the block runs."""

    def hear(action: str, subject: Any) -> None:
        if action == "collective":
            observer(subject)

    with listen(hear):
        yield


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """What a collective that is being issued does to memory, whichever way this machine has to do it."""

    kind: str
    group: dist.ProcessGroup
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One of several tensors that are gathered, or reduced and scattered, together.

    Attributes:
        axis: along which. whole: 1-D, ``axis.size`` shards in rank order. shard: 1-D; may be this rank's slice of it.
        op: of a reduction, "sum" or "avg".
    """

    axis: MeshAxis
    whole: torch.Tensor
    shard: torch.Tensor
    op: str = ""


def _told(
    kind: str, axis: MeshAxis, full: torch.Tensor, group: dist.ProcessGroup, reads: torch.Tensor, *writes: torch.Tensor
) -> Transfer:
    return _told_of(kind, axis, (full,), Transfer(kind, group, (reads,), writes))


def _told_of(kind: str, axis: MeshAxis, wholes: Iterable[torch.Tensor], transfer: Transfer) -> Transfer:
    """Tell what is about to be issued; the caller tells when it was."""
    tell("collective", CollectiveCall(kind, axis.name, axis.size, sum(whole.nbytes for whole in wholes)))
    tell("transfer", transfer)
    return transfer


def wait_for(work: dist.Work, written: torch.Tensor | None = None) -> None:
    """Wait for a collective, by the innermost ``wait_with`` where there is one.

    Args:
        written: what it writes. None: memory of the CPU. On another device to wait orders streams, and no waiter is
            asked: to look at the time would block the host, and NCCL aborts a communicator when a time is over.
    """
    if _waiter and (written is None or written.is_cpu):
        _waiter[-1](work)
    else:
        work.wait()


@contextmanager
def wait_with(waiter: Waiter) -> Iterator[None]:
    """Let ``waiter`` do the waiting for all collectives on tensors in CPU memory while the block runs."""
    _waiter.append(waiter)
    try:
        yield
    finally:
        _waiter[:] = [other for other in _waiter if other is not waiter]


def _start(
    collective: Callable[..., Any], *tensors: torch.Tensor, group: dist.ProcessGroup, waits: bool, **options: Any
) -> dist.Work | None:
    """Issue a collective; on gloo by the comm thread, and always asynchronously.

    Args:
        waits: whether the caller wants it complete; then where nothing else is asked for the call itself waits.
    """
    on_cpu = tensors[0].is_cpu
    if on_cpu and _is_gloo(group):
        return gloo._start(collective, *tensors, group=group, **options)
    is_asynchronous = not waits or (bool(_waiter) and on_cpu)
    work: dist.Work | None = collective(*tensors, group=group, async_op=is_asynchronous, **options)
    return work


def _finish(work: dist.Work | None, works: list[dist.Work] | None, written: torch.Tensor) -> None:
    if work is None:
        return
    if works is None:
        wait_for(work, written)
    else:
        works.append(work)


# By identity, which a look-up for every collective does not have to make a weak reference for.
_GLOO: dict[int, bool] = {}


def _is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether gloo serves a group's tensors in CPU memory."""
    key = id(group)
    if key not in _GLOO:
        names = dist.get_backend_config(group).split(",")
        _GLOO[key] = any(name in ("gloo", "cpu:gloo") for name in names)
        weakref.finalize(group, _GLOO.pop, key, None)
    return _GLOO[key]


def _is_traced(tensor: torch.Tensor) -> bool:
    """Whether a compiler looks on, which has to see a function instead of something that happens to memory."""
    return type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter)


def _traced(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return result


def _issue_gather(output: torch.Tensor, source: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool) -> Any:
    """Do what ``dist.all_gather_single`` does with plain tensors of members of a group."""
    options = AllgatherOptions()
    options.asyncOp = async_op
    if output.dtype.is_complex:
        output, source = torch.view_as_real(output), torch.view_as_real(source)
    any_group: Any = group
    if _HAS_SINGLE:
        return any_group.all_gather_single(output, source, options)
    return any_group._allgather_base(output, source, options)


def _issue_reduction(
    output: torch.Tensor, source: torch.Tensor, *, op: Any, group: dist.ProcessGroup, async_op: bool
) -> Any:
    """Do what ``dist.reduce_scatter_single`` does with plain tensors of members of a group."""
    options = ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = async_op
    any_group: Any = group
    if _HAS_SINGLE:
        return any_group.reduce_scatter_single(output, source, options)
    return any_group._reduce_scatter_base(output, source, options)


def all_gather(output: torch.Tensor, shard: torch.Tensor, axis: MeshAxis, works: list[dist.Work] | None = None) -> None:
    """Fill ``output`` (1-D, ``axis.size * shard.numel()`` elements) with every rank's shard, in rank order.

    Args:
        shard: 1-D, this rank's part; may be its slice of ``output``.
        works: when given, the call returns at once and its handle is appended; both tensors must live until then.
    """
    if axis.size == 1:
        if not _same_memory(output, shard):
            output.copy_(shard)
        return
    if _is_traced(shard):
        whole = torch.ops._c10d_functional.all_gather_into_tensor(shard, axis.size, axis.gather_group.group_name)
        output.copy_(_traced(whole))
        return
    told = _told("all_gather", axis, output, axis.gather_group, shard, output) if listeners else None
    if axis.size == 2 and output.is_cpu and output.nbytes and _is_gloo(axis.gather_group):
        _finish(_gather_from_other(output, shard, axis), works, output)
    else:
        source = shard.clone() if _COPIES else shard
        _finish(_start(_issue_gather, output, source, group=axis.gather_group, waits=works is None), works, output)
    if told is not None:
        tell("transferred", told)


def reduce_scatter(
    output: torch.Tensor, full: torch.Tensor, axis: MeshAxis, op: str, works: list[dist.Work] | None = None
) -> None:
    """Reduce ``full`` over the ranks of the axis and keep this rank's slice in ``output``.

    Args:
        output: 1-D, ``full.numel() / axis.size`` elements; may be this rank's slice of ``full``. Of a wider dtype the
            sum is made in that, by each rank for itself: no rounding, and no order, of the backend's.
        full: 1-D; its content outside ``output`` is undefined afterwards.
        op: "sum" or "avg".
    """
    if axis.size == 1:
        if not _same_memory(output, full):
            output.copy_(full)
        return
    group = axis.reduce_group
    # The content of all of ``full`` is undefined afterwards.
    told = _told("reduce_scatter", axis, full, group, full, full, output) if listeners else None
    if output.dtype is not full.dtype:
        _finish(_reduce_by_exchange(full, output, axis, op), works, output)
    elif full.is_cpu and _is_gloo(group):
        is_small = 0 < full.nbytes <= _MOST_EXCHANGED_BYTES
        _finish((_reduce_by_exchange if is_small else _reduce_in_place)(full, output, axis, op), works, output)
    else:
        reduce_op, waits = REDUCE_OPS[op], works is None
        source = full.clone() if _COPIES else full
        _finish(_start(_issue_reduction, output, source, op=reduce_op, group=group, waits=waits), works, output)
    if told is not None:
        tell("transferred", told)


def all_reduce(tensor: torch.Tensor, axis: MeshAxis, op: str, works: list[dist.Work] | None = None) -> None:
    """Reduce ``tensor`` over the ranks of the axis, in place on all of them. ``op`` is "sum", "avg" or "max"."""
    if axis.size == 1:
        return
    if _is_traced(tensor):
        tensor.copy_(_traced(torch.ops._c10d_functional.all_reduce(tensor, op, axis.reduce_group.group_name)))
        return
    told = _told("all_reduce", axis, tensor, axis.reduce_group, tensor, tensor) if listeners else None
    reduce_op = REDUCE_OPS[op]
    work = _start(dist.all_reduce, tensor, op=reduce_op, group=axis.reduce_group, waits=works is None)
    _finish(work, works, tensor)
    if told is not None:
        tell("transferred", told)


def all_to_all(
    output: torch.Tensor,
    source: torch.Tensor,
    axis: MeshAxis,
    sizes: tuple[Sequence[int], Sequence[int]],
    works: list[dist.Work] | None = None,
) -> None:
    """Send a part of ``source`` to every rank of the axis and receive one from each, of any sizes, zero included.

    Args:
        output, source: 1-D, of one dtype; parts for and from the ranks follow each other in rank order.
        sizes: elements received from each rank, and elements sent to each; every rank knows its own.
        works: when given, the call returns at once and its handle is appended; both tensors must live until then.
    """
    received, sent = ([size * output.element_size() for size in each] for each in sizes)
    if axis.size == 1:
        output.copy_(source)
        return
    told = _told("all_to_all", axis, output, axis.reduce_group, source, output) if listeners else None
    parts = output.view(torch.uint8), source.view(torch.uint8)
    splits = {"output_split_sizes": received, "input_split_sizes": sent}
    work = _start(dist.all_to_all_single, *parts, group=axis.reduce_group, waits=works is None, **splits)
    _finish(work, works, output)
    if told is not None:
        tell("transferred", told)


def start_maximum(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the element-wise maximum over the ranks of a group, in place, and return its handle."""
    work = _start(dist.all_reduce, tensor, op=dist.ReduceOp.MAX, group=group, waits=False)
    assert work is not None
    return work


def barrier() -> None:
    """Wait until every rank of the world is here; no-op without a process group."""
    if dist.is_initialized():
        # Of NCCL a barrier is an all-reduce on some device, and it warns where it has to guess which.
        ids = [torch.cuda.current_device()] if "nccl" in dist.get_backend_config() else None
        dist.barrier(device_ids=ids)


def broadcast(tensor: torch.Tensor, axis: MeshAxis, source: int = 0) -> None:
    """Copy ``tensor`` from the rank at position ``source`` of the axis to all others, in place."""
    if axis.size == 1:
        return
    told = _told("broadcast", axis, tensor, axis.gather_group, tensor, tensor) if listeners else None
    _finish(_start(dist.broadcast, tensor, group=axis.gather_group, group_src=source, waits=True), None, tensor)
    if told is not None:
        tell("transferred", told)
