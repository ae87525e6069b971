"""Collectives on CPU tensors over gloo, with fewer copies and bytes than gloo's own.

Sums in a dtype wider than the sent one also run here, on any backend: each rank computes them itself from what it
received.
"""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dbuffer.mesh import MeshAxis

REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}

MOST_EXCHANGED_BYTES = 1 << 26
"""Larger buffers are all-reduced in place, one by one. The choice depends on the size only, so all ranks agree."""

# torch 2.13 renames it and warns on the old name; torch 2.11 has only the old one.
gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a whole tensor and this rank's shard of it, all 1-D, of any dtypes."""

_NO_TIMEOUT = datetime.timedelta(0)

if not torch.backends.cuda.is_built():
    # Turns off PyTorch's flight recorder, which makes a training process grow by 2 MB a step on CPUs, to twice the size
    # (docs/design/storage.md, "Memory on CPU"). Set at import because PyTorch reads the variable once, when the first
    # process group is made, and has no function to change it later. A user's own value is kept. Builds with CUDA, where
    # these records are of use, are left alone.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")


def start(collective: Callable[..., Any], *tensors: torch.Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
    """Issue a collective asynchronously and return its handle."""
    return collective(*tensors, group=group, async_op=True, **options)


def all_gather(output: torch.Tensor, shard: torch.Tensor, axis: MeshAxis) -> dist.Work:
    """All-gather. Two ranks exchange shards instead, which avoids gloo's copies of the whole output."""
    if axis.size != 2 or not output.nbytes:
        work: dist.Work = start(gather_flat, output, shard, group=axis.gather_group)
        return work
    slices = output.view(2, -1)
    copy(slices[axis.rank], shard)
    return _exchange(slices[1 - axis.rank], shard, axis, axis.gather_group)


def reduce_scatter(output: torch.Tensor, full: torch.Tensor, axis: MeshAxis, op: str) -> dist.Work:
    """Reduce-scatter by all-to-all: each rank sends every other rank its slice, and sums the slices it receives.

    This moves half the bytes of an all-reduce and needs a scratch buffer for the received slices. Larger buffers
    are reduced by all-reduce, as in gloo's own reduce-scatter, but in place and with a handle that can be polled:
    gloo's own copies the whole input first, and its handle ignores timeouts.
    """
    slices = full.view(axis.size, -1)
    mine = slices[axis.rank]
    if output.dtype is full.dtype and not 0 < full.nbytes <= MOST_EXCHANGED_BYTES:
        work = start(dist.all_reduce, full, op=REDUCE_OPS[op], group=axis.reduce_group)
        return _WorkThen(work, functools.partial(copy, output, mine))
    # With two ranks, this rank's own slice need not be sent through the exchange.
    sent = slices[1 - axis.rank] if axis.size == 2 else full
    scratch = _take_scratch(sent.nbytes, full.device)
    received = scratch[: sent.nbytes]
    work = _exchange(received, sent, axis, axis.reduce_group)
    others = received.view(full.dtype).view(-1, output.numel())
    return _WorkThen(work, functools.partial(_add_up, output, mine, others, axis, op), scratch)


def all_reduce_by_message(tensors: Sequence[torch.Tensor], axis: MeshAxis, op: str) -> dist.Work:
    """All-reduce several tensors of one dtype as one buffer."""
    sizes = [tensor.numel() for tensor in tensors]
    num_bytes = sum(sizes) * tensors[0].itemsize
    scratch = _take_scratch(num_bytes, tensors[0].device)
    whole = scratch[:num_bytes].view(tensors[0].dtype)
    torch.cat([tensor.view(-1) for tensor in tensors], out=whole)
    work = start(dist.all_reduce, whole, op=REDUCE_OPS[op], group=axis.reduce_group)

    def take_apart() -> None:
        for tensor, part in zip(tensors, whole.split(sizes), strict=True):
            tensor.view(-1).copy_(part)

    return _WorkThen(work, take_apart, scratch)


def gather_by_message(pairs: Pairs, axis: MeshAxis) -> dist.Work:
    """All-gather several tensors by one exchange; each rank's message holds all of its shards."""
    message = _Message(pairs, axis)
    for (whole, shard), place in zip(pairs, message.places, strict=True):
        copy(whole.view(axis.size, -1)[axis.rank], shard)
        message.leaving[:, place] = shard.view(torch.uint8)

    def sort() -> None:
        for (whole, _), place in zip(pairs, message.places, strict=True):
            rows = whole.view(torch.uint8).view(axis.size, -1)
            for row, other in zip(message.arriving, message.others, strict=True):
                if other != axis.rank:
                    rows[other].copy_(row[place])

    return message.send(axis.gather_group, sort)


def reduce_by_message(pairs: Pairs, axis: MeshAxis, op: str) -> dist.Work:
    """Reduce-scatter several tensors by one exchange; they are summed as in ``reduce_scatter``."""
    slices = [whole.view(axis.size, -1) for whole, _ in pairs]
    message = _Message([(whole, rows[axis.rank]) for (whole, _), rows in zip(pairs, slices, strict=True)], axis)
    for (whole, _), place in zip(pairs, message.places, strict=True):
        rows = whole.view(torch.uint8).view(axis.size, -1)
        for row, other in zip(message.leaving, message.others, strict=True):
            row[place].copy_(rows[other])

    def add_up() -> None:
        for (whole, output), rows, place in zip(pairs, slices, message.places, strict=True):
            others = message.arriving[:, place].contiguous().view(whole.dtype)
            _add_up(output, rows[axis.rank], others, axis, op)

    return message.send(axis.reduce_group, add_up)


def exchange_each(received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], axis: MeshAxis) -> list[dist.Work]:
    """Send one tensor to each other rank and receive one from it, one rank at a time: gloo has no list all-to-all."""
    works = []
    for step in range(1, axis.size):
        target, source = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
        output, leaving = received[source].view(torch.uint8), sent[target].view(torch.uint8)
        sizes = {
            "output_split_sizes": [output.numel() * (rank == source) for rank in range(axis.size)],
            "input_split_sizes": [leaving.numel() * (rank == target) for rank in range(axis.size)],
        }
        works.append(start(dist.all_to_all_single, output, leaving, group=axis.reduce_group, **sizes))
    return works


class _Message:
    """Send and receive buffers of one exchange of several tensors: one row per rank, with its shards in sequence.

    With two ranks there is only the row of the other rank.
    """

    # Each shard starts at a multiple of this many bytes, so that a row can be viewed in any dtype.
    ALIGNMENT = 16

    def __init__(self, pairs: Pairs, axis: MeshAxis) -> None:
        self.places: list[slice] = []
        num_bytes = 0
        for _, shard in pairs:
            self.places.append(slice(num_bytes, num_bytes + shard.nbytes))
            num_bytes += -(-shard.nbytes // self.ALIGNMENT) * self.ALIGNMENT
        self.others = [1 - axis.rank] if axis.size == 2 else list(range(axis.size))
        size = len(self.others) * num_bytes
        self._scratch = [_take_scratch(size, pairs[0][0].device) for _ in range(2)]
        self.leaving, self.arriving = (each[:size].view(len(self.others), num_bytes) for each in self._scratch)
        self._axis = axis

    def send(self, group: dist.ProcessGroup, then: Callable[[], None]) -> dist.Work:
        """Exchange the rows, and run ``then`` when the handle is waited for."""
        work = _exchange(self.arriving.view(-1), self.leaving.view(-1), self._axis, group)
        return _WorkThen(work, then, *self._scratch)


class _WorkThen(dist.Work):
    """A collective followed by work on the waiting thread. It can be polled like the collective alone.

    Args:
        then: runs once, in ``wait``; runs again if it was interrupted. scratch: returned to the cache afterwards.
    """

    def __init__(self, work: dist.Work, then: Callable[[], None], *scratch: torch.Tensor) -> None:
        super().__init__()
        self._work = work
        self._then: Callable[[], None] | None = then
        self._scratch = scratch

    def is_completed(self) -> bool:
        """Return whether the ranks have completed the collective."""
        return self._work.is_completed()

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the output holds the result.

        Raises:
            RuntimeError: the collective failed, or did not complete within ``timeout``.
        """
        self._work.wait(timeout)
        if self._then is not None:
            self._then()
            self._then = None
            scratch, self._scratch = self._scratch, ()
            for each in scratch:
                _give_scratch_back(each)
        return True


def _exchange(arriving: torch.Tensor, leaving: torch.Tensor, axis: MeshAxis, group: dist.ProcessGroup) -> dist.Work:
    """Send equal parts of ``leaving`` to all ranks, as bytes. With two ranks, send all of it to the other rank."""
    splits = [leaving.nbytes * (rank != axis.rank) for rank in range(2)] if axis.size == 2 else None
    both = {"output_split_sizes": splits, "input_split_sizes": splits}
    parts = arriving.view(torch.uint8), leaving.view(torch.uint8)
    work: dist.Work = start(dist.all_to_all_single, *parts, group=group, **both)
    return work


def _add_up(output: torch.Tensor, mine: torch.Tensor, others: torch.Tensor, axis: MeshAxis, op: str) -> None:
    """Write the sum of this rank's slice and the other ranks' slices into ``output``.

    Args:
        others: (1, elements) from the only other rank, or (ranks, elements) from all; this rank's row is ignored.
        op: "sum", or "avg", which divides. If ``output`` has a wider dtype, the sum is in that dtype and in rank order.
    """
    terms = list(others) if len(others) != 1 else [others[0], others[0]]
    terms[axis.rank] = mine
    if output.dtype is not mine.dtype and output.is_cuda and len(others) > 1:
        # A single kernel launch for any number of ranks.
        others[axis.rank].copy_(mine)
        torch.sum(others, 0, dtype=output.dtype, out=output)
    elif output.dtype is not mine.dtype:
        output.copy_(terms[0])
        for term in terms[1:]:
            output.add_(term)
    else:
        copy(output, mine)
        for rank, term in enumerate(terms):
            if rank != axis.rank:
                output.add_(term)
    if op == "avg":
        output.div_(axis.size)


def copy(output: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` to ``output``, unless they share their memory."""
    if output.data_ptr() != source.data_ptr():
        output.copy_(source)


# Receive buffers of completed exchanges, kept for reuse.
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
