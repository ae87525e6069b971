"""Collectives of gloo with fewer copies and bytes than its own."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dbuffer.comm_thread import issue
from dbuffer.mesh import MeshAxis

__all__: list[str] = []

REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}

_NO_TIMEOUT = datetime.timedelta(0)


def _start(
    collective: Callable[..., Any], *tensors: torch.Tensor, group: dist.ProcessGroup, **options: Any
) -> dist.Work:
    """Issue a collective by the comm thread, asynchronously."""
    work: dist.Work = issue(functools.partial(collective, *tensors, group=group, async_op=True, **options))
    return work


class _WorkThen(dist.Work):
    """A collective and what the waiting thread does when it is over; it can be polled as the collective can.

    Args:
        then: done once; again where it was interrupted. scratch: given back after it.
    """

    def __init__(self, work: dist.Work, then: Callable[[], None], *scratch: torch.Tensor) -> None:
        super().__init__()
        self._work = work
        self._then: Callable[[], None] | None = then
        self._scratch = scratch

    def is_completed(self) -> bool:
        """Whether the ranks are done with the collective."""
        return self._work.is_completed()

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the output holds the result.

        Raises:
            RuntimeError: it failed, or takes longer.
        """
        self._work.wait(timeout)
        if self._then is not None:
            self._then()
            self._then = None
            scratch, self._scratch = self._scratch, ()
            for each in scratch:
                _give_scratch_back(each)
        return True


def _reduce_in_place(full: torch.Tensor, output: torch.Tensor, axis: MeshAxis, op: str) -> dist.Work:
    """Reduce-scatter by all-reduce, which is what gloo does, but in place and with a handle that can be polled.

    Gloo's own copies the whole input first, and its handle ignores timeouts.
    """
    work = _start(dist.all_reduce, full, op=REDUCE_OPS[op], group=axis.reduce_group)

    def keep_mine() -> None:
        mine = full[axis.rank * output.numel() :][: output.numel()]
        if not _same_memory(output, mine):
            output.copy_(mine)

    return _WorkThen(work, keep_mine)


def _reduce_by_exchange(full: torch.Tensor, output: torch.Tensor, axis: MeshAxis, op: str) -> dist.Work:
    """Reduce-scatter by all-to-all: each rank sends every other one its slice, and adds up what it received.

    Half of the bytes of an all-reduce, for a buffer as large as what is received.
    """
    slices = full.view(axis.size, -1)
    # With one other rank nothing has to go by way of this rank's own slice.
    is_pair = axis.size == 2
    sent = slices[1 - axis.rank] if is_pair else full
    scratch = _take_scratch(sent.nbytes, full.device)
    received = scratch[: sent.nbytes]
    work = _exchange(received, sent, axis, axis.reduce_group)

    def add_up() -> None:
        _add_up(output, slices[axis.rank], received.view(full.dtype).view(-1, output.numel()), axis, op)

    return _WorkThen(work, add_up, scratch)


def _all_reduce_by_message(tensors: Sequence[torch.Tensor], axis: MeshAxis, op: str) -> dist.Work:
    """All-reduce several tensors of one dtype as one."""
    sizes = [tensor.numel() for tensor in tensors]
    scratch = _take_scratch(sum(sizes) * tensors[0].itemsize, tensors[0].device)
    whole = scratch[: sum(sizes) * tensors[0].itemsize].view(tensors[0].dtype)
    torch.cat([tensor.view(-1) for tensor in tensors], out=whole)
    work = _start(dist.all_reduce, whole, op=REDUCE_OPS[op], group=axis.reduce_group)

    def take_apart() -> None:
        for tensor, part in zip(tensors, whole.split(sizes), strict=True):
            tensor.view(-1).copy_(part)

    return _WorkThen(work, take_apart, scratch)


def _add_up(output: torch.Tensor, mine: torch.Tensor, others: torch.Tensor, axis: MeshAxis, op: str) -> None:
    """Write the sum of this rank's slice and the other ranks' into ``output``.

    Args:
        others: (1, elements) of the one other rank, or (ranks, elements) of all, of which this rank's is left out.
        op: "sum", or "avg", which divides. An ``output`` of a wider dtype is the sum in that dtype, in rank order.
    """
    terms = list(others) if len(others) != 1 else [others[0], others[0]]
    terms[axis.rank] = mine
    if output.dtype is not mine.dtype and output.is_cuda and len(others) > 1:
        # One launch, however many ranks.
        others[axis.rank].copy_(mine)
        torch.sum(others, 0, dtype=output.dtype, out=output)
    elif output.dtype is not mine.dtype:
        output.copy_(terms[0])
        for term in terms[1:]:
            output.add_(term)
    else:
        if not _same_memory(output, mine):
            output.copy_(mine)
        for rank, term in enumerate(terms):
            if rank != axis.rank:
                output.add_(term)
    if op == "avg":
        output.div_(axis.size)


def _gather_from_other(output: torch.Tensor, shard: torch.Tensor, axis: MeshAxis) -> dist.Work:
    """Gather from the one other rank by an exchange of shards, which spares gloo's copies of the whole output."""
    slices = output.view(2, -1)
    if not _same_memory(slices[axis.rank], shard):
        slices[axis.rank].copy_(shard)
    return _exchange(slices[1 - axis.rank], shard, axis, axis.gather_group)


# A part of a collective that carries several: the whole tensor and this rank's shard of it, both 1-D.
_Part = tuple[torch.Tensor, torch.Tensor]

# Parts begin at multiples of this in a message, so that any dtype can be read there.
_ALIGNMENT = 16


def _places(parts: Sequence[_Part]) -> tuple[list[slice], int]:
    """Return where the bytes of each part's shard lie in a message, and how long that is."""
    places, start = [], 0
    for _, shard in parts:
        places.append(slice(start, start + shard.nbytes))
        start += -(-shard.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, start


def _bytes_of(tensor: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Return (ranks, bytes of a shard)."""
    return tensor.view(torch.uint8).view(num_ranks, -1)


def _messages(num_bytes: int, axis: MeshAxis, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return memory for the messages to others and from others, one in each row, and whose rows these are.

    With one other rank nothing goes by way of this one's own row.
    """
    others = [1 - axis.rank] if axis.size == 2 else list(range(axis.size))
    sent, received = (_take_scratch(len(others) * num_bytes, device) for _ in range(2))
    return sent, received, others


def _rows(scratch: torch.Tensor, num_rows: int, num_bytes: int) -> torch.Tensor:
    return scratch[: num_rows * num_bytes].view(num_rows, num_bytes)


def _gather_by_message(parts: Sequence[_Part], axis: MeshAxis) -> dist.Work:
    """Gather several shards, of any dtypes, by one exchange of messages that hold all of a rank's."""
    places, num_bytes = _places(parts)
    sent, received, others = _messages(num_bytes, axis, parts[0][0].device)
    leaving, arriving = _rows(sent, len(others), num_bytes), _rows(received, len(others), num_bytes)
    for (whole, shard), place in zip(parts, places, strict=True):
        mine = whole.view(axis.size, -1)[axis.rank]
        if not _same_memory(mine, shard):
            mine.copy_(shard)
        leaving[:, place] = shard.view(torch.uint8)
    work = _exchange(arriving.view(-1), leaving.view(-1), axis, axis.gather_group)

    def sort() -> None:
        for (whole, _), place in zip(parts, places, strict=True):
            rows = _bytes_of(whole, axis.size)
            for row, other in zip(arriving, others, strict=True):
                if other != axis.rank:
                    rows[other].copy_(row[place])

    return _WorkThen(work, sort, sent, received)


def _reduce_by_message(parts: Sequence[_Part], axis: MeshAxis, op: str) -> dist.Work:
    """Reduce-scatter several tensors, of any dtypes, by one exchange; added up as ``_reduce_by_exchange`` does."""
    slices = [whole.view(axis.size, -1) for whole, _ in parts]
    places, num_bytes = _places([(whole, rows[axis.rank]) for (whole, _), rows in zip(parts, slices, strict=True)])
    sent, received, others = _messages(num_bytes, axis, parts[0][0].device)
    leaving, arriving = _rows(sent, len(others), num_bytes), _rows(received, len(others), num_bytes)
    for (whole, _), place in zip(parts, places, strict=True):
        rows = _bytes_of(whole, axis.size)
        for row, other in zip(leaving, others, strict=True):
            row[place].copy_(rows[other])
    work = _exchange(arriving.view(-1), leaving.view(-1), axis, axis.reduce_group)

    def add_up() -> None:
        for (whole, output), rows, place in zip(parts, slices, places, strict=True):
            _add_up(output, rows[axis.rank], arriving[:, place].contiguous().view(whole.dtype), axis, op)

    return _WorkThen(work, add_up, sent, received)


def _exchange(arriving: torch.Tensor, leaving: torch.Tensor, axis: MeshAxis, group: dist.ProcessGroup) -> dist.Work:
    """Send equal parts of ``leaving`` to all ranks; all of it to the other one where there are two. As bytes."""
    splits = [leaving.nbytes * (rank != axis.rank) for rank in range(2)] if axis.size == 2 else None
    both = {"output_split_sizes": splits, "input_split_sizes": splits}
    parts = arriving.view(torch.uint8), leaving.view(torch.uint8)
    return _start(dist.all_to_all_single, *parts, group=group, **both)


def _exchange_each(received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], axis: MeshAxis) -> list[dist.Work]:
    """Send one tensor to each other rank and receive one from it, in as many rounds: gloo takes no list of them."""
    works = []
    for step in range(1, axis.size):
        target, source = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
        output, leaving = received[source].view(torch.uint8), sent[target].view(torch.uint8)
        sizes = {
            "output_split_sizes": [output.numel() * (rank == source) for rank in range(axis.size)],
            "input_split_sizes": [leaving.numel() * (rank == target) for rank in range(axis.size)],
        }
        works.append(_start(dist.all_to_all_single, output, leaving, group=axis.reduce_group, **sizes))
    return works


# Ranks decide alike, so by the size alone. Larger buffers are reduced in place.
_MOST_EXCHANGED_BYTES = 1 << 26

# Where exchanges that are over had received, for those to come.
_scratch: list[torch.Tensor] = []

_MOST_SCRATCH_KEPT = 2


def _take_scratch(num_bytes: int, device: torch.device) -> torch.Tensor:
    for position, known in enumerate(_scratch if device.type == "cpu" else ()):
        if known.numel() >= num_bytes:
            return _scratch.pop(position)
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _give_scratch_back(scratch: torch.Tensor) -> None:
    if not scratch.is_cpu:
        return
    _scratch.append(scratch)
    if len(_scratch) > _MOST_SCRATCH_KEPT:
        _scratch.sort(key=torch.Tensor.numel)
        del _scratch[0]


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()
