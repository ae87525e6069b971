"""TransferPlan: the bytes to send between each pair of ranks, so that every rank has its part of another layout.

Pure arithmetic on two layouts: every rank makes the same plan, and nothing is sent. docs/design/transfer.md says how.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_fsdp.errors import ConfigError, TransferError
from megatron_fsdp.formatting import Table, counted, format_bytes, rank_list
from megatron_fsdp.transfer.layouts import Parts, TransferLayout

__all__ = ["TransferPlan", "plan_transfer"]

_CUT = 16
"""Bytes of the flat space between places where replicas may share a part: no element is cut."""
_MAX_SWEEPS = 200
_MAX_LISTED = 24


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Bytes that travel, one row for each contiguous range: 1-D int64 tensors of equal length."""

    source: torch.Tensor
    target: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor

    def where(self, mask: torch.Tensor) -> Messages:
        """Return the rows that a mask chooses."""
        return Messages(self.source[mask], self.target[mask], self.start[mask], self.stop[mask])

    @property
    def lengths(self) -> torch.Tensor:
        """Bytes of each."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """The plan of a transfer, made by ``plan_transfer``; ``print(plan)`` shows its tables.

    Attributes:
        source, target: the layouts.
        messages: ranges of bytes with their source and target rank, sorted by (source, target, start).
        kept: the bytes that a rank takes from its own memory, by rank.
        rounds: the flat space is sent range by range: the start of each round, and the end of the last one.
        sent, received: bytes by rank.
        bound: no plan has a smaller maximum of bytes sent by one rank.
        staging: bytes of send and receive buffers that each rank needs, by rank.

    Example:
        layout = weight_layout(model)
        plan = plan_transfer(layout, TransferLayout.sliced(layout.metadata(), ranks=[0]))
        print(plan)  # bytes per rank, per pair of ranks, and the bound
    """

    source: TransferLayout
    target: TransferLayout
    messages: Messages
    kept: Mapping[int, Parts]
    rounds: tuple[int, ...]
    sent: Mapping[int, int]
    received: Mapping[int, int]
    bound: int
    staging: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return int(self.messages.lengths.sum())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        return tuple(sorted({*self.source.parts, *self.target.parts}))

    def bytes_between(self) -> dict[tuple[int, int], int]:
        """Return the bytes that travel by (source rank, target rank), without pairs of zero bytes."""
        found: dict[tuple[int, int], int] = {}
        rows = zip(
            self.messages.source.tolist(), self.messages.target.tolist(), self.messages.lengths.tolist(), strict=True
        )
        for source, target, length in rows:
            found[source, target] = found.get((source, target), 0) + length
        return found

    def fingerprint(self) -> str:
        """Return a digest of the plan, which ranks compare before they send."""
        tensors = self.source.tensors, self.target.tensors
        digest = hashlib.sha256(repr((self.source.num_bytes, self.rounds, tensors)).encode())
        for each in (self.messages.source, self.messages.target, self.messages.start, self.messages.stop):
            digest.update(bytes(each.contiguous().view(torch.uint8).tolist()))
        return digest.hexdigest()[:16]

    def __str__(self) -> str:
        largest = max(self.sent.values(), default=0)
        above = f", {largest / self.bound - 1:.1%} above the bound {format_bytes(self.bound)}" if self.bound else ""
        kept = sum(each.num_bytes for each in self.kept.values())
        head = (
            f"transfer plan: {format_bytes(self.num_bytes)} travel from {rank_list(self.source.ranks or (0,))} to "
            f"{rank_list(self.target.ranks or (0,))} in {counted(max(len(self.rounds) - 1, 0), 'round')}; "
            f"{format_bytes(kept)} stay on their ranks\n"
            f"  a rank sends at most {format_bytes(largest)}{above}; staging memory is at most "
            f"{format_bytes(max(self.staging.values(), default=0))} on a rank"
        )
        ranks = [
            {
                "rank": str(rank), "sends_bytes": self.sent.get(rank, 0), "receives_bytes": self.received.get(rank, 0),
                "keeps_bytes": self.kept[rank].num_bytes if rank in self.kept else 0,
                "staging_bytes": self.staging.get(rank, 0),
            }
            for rank in self.ranks
        ]  # fmt: skip
        pairs = [
            {"from": str(source), "to": str(target), "bytes": format_bytes(size)}
            for (source, target), size in self.bytes_between().items()
        ]
        lines = [head, *Table.of(ranks[:_MAX_LISTED]).lines(), *_more(ranks, "rank")]
        if pairs:
            lines += [*Table.of(pairs[:_MAX_LISTED]).lines(), *_more(pairs, "pair")]
        return "\n".join(lines)


def _more(rows: Sequence[object], noun: str) -> list[str]:
    return [f"and {counted(len(rows) - _MAX_LISTED, noun)} more"] if len(rows) > _MAX_LISTED else []


def plan_transfer(source: TransferLayout, target: TransferLayout, *, staging_bytes: int = 64 << 20) -> TransferPlan:
    """Plan the bytes of the flat space that each rank sends to each other rank. Nothing is sent; all ranks get equal
    plans.

    Each byte that a rank lacks is sent to it once, by one of the ranks that hold the byte. A rank's own bytes stay.
    Ranks that hold the same bytes share the sending, such that the largest number of bytes that one rank sends is as
    small as possible, except for a few bytes of rounding.

    Args:
        source, target: layouts of one flat space.
        staging_bytes: of the send and receive buffers of a rank together: the transfer goes in so many rounds.
    Raises:
        TransferError: the layouts are of different flat spaces; or no rank of ``source`` holds bytes that ``target``
            needs, which are named.
        ConfigError: ``staging_bytes`` is too small for any round.

    Example:
        one = TransferLayout.of_ranges(8, {0: [(0, 8)]})
        two = TransferLayout.of_ranges(8, {0: [(0, 4)], 1: [(4, 8)]})
        plan = plan_transfer(one, two)
        assert plan.num_bytes == 4  # rank 0 keeps the first half
    """
    _check_spaces(source, target)
    edges, holders, kinds = _segments(source, target)
    items, kept = _items(source, target, edges)
    _check_holders(target, edges, holders, kinds, items)
    messages = _merged(_assigned(source, edges, holders, kinds, items))
    rounds, staging = _rounds(messages, source.num_bytes, staging_bytes)
    sent = {rank: int(messages.lengths[messages.source == rank].sum()) for rank in source.parts}
    received = {rank: int(messages.lengths[messages.target == rank].sum()) for rank in target.parts}
    bound = _bound(holders, _demand(len(holders), kinds, edges, items))
    return TransferPlan(source, target, messages, kept, rounds, sent, received, bound, staging)


def _check_spaces(source: TransferLayout, target: TransferLayout) -> None:
    lines = [
        {(each.name, each.dtype, each.shape, each.offset) for each in layout.tensors} for layout in (source, target)
    ]
    if source.num_bytes == target.num_bytes and (lines[0] == lines[1] or not (lines[0] and lines[1])):
        return
    differing = sorted(lines[0] ^ lines[1], key=lambda each: each[-1])
    first = f"; the first difference is tensor {differing[0][0]!r}" if differing else ""
    raise TransferError(
        f"plan_transfer: the layouts are of different flat spaces: {source.num_bytes} bytes in {len(lines[0])} tensors "
        f"and {target.num_bytes} bytes in {len(lines[1])}{first}. fix: make the target from the same tensors, "
        "TransferLayout.sliced(source.metadata(), ranks, dims)"
    )


# ---------------------------------------------------------------- segments: bytes that the same ranks hold


def _segments(source: TransferLayout, target: TransferLayout) -> tuple[torch.Tensor, list[list[int]], torch.Tensor]:
    """Cut the flat space where any part begins or ends.

    Returns:
        The places of the cuts; the lists of ranks that hold a segment; and which of the lists each segment has.
    """
    every = [*source.parts.values(), *target.parts.values()]
    edges = torch.cat(
        [torch.zeros(1, dtype=torch.int64), *(end for each in every for end in (each.starts, each.stops))]
    )
    edges = edges.unique()
    kinds = torch.zeros(max(len(edges) - 1, 0), dtype=torch.int64)
    masks = {rank: _holds(edges, each) for rank, each in source.parts.items()}
    for mask in masks.values():
        kinds = (2 * kinds + mask).unique(return_inverse=True)[1]
    firsts = [int((kinds == kind).nonzero()[0]) for kind in range(int(kinds.max()) + 1 if len(kinds) else 0)]
    holders = [[rank for rank, mask in masks.items() if bool(mask[first])] for first in firsts]
    return edges, holders, kinds


def _holds(edges: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Return of each segment whether it lies in one of the parts."""
    steps = torch.zeros(len(edges), dtype=torch.int64)
    steps.index_add_(0, torch.searchsorted(edges, parts.starts), torch.ones_like(parts.starts))
    steps.index_add_(0, torch.searchsorted(edges, parts.stops), -torch.ones_like(parts.stops))
    return steps.cumsum(0)[:-1] > 0


@dataclass(frozen=True, slots=True, eq=False)
class _Items:
    """Segments that ranks lack: the number of the segment, and the rank."""

    segment: torch.Tensor
    target: torch.Tensor


def _items(source: TransferLayout, target: TransferLayout, edges: torch.Tensor) -> tuple[_Items, dict[int, Parts]]:
    """Return the bytes that each rank lacks, and the bytes that it keeps."""
    segments, targets, kept = [], [], {}
    for rank, parts in target.parts.items():
        needs = _holds(edges, parts)
        if rank in source.parts:
            has = _holds(edges, source.parts[rank])
            both = (needs & has).nonzero().view(-1)
            kept[rank] = Parts.of(torch.stack([edges[both], edges[both + 1]], dim=1))
            needs = needs & ~has
        segments.append(needs.nonzero().view(-1))
        targets.append(torch.full_like(segments[-1], rank))
    none = torch.empty(0, dtype=torch.int64)
    return _Items(torch.cat([none, *segments]), torch.cat([none, *targets])), kept


def _check_holders(
    target: TransferLayout, edges: torch.Tensor, holders: Sequence[Sequence[int]], kinds: torch.Tensor, items: _Items
) -> None:
    empty = torch.tensor([not each for each in holders], dtype=torch.bool)
    lost = items.segment[empty[kinds[items.segment]]] if len(items.segment) else items.segment
    if len(lost):
        number = int((edges[lost + 1] - edges[lost]).sum())
        raise TransferError(
            f"plan_transfer: no rank of the source layout holds {number} bytes that the target needs; the first is "
            f"{target.tensor_at(int(edges[lost[0]]))}. fix: leave no rank out that holds the only copy; after the loss "
            "of a rank without replicas, load a checkpoint"
        )


# ---------------------------------------------------------------- who sends


def _demand(num_kinds: int, kinds: torch.Tensor, edges: torch.Tensor, items: _Items) -> list[int]:
    """Return how many bytes of each kind of segment travel."""
    lengths = (edges[1:] - edges[:-1])[items.segment]
    totals = torch.zeros(num_kinds, dtype=torch.int64)
    found: list[int] = totals.index_add_(0, kinds[items.segment], lengths).tolist()
    return found


def _quotas(holders: Sequence[Sequence[int]], demand: Sequence[int]) -> list[list[int]]:
    """Return how many bytes of each kind each of its holders sends.

    One kind after the other is given to its least loaded holders. The sum of squares of the loads falls with every
    change. Its only minimum also has the smallest largest load.
    """
    load = {rank: 0 for each in holders for rank in each}
    quotas = [[0] * len(each) for each in holders]
    for _ in range(_MAX_SWEEPS):
        moved = 0
        for kind in sorted(range(len(holders)), key=lambda number: len(holders[number])):
            if not demand[kind]:
                continue
            for rank, quota in zip(holders[kind], quotas[kind], strict=True):
                load[rank] -= quota
            found = _filled_up([load[rank] for rank in holders[kind]], demand[kind])
            for rank, quota in zip(holders[kind], found, strict=True):
                load[rank] += quota
            moved = max(moved, *(abs(a - b) for a, b in zip(found, quotas[kind], strict=True)))
            quotas[kind] = found
        if moved < _CUT:
            break
    return quotas


def _filled_up(loads: Sequence[int], amount: int) -> list[int]:
    """Return what each gets of an amount when the least loaded ones are filled up to one level."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    total = amount
    for number, position in enumerate(order, start=1):
        total += loads[position]
        if number == len(order) or total <= loads[order[number]] * number:
            level, rest = divmod(total, number)
            found = [0] * len(loads)
            for place, each in enumerate(order[:number]):
                found[each] = level + (place < rest) - loads[each]
            return found
    return []


def _assigned(
    source: TransferLayout, edges: torch.Tensor, holders: Sequence[Sequence[int]], kinds: torch.Tensor, items: _Items
) -> Messages:
    """Let the holders of each kind share its bytes, in the order of targets and of the flat space."""
    found = []
    quotas = _quotas(holders, _demand(len(holders), kinds, edges, items))
    kind_of_item = kinds[items.segment]
    for kind, (ranks, quota) in enumerate(zip(holders, quotas, strict=True)):
        mine = (kind_of_item == kind).nonzero().view(-1)
        if not len(mine):
            continue
        begins = edges[items.segment[mine]]
        lengths = edges[items.segment[mine] + 1] - begins
        ends = lengths.cumsum(0)
        # Places along all items, one behind the other, where another rank takes over.
        cuts = torch.tensor(quota, dtype=torch.int64).cumsum(0)[:-1]
        item = torch.searchsorted(ends, cuts, right=True).clamp(max=len(mine) - 1)
        first = (ends - lengths)[item]
        absolute = (begins[item] + cuts - first) // _CUT * _CUT
        cuts = (first + (absolute - begins[item])).clamp(min=first, max=ends[item])
        places = torch.cat([torch.zeros(1, dtype=torch.int64), ends, cuts]).unique()
        starts, stops = places[:-1], places[1:]
        item = torch.searchsorted(ends, starts, right=True)
        sender = torch.tensor(ranks, dtype=torch.int64)[torch.searchsorted(cuts, starts, right=True)]
        shift = begins[item] - (ends - lengths)[item]
        found.append(Messages(sender, items.target[mine][item], starts + shift, stops + shift))
    none = torch.empty(0, dtype=torch.int64)
    columns = ([none, *(getattr(each, name) for each in found)] for name in ("source", "target", "start", "stop"))
    return Messages(*map(torch.cat, columns))


def _merged(messages: Messages) -> Messages:
    """Sort messages, and join neighbours."""
    order = messages.start.argsort(stable=True)
    for key in (messages.target, messages.source):
        order = order[key[order].argsort(stable=True)]
    rows = messages.where(order)
    if not len(order):
        return rows
    is_new = torch.ones(len(order), dtype=torch.bool)
    is_new[1:] = (
        (rows.source[1:] != rows.source[:-1])
        | (rows.target[1:] != rows.target[:-1])
        | (rows.start[1:] != rows.stop[:-1])
    )
    is_last = torch.ones_like(is_new)
    is_last[:-1] = is_new[1:]
    return Messages(rows.source[is_new], rows.target[is_new], rows.start[is_new], rows.stop[is_last])


def _bound(holders: Sequence[Sequence[int]], demand: Sequence[int]) -> int:
    """Return what some rank has to send at least: bytes that only a set of ranks has, over the number of ranks.

    The sets tried are unions of the holders of kinds that are linked with one another, and the holders of each kind.
    """
    sets = {frozenset(each) for each, size in zip(holders, demand, strict=True) if size}
    for each in list(sets):
        sets.add(frozenset().union(*(other for other in sets if other & each)))
    sets.add(frozenset().union(*sets))
    return max((_forced(each, holders, demand) for each in sets if each), default=0)


def _forced(ranks: frozenset[int], holders: Sequence[Sequence[int]], demand: Sequence[int]) -> int:
    total = sum(size for each, size in zip(holders, demand, strict=True) if ranks.issuperset(each))
    return math.ceil(total / len(ranks))


# ---------------------------------------------------------------- rounds


def _rounds(messages: Messages, num_bytes: int, staging_bytes: int) -> tuple[tuple[int, ...], dict[int, int]]:
    """Cut the flat space such that no rank sends and receives more than ``staging_bytes`` in one range.

    Returns:
        The starts of the ranges and the end of the last one; and the largest number of bytes that each rank stages.
    """
    ranks = sorted({*messages.source.tolist(), *messages.target.tolist()})
    if not ranks:
        return (), {}
    edges = torch.cat([messages.start, messages.stop]).unique()
    totals = {rank: _running_total(messages, edges, rank) for rank in ranks}
    most = max(int(((total[1:] - total[:-1]) // (edges[1:] - edges[:-1])).max()) for total in totals.values())
    if staging_bytes < 2 * _CUT * most:
        raise ConfigError(
            f"plan_transfer(staging_bytes={staging_bytes}): a rank sends or receives one byte {most} times here, so "
            f"{2 * _CUT * most} bytes are the least. fix: give more; the default is {64 << 20}"
        )
    rounds, staging = [int(edges[0])], dict.fromkeys(ranks, 0)
    while rounds[-1] < int(edges[-1]):
        stop = int(edges[-1])
        for total in totals.values():
            stop = min(stop, _place_of(edges, total, _total_at(edges, total, rounds[-1]) + staging_bytes))
        stop = stop if stop == int(edges[-1]) else stop // _CUT * _CUT
        for rank, total in totals.items():
            size = _total_at(edges, total, stop) - _total_at(edges, total, rounds[-1])
            staging[rank] = max(staging[rank], size)
        rounds.append(stop)
    return tuple(rounds), staging


def _running_total(messages: Messages, edges: torch.Tensor, rank: int) -> torch.Tensor:
    """Return how many bytes a rank sends and receives of the flat space before each edge."""
    slope = torch.zeros(len(edges), dtype=torch.int64)
    for column in (messages.source, messages.target):
        mine = messages.where(column == rank)
        slope.index_add_(0, torch.searchsorted(edges, mine.start), torch.ones_like(mine.start))
        slope.index_add_(0, torch.searchsorted(edges, mine.stop), -torch.ones_like(mine.stop))
    grown = slope.cumsum(0)[:-1] * (edges[1:] - edges[:-1])
    return torch.cat([torch.zeros(1, dtype=torch.int64), grown.cumsum(0)])


def _total_at(edges: torch.Tensor, total: torch.Tensor, place: int) -> int:
    number = min(int(torch.searchsorted(edges, place, right=True)) - 1, len(edges) - 2)
    slope = int(total[number + 1] - total[number]) // int(edges[number + 1] - edges[number])
    return int(total[number]) + slope * (place - int(edges[number]))


def _place_of(edges: torch.Tensor, total: torch.Tensor, amount: int) -> int:
    """Return the last place before which a rank has sent and received no more than an amount."""
    number = int(torch.searchsorted(total, amount, right=True)) - 1
    if number >= len(edges) - 1:
        return int(edges[-1])
    slope = int(total[number + 1] - total[number]) // int(edges[number + 1] - edges[number])
    return int(edges[number]) + (amount - int(total[number])) // slope


def pieces_of_round(messages: Messages, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, stop) of messages inside of one round, in order, without empty ones."""
    first, last = messages.start.clamp(min=start), messages.stop.clamp(max=stop)
    yield from ((a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True) if a < b)
