"""The planner against exhaustive search on small tensors and against arithmetic on the layers of published models."""

import dataclasses
import math
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dbuffer.errors import LayoutError, PaddingWarning
from dbuffer.planner import regions as planner
from dbuffer.planner.granularity import Block, Element, Granularity, Row, Whole
from dbuffer.planner.plan import PaddingLimits
from dbuffer.planner.regions import plan, plan_regions
from tests.harness.plans import fault_of

Shape = tuple[int, ...]

ANYTHING = PaddingLimits(warn_ratio=math.inf, refuse_ratio=math.inf)

NORM = [(4096,)]
ATTENTION = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
LLAMA = [*NORM, *ATTENTION, *NORM, (14336, 4096), (14336, 4096), (4096, 14336)]
GPT2_LAYER = [
    *[(768,), (768,), (2304, 768), (2304,), (768, 768), (768,)],
    *[(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)],
]
GPT2 = [(50257, 768), (1024, 768), *(GPT2_LAYER * 12), (768,), (768,)]

granularities = st.sampled_from([Element(), Row(), Row(), Block(2), Block(3), Whole()])
small_tensors = st.lists(
    st.tuples(st.one_of(st.tuples(st.integers(0, 6), st.integers(1, 9)), st.tuples(st.integers(1, 12))), granularities),
    max_size=6,
)


def shortest_shard(shapes: Sequence[Shape], cuts: Sequence[Granularity], num_shards: int, alignment: int) -> int:
    """Return the shortest legal shard by trying every length, and for it every legal offset of every tensor."""
    tensors = [(math.prod(shape), cut.unit_numel(shape)) for shape, cut in zip(shapes, cuts, strict=True)]
    tensors = sorted((numel, unit) for numel, unit in tensors if numel)[::-1]
    shard = 0
    while not fits(tensors, shard, num_shards, alignment):
        shard += alignment
    return shard


def fits(tensors: Sequence[tuple[int, int]], shard: int, num_shards: int, alignment: int) -> bool:
    """Say whether the tensors have legal places without overlap; a place is the bit mask of its elements."""
    if sum(numel for numel, _ in tensors) > shard * num_shards:
        return False
    boundaries = range(0, shard * num_shards + 1, shard or 1)
    places = [
        [
            ((1 << numel) - 1) << offset
            for offset in range(0, shard * num_shards - numel + 1, alignment)
            if all((cut - offset) % unit == 0 for cut in boundaries if offset < cut < offset + numel)
        ]
        for numel, unit in tensors
    ]
    dead: set[tuple[int, int]] = set()

    def place_from(tensor: int, taken: int) -> bool:
        if tensor == len(places):
            return True
        if (tensor, taken) in dead:
            return False
        if any(not mask & taken and place_from(tensor + 1, taken | mask) for mask in places[tensor]):
            return True
        dead.add((tensor, taken))
        return False

    return place_from(0, 0)


@settings(max_examples=300)
@given(tensors=small_tensors, num_shards=st.sampled_from([1, 2, 3, 5]), alignment=st.sampled_from([1, 2, 4]))
def test_small_plans_are_legal_nearly_optimal_and_claim_no_more_than_there_is(
    tensors: list[tuple[Shape, Granularity]], num_shards: int, alignment: int
) -> None:
    shapes, cuts = [shape for shape, _ in tensors], [cut for _, cut in tensors]
    layout = plan(shapes, num_shards, granularity=cuts, alignment_bytes=4 * alignment, itemsize=4)
    assert fault_of(layout) == ""
    optimum = shortest_shard(shapes, cuts, num_shards, alignment)
    # Among 600 random draws like these 566 plans were optimal, and the worst was half as long again.
    assert layout.lower_bound_numel <= optimum * num_shards <= layout.numel <= 2 * optimum * num_shards


ugly_shapes = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([1, 3, 7, 8, 64, 1000, 4097]), st.sampled_from([1, 3, 7, 96, 1152, 4304, 50257])),
        st.tuples(st.sampled_from([1, 3, 7, 1152, 4096])),
        st.sampled_from([(), (0,), (5, 0), (2, 3, 96), (8, 5, 7, 3)]),
    ),
    max_size=24,
)


@settings(max_examples=200)
@given(
    shapes=ugly_shapes,
    num_shards=st.sampled_from([1, 2, 3, 7, 8, 64, 1000, 16384]),
    granularity=granularities,
    alignment_bytes=st.sampled_from([0, 2, 16, 128]),
)
@example(shapes=[], num_shards=3, granularity=Row(), alignment_bytes=16)
@example(shapes=[(1,)] * 5, num_shards=16384, granularity=Row(), alignment_bytes=16)
def test_plans_and_regions_of_ugly_shapes_are_legal_and_hold_every_tensor_once(
    shapes: list[Shape], num_shards: int, granularity: Granularity, alignment_bytes: int
) -> None:
    one = plan(shapes, num_shards, granularity=granularity, alignment_bytes=alignment_bytes, limits=ANYTHING)
    assert fault_of(one) == ""
    assert one.alignment_numel == max(1, alignment_bytes // 2)
    regions = plan_regions(
        shapes,
        num_shards,
        granularity=granularity,
        alignment_bytes=alignment_bytes,
        limits=dataclasses.replace(ANYTHING, split_ratio=0.0, split_bytes=0),
    )
    for region in regions:
        assert fault_of(region.plan) == ""
        assert region.plan.shapes == tuple(shapes[index] for index in region.indices)
        assert list(region.indices) == sorted(region.indices)
    assert sorted(index for region in regions for index in region.indices) == list(range(len(shapes)))
    assert len(regions) <= 3
    assert sum(region.plan.numel for region in regions) <= one.numel


def test_whole_experts_pad_heavily_at_64_shards_and_rows_do_not() -> None:
    experts = [(8, 28672, 4096), (8, 4096, 14336)]
    with pytest.raises(LayoutError, match="blocks of 28672 rows of 4096 in tensor 0"):
        plan(experts, 64, granularity=[Block(28672), Block(4096)])
    assert plan(experts, 64).padding_ratio == 0


def test_a_tensor_kept_whole_is_named_as_binding() -> None:
    with pytest.warns(PaddingWarning, match=r"all 1048576 elements in tensor 1 of shape \(1024, 1024\)"):
        layout = plan([(8, 1024), (1024, 1024)], 2, granularity=[Row(), Whole()])
    assert layout.numel == 2 * 1024 * 1024


@pytest.mark.parametrize("num_shards", [1, 2, 3, 64])
def test_the_order_of_use_is_kept_if_that_needs_no_padding(num_shards: int) -> None:
    offsets = plan(LLAMA, num_shards).offsets
    assert list(offsets) == sorted(offsets)


def test_tensors_are_reordered_where_that_saves_padding() -> None:
    layout = plan([(3,), (4,), (1,)], 2, granularity=Whole(), alignment_bytes=0)
    assert layout.padding_ratio == 0
    assert list(layout.offsets) != sorted(layout.offsets)


def test_tensors_kept_whole_crowd_the_shards() -> None:
    sizes = range(100, 133)
    layout = plan([(size,) for size in sizes], 16, granularity=Whole(), alignment_bytes=0)
    # One of 16 shards gets three of 33 tensors, so it holds at least the three smallest.
    assert 300 * 16 <= layout.lower_bound_numel <= layout.numel == (100 + 101 + 102) * 16
    assert layout.binding.startswith("gaps between tensors")
    assert "each shard holds whole ones" in plan([(24, 4096)], 16).binding


def shard_and_misaligned(shapes: Sequence[Shape], num_shards: int, start_bytes: int) -> tuple[int, int]:
    """Return the shard length, and how many tensors start off 128 bytes, for tensors that start at such multiples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_START_BYTES", start_bytes)
        layout = plan(shapes, num_shards, limits=ANYTHING)
    assert fault_of(layout) == ""
    return layout.shard_numel, sum(offset % 64 != 0 for offset in layout.offsets)


@given(shapes=ugly_shapes, num_shards=st.sampled_from([1, 2, 3, 7, 8, 64]))
def test_starts_at_multiples_of_128_bytes_cost_nothing(shapes: list[Shape], num_shards: int) -> None:
    shard, misaligned = shard_and_misaligned(shapes, num_shards, 128)
    strict_shard, strictly_misaligned = shard_and_misaligned(shapes, num_shards, 16)
    assert shard == strict_shard
    assert misaligned <= strictly_misaligned or shard * num_shards - sum(map(math.prod, shapes)) < 64 * len(shapes)


def test_tensors_start_at_multiples_of_128_bytes_if_possible() -> None:
    shapes = [(3, 24), (9,), (5, 56), (3, 1024)]
    assert shard_and_misaligned(shapes, 2, 16)[1] > 0
    assert shard_and_misaligned(shapes, 2, 128)[1] == 0


def test_equal_tensors_keep_their_order_when_others_move() -> None:
    layout = plan([(3,), (4,), (4,), (1,), (1,)], 3, granularity=Whole(), alignment_bytes=0)
    assert layout.offsets == (0, 5, 10, 3, 4)


def test_looking_ahead_fills_the_gaps_between_widths_in_a_whole_model() -> None:
    shapes = [(50304, 768), *GPT2[1:]]
    assert plan(shapes, 64).gap == 0


def test_equal_input_gives_the_equal_plan() -> None:
    assert plan(GPT2, 48) == plan([list(shape) for shape in GPT2], 48)
    assert plan(GPT2, 48).fingerprint() != plan(GPT2, 64).fingerprint()


def test_alignment_follows_the_item_size() -> None:
    assert [plan([(3, 5)], 2, itemsize=itemsize).shard_numel for itemsize in (1, 2, 4, 8, 16)] == [16, 16, 16, 10, 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_shards": 0}, "num_shards is 0"),
        ({"alignment_bytes": 3}, "alignment of 3 bytes for elements of 2"),
        ({"alignment_bytes": 1}, "alignment of 1 bytes"),
        ({"alignment_bytes": -16}, "alignment of -16 bytes"),
        ({"itemsize": 0}, "elements of 0 bytes"),
        ({"shapes": [(4, -1)]}, r"tensor 0 has shape \(4, -1\)"),
        ({"granularity": [Row(), Row()]}, "2 granularities for 1 tensors"),
        ({"max_regions": 0}, "max_regions is 0"),
    ],
)
def test_invalid_values_are_refused_with_the_expected_ones(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        plan_regions(**{"shapes": [(4, 4)], "num_shards": 2, **arguments})  # type: ignore[arg-type]


def test_half_of_awkward_units_are_proved_optimal_and_the_others_nearly_so() -> None:
    widths = [[96, 384, 1152, 4304, 768], [1024, 4096, 14336], [512, 1536, 2048, 7168], [33, 57, 129, 1000]]
    gaps = []
    generator = random.Random(5)
    for _ in range(200):
        pool = generator.choice(widths)
        matrices = [(generator.choice([8, 64, 200, 1000]), generator.choice(pool)) for _ in range(6)]
        kinds: list[Shape] = [*matrices, *((width,) for width in pool)]
        shapes = [generator.choice(kinds) for _ in range(generator.randint(8, 100))]
        gaps.append(plan(shapes, generator.choice([2, 3, 4, 8, 16, 32, 64, 128]), limits=ANYTHING).gap)
    gaps.sort()
    # Measured over five seeds: 95 to 107 of 200 proved optimal, nine in ten within 0.002, the worst within 0.13.
    assert sum(gap == 0 for gap in gaps) >= 90
    assert gaps[179] < 0.002
    assert gaps[-1] < 0.13


# Ten times what one slow core needs: a search without an end is off by far more.
@pytest.mark.parametrize(
    ("shapes", "seconds"),
    [
        (LLAMA * 11, 0.05),
        (GPT2, 0.05),
        (
            [(rows, width) for rows in range(1, 2001) for width in (96, 384, 768, 1152, 2048, 4096, 4304, 33, 57, 7)],
            3.0,
        ),
        ([*LLAMA, *[(2048, 7168), (2048, 7168), (7168, 2048)] * 6660], 2.5),
    ],
)
@pytest.mark.parametrize("num_shards", [3, 64, 1024])
def test_planning_takes_milliseconds(shapes: list[Shape], seconds: float, num_shards: int) -> None:
    start = time.process_time()
    layout = plan(shapes, num_shards, limits=ANYTHING)
    assert time.process_time() - start < seconds
    assert layout.gap < 0.001
