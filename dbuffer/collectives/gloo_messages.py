"""Asynchronous calls on gloo, and exchanges of messages from which the files of the operations make their shortcuts.

Sums of a wider dtype use exchanges on any backend.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dbuffer.mesh import MeshAxis

REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}

# torch 2.13 renames it and warns on the old name; torch 2.11 has only the old one.
gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

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


class Message:
    """Send and receive buffers of one exchange of several tensors: one row per rank, with its shards in sequence.

    Between two ranks, the only row is that of the other rank.

    Args:
        shards: one of each tensor, 1-D, of any dtypes.

    Attributes:
        places: the bytes of each shard in a row. others: the rank of each row.
        leaving, arriving: the rows to send, which the caller fills, and the received rows.
    """

    # Each shard starts at a multiple of this many bytes, so that a row can be viewed in any dtype.
    ALIGNMENT = 16

    def __init__(self, shards: Sequence[torch.Tensor], axis: MeshAxis) -> None:
        self.places: list[slice] = []
        num_bytes = 0
        for shard in shards:
            self.places.append(slice(num_bytes, num_bytes + shard.nbytes))
            num_bytes += -(-shard.nbytes // self.ALIGNMENT) * self.ALIGNMENT
        self.others = [1 - axis.rank] if axis.size == 2 else list(range(axis.size))
        size = len(self.others) * num_bytes
        self._scratch = [take_scratch(size, shards[0].device) for _ in range(2)]
        self.leaving, self.arriving = (each[:size].view(len(self.others), num_bytes) for each in self._scratch)
        self._axis = axis

    def send(self, group: dist.ProcessGroup, then: Callable[[], None]) -> dist.Work:
        """Exchange the rows, and run ``then`` when the handle is waited for."""
        work = exchange(self.arriving.view(-1), self.leaving.view(-1), self._axis, group)
        return WorkThen(work, then, *self._scratch)


class WorkThen(dist.Work):
    """A collective followed by work on the waiting thread. ``is_completed`` polls the collective alone.

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


def exchange(arriving: torch.Tensor, leaving: torch.Tensor, axis: MeshAxis, group: dist.ProcessGroup) -> dist.Work:
    """Send equal parts of ``leaving`` to all ranks, as bytes; or, between two ranks, all of it to the other rank."""
    splits = [leaving.nbytes * (rank != axis.rank) for rank in range(2)] if axis.size == 2 else None
    both = {"output_split_sizes": splits, "input_split_sizes": splits}
    parts = arriving.view(torch.uint8), leaving.view(torch.uint8)
    work: dist.Work = start(dist.all_to_all_single, *parts, group=group, **both)
    return work


# Receive buffers of completed exchanges, kept for reuse.
_scratch: list[torch.Tensor] = []

_MOST_SCRATCH_KEPT = 2


def take_scratch(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return at least ``num_bytes`` bytes of undefined content, from the cache if it has as many.

    ``WorkThen`` returns them to the cache.
    """
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
