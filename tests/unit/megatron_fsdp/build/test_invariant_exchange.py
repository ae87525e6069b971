"""Where the ranks of a mesh receive what others send: every exchange fits into scratch that is alike on all of them."""

from itertools import product

import pytest

from megatron_fsdp.build.invariant_exchange import Cut, ExchangePlan, gather_turns, piece_of

MESHES = [(), (2,), (3,), (5,), (2, 2), (2, 3), (3, 2), (4, 2), (2, 5), (2, 3, 2)]


def plans_of(sizes: tuple[int, ...], numel: int) -> list[ExchangePlan]:
    places = product(*map(range, sizes))
    return [ExchangePlan.of(numel, list(map(Cut, sizes, ranks))) for ranks in places]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_scratch_is_as_large_on_every_rank_and_holds_what_each_receives(sizes: tuple[int, ...]) -> None:
    for numel in range(50):
        plans = plans_of(sizes, numel)
        assert len({plan.scratch_numel for plan in plans}) == 1
        for plan, ranks in zip(plans, product(*map(range, sizes)), strict=True):
            for hop in plan.hops:
                mine = hop.pieces[ranks[hop.axis]]
                stop = hop.start + (sizes[hop.axis] - 1) * (mine.stop - mine.start)
                assert hop.start < 0 or stop <= plan.scratch_numel


@pytest.mark.parametrize("sizes", MESHES[1:], ids=str)
def test_turns_gather_every_element_once_by_way_of_scratch(sizes: tuple[int, ...]) -> None:
    for numel, (wire, main), size in product(range(1, 50), ((2, 4), (4, 4), (1, 8)), sizes):
        scratch = plans_of(sizes, numel)[0].scratch_bytes(wire)
        turns = gather_turns(numel, size, scratch, main)
        for rank in range(size):
            part = range(numel)[piece_of(numel, size, rank)]
            assert [index for turn in turns for index in part[turn]] == list(part)
        assert all(0 < (turn.stop - turn.start) * size * main <= scratch for turn in turns)
