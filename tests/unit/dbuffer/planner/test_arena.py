"""Arenas: buffers that are alive at the same time do not overlap, and the loss against the bound is reported."""

import itertools
import random

import pytest

from dbuffer.planner.arena import ArenaPlan, Lifetime, Recorder, plan_arena


def assert_no_overlap(lifetimes: list[Lifetime], plan: ArenaPlan, alignment: int) -> None:
    """Check every pair of buffers, and the number of bytes at every time."""
    times = {start for lifetime in lifetimes for start, _ in lifetime.spans}
    sizes = [-(-lifetime.num_bytes // alignment) * alignment for lifetime in lifetimes]
    held = [
        sum(size for size, one in zip(sizes, lifetimes, strict=True) if any(a <= time < b for a, b in one.spans))
        for time in times
    ]
    assert plan.lower_bound == max(held, default=0)
    assert plan.num_bytes >= plan.lower_bound
    for one, other in itertools.combinations(range(len(lifetimes)), 2):
        meet = any(a < d and c < b for a, b in lifetimes[one].spans for c, d in lifetimes[other].spans)
        first, second = sorted((one, other), key=lambda item: plan.offsets[item])
        if meet and sizes[one] and sizes[other]:
            assert plan.offsets[first] + sizes[first] <= plan.offsets[second]
    assert all(offset % alignment == 0 for offset in plan.offsets)
    assert all(offset + size <= plan.num_bytes for offset, size in zip(plan.offsets, sizes, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_random_buffers_never_overlap_and_the_bound_is_the_most_held(seed: int) -> None:
    generator = random.Random(seed)
    lifetimes = []
    for _ in range(generator.randint(1, 40)):
        starts = sorted(generator.sample(range(100), generator.choice([2, 2, 4])))
        spans = tuple(itertools.pairwise(starts))[::2]
        lifetimes.append(Lifetime(generator.choice([0, 1, 7, 64, 513, 4000]), spans))
    alignment = generator.choice([1, 64, 512])
    assert_no_overlap(lifetimes, plan_arena(lifetimes, alignment=alignment), alignment)


def test_a_chain_of_unequal_units_reaches_the_bound() -> None:
    sizes = [5952, 896, 8000, 6176, 8000, 6784]
    lifetimes = [Lifetime(size, ((2 * at, 2 * at + 4),)) for at, size in enumerate(sizes)]
    plan = plan_arena(lifetimes, alignment=1)
    assert plan.num_bytes == plan.lower_bound == max(map(sum, itertools.pairwise(sizes)))
    assert plan.gap == 0


def test_an_unreachable_lower_bound_is_reported_as_a_gap() -> None:
    # Four buffers of one byte leave two holes of one byte, too small for a buffer of two; found by trying all
    # placements.
    lifetimes = [
        Lifetime(1, ((0, 3),)), Lifetime(1, ((0, 5),)), Lifetime(1, ((0, 3),)), Lifetime(1, ((2, 7),)),
        Lifetime(2, ((3, 9),)), Lifetime(2, ((6, 9),)),
    ]  # fmt: skip
    plan = plan_arena(lifetimes, alignment=1)
    assert_no_overlap(lifetimes, plan, 1)
    least = min(
        max(offset + one.num_bytes for offset, one in zip(offsets, lifetimes, strict=True))
        for offsets in itertools.product(range(4), repeat=6)
        if _is_legal(lifetimes, offsets)
    )
    assert plan.num_bytes == least


def _is_legal(lifetimes: list[Lifetime], offsets: tuple[int, ...]) -> bool:
    return all(
        offsets[i] + lifetimes[i].num_bytes <= offsets[j]
        or offsets[j] + lifetimes[j].num_bytes <= offsets[i]
        or not any(a < d and c < b for a, b in lifetimes[i].spans for c, d in lifetimes[j].spans)
        for i, j in itertools.combinations(range(len(lifetimes)), 2)
    )


def test_no_buffers_take_no_arena() -> None:
    assert plan_arena([]) == ArenaPlan((), 0, 0)


def test_the_same_buffers_are_placed_alike_each_time() -> None:
    generator = random.Random(1)
    lifetimes = [Lifetime(generator.randint(1, 99), ((at, at + generator.randint(1, 9)),)) for at in range(60)]
    assert plan_arena(lifetimes, alignment=1) == plan_arena(lifetimes, alignment=1)


def test_recorded_lifetimes_are_in_order_of_their_start() -> None:
    recorder = Recorder()
    recorder.begin("kept", 8)
    recorder.begin("empty", 0)
    recorder.begin("other", 4)
    recorder.end("kept")
    recorder.end("kept")
    recorder.begin("kept", 8)
    found = [(each.name, each.num_bytes, each.spans) for each in recorder.lifetimes(10)]
    assert found == [("kept", 8, ((11, 13),)), ("other", 4, ((12, 15),)), ("kept", 8, ((14, 15),))]
