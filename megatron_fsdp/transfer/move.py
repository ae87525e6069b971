"""Carry out a transfer plan: rounds of one all-to-all each, through staging buffers of a limited size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dbuffer.collectives.all_to_all import all_to_all
from dbuffer.mesh import MeshAxis, new_group
from megatron_fsdp.errors import AgreementError
from megatron_fsdp.transfer.layouts import Parts
from megatron_fsdp.transfer.transfer_plan import Messages, TransferPlan

__all__ = ["Mover"]

_LEAST_STAGING = 1 << 20


class Mover:
    """This rank's part in a transfer.

    Args:
        plan: the same on all ranks.
        sources, targets: contiguous tensors of any dtypes. One after the other, they hold this rank's part of the
            source and of the target layout. Sources and targets may not overlap.
        device: of the staging buffers: the communicator sends from there.
        group: over the ranks of the plan, ascending; None makes one, and all ranks have to do so together.
    Raises:
        RuntimeError: out of memory.
    """

    def __init__(
        self,
        plan: TransferPlan,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._plan, self._rank = plan, dist.get_rank() if dist.is_initialized() else 0
        self._source = _Memory(plan.source.parts.get(self._rank), sources)
        self._target = _Memory(plan.target.parts.get(self._rank), targets)
        self._buffer = torch.empty(plan.staging.get(self._rank, 0), dtype=torch.uint8, device=device)
        self._axis: MeshAxis | None = None
        self._is_own_group = group is None and len(plan.rounds) > 1
        if len(plan.rounds) > 1:
            ranks = list(plan.ranks)
            group = new_group(ranks, "transfer") if group is None else group
            self._axis = MeshAxis("transfer", len(ranks), ranks.index(self._rank), group, False)

    @torch.no_grad()
    def run(self) -> None:
        """Copy the bytes that stay on this rank, then send and receive round by round.

        Raises:
            AgreementError: another rank ended or did not come.
        """
        self._keep()
        if self._axis is None:
            return
        messages = self._plan.messages
        mine, theirs = (messages.where(column == self._rank) for column in (messages.source, messages.target))
        for number, (start, stop) in enumerate(itertools.pairwise(self._plan.rounds)):
            ranks = self._plan.ranks
            get, give = (_in_round(*each, start, stop, ranks) for each in ((theirs, "source"), (mine, "target")))
            received, sent = self._buffer[: sum(get)], self._buffer[sum(get) : sum(get) + sum(give)]
            self._source.read(mine, start, stop, sent)
            try:
                all_to_all(received, sent, self._axis, (get, give))
            except RuntimeError as error:
                AgreementError.raise_for("transfer", f"round {number} of {len(self._plan.rounds) - 1}", error)
            self._target.write(theirs, start, stop, received)

    def _keep(self) -> None:
        """Copy the bytes that stay on this rank."""
        kept = self._plan.kept.get(self._rank)
        if kept is None or not len(kept.starts):
            return
        size = max(self._buffer.numel(), _LEAST_STAGING)
        buffer = self._buffer
        if buffer.numel() < min(size, kept.num_bytes):
            buffer = torch.empty(min(size, kept.num_bytes), dtype=torch.uint8, device=buffer.device)
        here = torch.full_like(kept.starts, self._rank)
        rows = Messages(here, here, kept.starts, kept.stops)
        for start in range(int(kept.starts[0]), int(kept.stops[-1]), size):
            part = buffer[: int((rows.stop.clamp(max=start + size) - rows.start.clamp(min=start)).clamp(min=0).sum())]
            self._source.read(rows, start, start + size, part)
            self._target.write(rows, start, start + size, part)

    def close(self) -> None:
        """Give back staging memory, and the communicator if it was made here."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        axis, self._axis = self._axis, None
        if axis is not None and self._is_own_group:
            dist.destroy_process_group(axis.gather_group)


def _in_round(rows: Messages, by: str, start: int, stop: int, ranks: Sequence[int]) -> list[int]:
    """Return the bytes in one round by rank, of the ranks of a plan."""
    lengths = (rows.stop.clamp(max=stop) - rows.start.clamp(min=start)).clamp(min=0)
    places = torch.searchsorted(torch.tensor(ranks), getattr(rows, by))
    found: list[int] = torch.zeros(len(ranks), dtype=torch.int64).index_add_(0, places, lengths).tolist()
    return found


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of equal length at equal distances in one tensor."""

    tensor: torch.Tensor
    offset: int
    length: int
    stride: int
    count: int

    def view(self) -> torch.Tensor:
        """Return them as rows."""
        start = self.tensor.storage_offset() + self.offset
        return self.tensor.as_strided((self.count, self.length), (self.stride, 1), start)


class _Memory:
    """One rank's part of a flat space, in several tensors one after the other."""

    def __init__(self, parts: Parts | None, tensors: Sequence[torch.Tensor]) -> None:
        self._parts = Parts.of([]) if parts is None else parts
        self._offsets = self._parts.local_offsets()
        self._tensors = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        sizes = torch.tensor([tensor.numel() for tensor in self._tensors], dtype=torch.int64)
        self._ends = sizes.cumsum(0)
        self._begins = self._ends - sizes
        held = int(self._ends[-1]) if self._tensors else 0
        assert held == self._parts.num_bytes, f"{held} bytes in tensors, {self._parts.num_bytes} in the layout"

    def read(self, rows: Messages, start: int, stop: int, out: torch.Tensor) -> None:
        """Copy what messages have in one round to ``out``, one behind the other."""
        for pieces, place in self._placed(rows, start, stop):
            out[place : place + pieces.count * pieces.length].view(pieces.count, -1).copy_(pieces.view())

    def write(self, rows: Messages, start: int, stop: int, values: torch.Tensor) -> None:
        """Copy what messages bring in one round to its places."""
        for pieces, place in self._placed(rows, start, stop):
            pieces.view().copy_(values[place : place + pieces.count * pieces.length].view(pieces.count, -1))

    def _placed(self, rows: Messages, start: int, stop: int) -> Iterator[tuple[_Pieces, int]]:
        place = 0
        for pieces in self._pieces(rows, start, stop):
            yield pieces, place
            place += pieces.count * pieces.length

    def _pieces(self, rows: Messages, start: int, stop: int) -> Iterator[_Pieces]:
        """Yield where the bytes of messages within [start, stop) lie, in the order of the messages."""
        first, last = rows.start.clamp(min=start), rows.stop.clamp(max=stop)
        first, last = first[first < last], last[first < last]
        if not len(first):
            return
        part = torch.searchsorted(self._parts.starts, first, right=True) - 1
        begin = self._offsets[part] + first - self._parts.starts[part]
        begin, length = _cut_at(begin, last - first, self._begins)
        tensor = torch.searchsorted(self._begins, begin, right=True) - 1
        offset = begin - self._begins[tensor]
        # A group ends where the tensor, the length or the distance changes.
        ends = torch.ones(len(begin), dtype=torch.bool)
        step = offset[1:] - offset[:-1]
        is_alike = (tensor[1:] == tensor[:-1]) & (length[1:] == length[:-1]) & (step > 0)
        is_even = is_alike.clone()
        is_even[1:] &= step[1:] == step[:-1]
        ends[:-1] = ~is_even
        place = 0
        for stop_at in (ends.nonzero().view(-1) + 1).tolist():
            count = stop_at - place
            stride = int(step[place]) if count > 1 else int(length[place])
            yield _Pieces(self._tensors[int(tensor[place])], int(offset[place]), int(length[place]), stride, count)
            place = stop_at


def _cut_at(begin: torch.Tensor, length: torch.Tensor, cuts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut ranges at places; returns the begins and lengths of the pieces, in order."""
    first = torch.searchsorted(cuts, begin, right=True)
    number = torch.searchsorted(cuts, begin + length) - first + 1
    owner = torch.arange(len(begin)).repeat_interleave(number)
    within = torch.arange(len(owner)) - (number.cumsum(0) - number)[owner]
    place = first[owner] + within
    starts = torch.where(within == 0, begin[owner], cuts[(place - 1).clamp(min=0)])
    stops = torch.where(within == number[owner] - 1, (begin + length)[owner], cuts[place.clamp(max=len(cuts) - 1)])
    return starts, stops - starts
