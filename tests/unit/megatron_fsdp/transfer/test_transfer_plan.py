"""Plans of transfers, checked with numpy: every byte arrives once, from a holder, and replicas share the work."""

import itertools
import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fsdp import ConfigError, TransferError
from megatron_fsdp.transfer.layouts import TransferLayout
from megatron_fsdp.transfer.transfer_plan import TransferPlan, plan_transfer

TENSORS = [("embedding", torch.bfloat16, (7, 3)), ("up", torch.float32, (5, 4)), ("scale", torch.bfloat16, (1,))]


def a_layout(dice: random.Random, num_bytes: int) -> TransferLayout:
    """Return a random layout over some ranks: shards, replicas of shards, whole copies, or any mixture."""
    num_ranks = dice.randint(1, 6)
    ranks = dice.sample(range(8), num_ranks)
    kind = dice.choice(["shards", "replicas", "copies", "random", "stripes"])
    ranges: dict[int, list[tuple[int, int]]] = {rank: [] for rank in ranks}
    if kind in ("shards", "replicas"):
        number = num_ranks if kind == "shards" else max(1, num_ranks // 2)
        cuts = [0, *sorted(dice.randint(0, num_bytes) for _ in range(number - 1)), num_bytes]
        for position, rank in enumerate(ranks):
            ranges[rank] = [(cuts[position % number], cuts[position % number + 1])]
    elif kind == "copies":
        ranges = {rank: [(0, num_bytes)] for rank in ranks}
    else:
        length = dice.randint(1, 40) if kind == "stripes" else 0
        place = 0
        for number in itertools.count():
            if place == num_bytes:
                break
            stop = min(place + (length or dice.randint(1, 200)), num_bytes)
            owners = [ranks[number % num_ranks]] if length else dice.sample(ranks, dice.randint(1, num_ranks))
            for rank in owners:
                ranges[rank].append((place, stop))
            place = stop
    return TransferLayout.of_ranges(num_bytes, ranges)


def has(layout: TransferLayout, rank: int) -> np.ndarray:
    found = np.zeros(layout.num_bytes, dtype=np.int64)
    for start, stop in zip(layout.parts[rank].starts.tolist(), layout.parts[rank].stops.tolist(), strict=True):
        found[start:stop] += 1
    return found


def rows(plan: TransferPlan) -> list[tuple[int, int, int, int]]:
    each = plan.messages
    return list(zip(each.source.tolist(), each.target.tolist(), each.start.tolist(), each.stop.tolist(), strict=True))


def least_maximum(plan: TransferPlan, held: dict[int, np.ndarray], lacking: np.ndarray) -> int:
    """Return the least maximum of bytes sent by one rank: over all sets of ranks, the bytes that only they have."""
    holders = sum((np.where(each > 0, 1 << place, 0) for place, each in enumerate(held.values())), 0 * lacking)
    by_holders = np.bincount(holders, weights=lacking, minlength=1 << len(held)).astype(int)
    sets = np.arange(1 << len(held))
    forced = [by_holders[(sets & ~chosen) == 0].sum() for chosen in sets]
    return max(-(-int(forced[chosen]) // int(chosen).bit_count()) for chosen in sets[1:])


def check(plan: TransferPlan) -> None:
    source, target = plan.source, plan.target
    held, wanted = ({rank: has(layout, rank) for rank in layout.parts} for layout in (source, target))
    arrived = {rank: np.zeros(target.num_bytes, dtype=np.int64) for rank in wanted}
    sent = dict.fromkeys(held, 0)
    pairs: dict[tuple[int, int], int] = {}
    for sender, receiver, start, stop in rows(plan):
        assert sender != receiver
        assert held[sender][start:stop].all()
        arrived[receiver][start:stop] += 1
        sent[sender] += stop - start
        pairs[sender, receiver] = pairs.get((sender, receiver), 0) + stop - start
    lacking: Any = sum(arrived.values())
    for rank, parts in plan.kept.items():
        assert (held[rank] * wanted[rank]).sum() == parts.num_bytes
        for start, stop in zip(parts.starts.tolist(), parts.stops.tolist(), strict=True):
            arrived[rank][start:stop] += 1
    for rank, times in arrived.items():
        assert (times == wanted[rank]).all(), rank
    assert sent == plan.sent
    assert sum(plan.sent.values()) == sum(plan.received.values()) == plan.num_bytes
    assert plan.bytes_between() == pairs
    least = least_maximum(plan, held, lacking)
    assert plan.bound <= least
    # For each list of holders that a rank is in, alignment may move a cut by less than 16 bytes.
    assert max(plan.sent.values(), default=0) <= least + 16 * 2 ** len(source.parts)


def check_rounds(plan: TransferPlan, staging_bytes: int) -> None:
    edges = plan.rounds
    assert list(edges) == sorted(set(edges))
    found: dict[int, int] = dict.fromkeys(plan.staging, 0)
    for first, last in itertools.pairwise(edges):
        load: dict[int, int] = {}
        for sender, receiver, start, stop in rows(plan):
            size = max(0, min(stop, last) - max(start, first))
            for rank in (sender, receiver):
                load[rank] = load.get(rank, 0) + size
        assert max(load.values()) <= staging_bytes
        found = {rank: max(most, load.get(rank, 0)) for rank, most in found.items()}
    assert found == plan.staging
    assert all(edges[0] <= start and stop <= edges[-1] for _, _, start, stop in rows(plan))


@pytest.mark.parametrize("seed", range(5))
def test_every_byte_of_a_hundred_random_pairs_arrives_once_and_replicas_share(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(100):
        num_bytes = dice.choice([1, 3, 100, 3000])
        staging_bytes = dice.choice([4096, 1 << 20])
        plan = plan_transfer(a_layout(dice, num_bytes), a_layout(dice, num_bytes), staging_bytes=staging_bytes)
        check(plan)
        check_rounds(plan, staging_bytes)


def test_the_same_layout_sends_nothing() -> None:
    layout = a_layout(random.Random(3), 1000)
    plan = plan_transfer(layout, layout)
    assert (plan.num_bytes, plan.rounds, plan.bytes_between()) == (0, (), {})
    assert "0 B travel" in str(plan)


def test_slices_are_those_of_torch_chunk() -> None:
    dims = {"embedding": 1, "up": 0, "scale": None}
    layout = TransferLayout.sliced(TENSORS, [4, 2], dims)
    for entry in layout.tensors:
        places = torch.arange(entry.offset, entry.offset + entry.num_bytes).view(*entry.shape, -1)
        dim = dims[entry.name]
        for rank, position in ((4, 0), (2, 1)):
            wanted = places if dim is None else places.chunk(2, dim)[position]
            found = has(layout, rank)
            assert found[wanted.flatten().numpy()].all()
            assert found[entry.offset : entry.offset + entry.num_bytes].sum() == wanted.numel()


def test_the_table_shows_bytes_per_rank_and_pair_and_the_bound() -> None:
    source = TransferLayout.of_ranges(4096, {0: [(0, 4096)], 1: [(0, 4096)]})
    target = TransferLayout.sliced([("weight", torch.uint8, (4096,))], [2, 3], {"weight": 0})
    text = str(plan_transfer(source, target, staging_bytes=1024))
    assert "4.00 KiB travel from ranks 0-1 to ranks 2-3 in 3 rounds; 0 B stay" in text
    assert "a rank sends at most 2.00 KiB, 0.0% above the bound 2.00 KiB" in text
    assert re.search(r"^0 +2\.00 KiB +0 B +0 B +1\.00 KiB$", text, re.MULTILINE)
    assert re.search(r"^1 +3 +2\.00 KiB$", text, re.MULTILINE)


def test_bytes_that_no_rank_has_are_named() -> None:
    whole = TransferLayout.sliced(TENSORS, [0, 1], {"embedding": 0, "up": 0})
    with pytest.raises(TransferError, match=r"the first is tensor 'embedding', byte 24 of 42\. fix: "):
        plan_transfer(whole.without([1]), TransferLayout.sliced(TENSORS, [0]))


def test_layouts_of_other_tensors_are_refused_by_name() -> None:
    other = [TENSORS[0], ("up", torch.float32, (4, 5)), TENSORS[2]]
    with pytest.raises(TransferError, match=r"the first difference is tensor 'up'\. fix: "):
        plan_transfer(TransferLayout.sliced(TENSORS, [0]), TransferLayout.sliced(other, [0]))


def test_layouts_that_are_none_are_refused_by_name() -> None:
    with pytest.raises(TransferError, match=r"rank 3 holds bytes 0 to 9 of a flat space of 8"):
        TransferLayout.of_ranges(8, {3: [(0, 9)]})
    with pytest.raises(TransferError, match="holds bytes 2 to 4 of the flat space twice"):
        TransferLayout.of_ranges(8, {0: [(0, 4), (2, 6)]})
    with pytest.raises(TransferError, match=r"'up': 2\}.*its shape is \(5, 4\)"):
        TransferLayout.sliced(TENSORS, [0], {"up": 2})
    with pytest.raises(ConfigError, match=r"staging_bytes=8\).*32 bytes are the least"):
        plan_transfer(
            TransferLayout.of_ranges(64, {0: [(0, 64)]}), TransferLayout.of_ranges(64, {1: [(0, 64)]}), staging_bytes=8
        )
