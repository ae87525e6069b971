"""What a plan answers, against a flat buffer written out element by element, and what ``check_plan`` refuses."""

import dataclasses
import itertools
import math
import pickle
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbuffer.errors import LayoutError, PaddingWarning
from dbuffer.planner.granularity import Block, Element, Granularity, Row, Whole
from dbuffer.planner.plan import PaddingLimits, Plan, Region, check_padding, check_plan
from dbuffer.planner.regions import plan

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=7)


@st.composite
def element_plans(draw: st.DrawFn) -> Plan:
    """Draw a legal plan with gaps, shuffled tensors, short and empty tensors, made without the planner."""
    sizes = draw(shapes)
    alignment = draw(st.sampled_from([1, 1, 2, 3]))
    offsets, end = [0] * len(sizes), 0
    for tensor in draw(st.permutations(range(len(sizes)))):
        start = -(-end // alignment) * alignment + alignment * draw(st.integers(0, 2))
        offsets[tensor], end = start, start + math.prod(sizes[tensor])
    num_shards = draw(st.integers(1, 9))
    shard = -(-end // (num_shards * alignment)) * alignment
    return Plan(tuple(sizes), (Element(),) * len(sizes), num_shards, tuple(offsets), shard, alignment)


def written_out(layout: Plan) -> list[tuple[int, int] | None]:
    """Return for each element of the buffer which element of which tensor it holds, None for padding."""
    buffer: list[tuple[int, int] | None] = [None] * layout.numel
    for tensor, shape in enumerate(layout.shapes):
        for element in range(math.prod(shape)):
            assert buffer[layout.offsets[tensor] + element] is None
            buffer[layout.offsets[tensor] + element] = (tensor, element)
    return buffer


ROWS = Plan(((4, 3), (5,)), (Row(), Row()), 3, (0, 12), 6, 1, 17, "rows of 3 in tensor 0")


@given(layout=element_plans())
def test_owned_elements_are_those_of_the_buffer_written_out(layout: Plan) -> None:
    buffer = written_out(layout)
    for shard in range(layout.num_shards):
        local = buffer[shard * layout.shard_numel : (shard + 1) * layout.shard_numel]
        for tensor in range(len(layout.shapes)):
            held = [content[1] for content in local if content and content[0] == tensor]
            assert list(layout.owned_elements(tensor, shard)) == held


@given(layout=element_plans())
def test_owned_elements_follow_each_other_over_the_shards(layout: Plan) -> None:
    for tensor in range(len(layout.shapes)):
        ranges = [layout.owned_elements(tensor, shard) for shard in range(layout.num_shards)]
        assert ranges[0].start == 0
        assert ranges[-1].stop == layout.tensor_numel(tensor)
        assert all(left.stop == right.start for left, right in itertools.pairwise(ranges))


@given(sizes=shapes, num_shards=st.integers(1, 9), granularity=st.sampled_from([Row(), Block(2), Whole()]))
def test_owned_rows_over_all_shards_partition_the_rows(
    sizes: list[tuple[int, ...]], num_shards: int, granularity: Granularity
) -> None:
    layout = plan(sizes, num_shards, granularity=granularity, alignment_bytes=4)
    for tensor in range(len(sizes)):
        rows = [row for shard in range(num_shards) for row in layout.owned_rows(tensor, shard)]
        assert rows == list(range(layout.num_rows(tensor)))


@given(sizes=shapes, num_shards=st.integers(1, 9))
def test_a_row_is_never_cut(sizes: list[tuple[int, ...]], num_shards: int) -> None:
    layout = plan(sizes, num_shards, alignment_bytes=4)
    shard_of = {
        content: position // layout.shard_numel for position, content in enumerate(written_out(layout)) if content
    }
    for tensor, shape in enumerate(sizes):
        width = shape[-1] if len(shape) >= 2 else 1
        for start in range(0, math.prod(shape), width or 1):
            assert len({shard_of[tensor, start + element] for element in range(width)}) == 1


@pytest.mark.parametrize(
    ("shape", "rows", "width"), [((), 1, 1), ((7,), 7, 1), ((4, 3), 4, 3), ((2, 5, 3), 10, 3), ((5, 0), 5, 0)]
)
def test_rows_are_the_flattened_leading_dims(shape: tuple[int, ...], rows: int, width: int) -> None:
    layout = plan([shape], 2)
    assert (layout.num_rows(0), layout.row_numel(0)) == (rows, width)


def test_rows_without_elements_belong_to_shard_0() -> None:
    layout = plan([(5, 0), (2, 2)], 2, alignment_bytes=0)
    assert [list(layout.owned_rows(0, shard)) for shard in range(2)] == [[0, 1, 2, 3, 4], []]


def test_a_shard_of_part_of_a_row_has_no_row_range() -> None:
    layout = Plan(((2, 3),), (Element(),), 3, (0,), 2)
    assert list(layout.owned_elements(0, 1)) == [2, 3]
    with pytest.raises(LayoutError, match="Use owned_elements"):
        layout.owned_rows(0, 1)


def test_a_trillion_shards_are_answered_without_a_list_per_shard() -> None:
    layout = Plan(((10**12, 4),), (Row(),), 10**12, (0,), 4)
    assert layout.owned_rows(0, 10**12 - 1) == range(10**12 - 1, 10**12)


@pytest.mark.parametrize(("tensor", "shard"), [(2, 0), (-1, 0), (0, 3), (0, -1)])
@pytest.mark.parametrize("query", ["owned_rows", "owned_elements"])
def test_a_tensor_or_shard_out_of_range_is_an_index_error(query: str, tensor: int, shard: int) -> None:
    with pytest.raises(IndexError, match="out of range"):
        getattr(ROWS, query)(tensor, shard)


def test_sizes_add_up() -> None:
    assert (ROWS.numel, ROWS.data_numel, ROWS.tensor_numel(0), ROWS.tensor_numel(1)) == (18, 17, 12, 5)
    assert ROWS.padding_ratio == pytest.approx(1 / 17)
    assert ROWS.gap == pytest.approx(1 / 17)


def test_a_plan_without_elements_has_no_padding_and_no_gap() -> None:
    empty = plan([(0,), (3, 0)], 4)
    assert (empty.numel, empty.padding_ratio, empty.gap) == (0, 0.0, 0.0)
    assert list(empty.owned_elements(0, 3)) == []


def test_the_lower_bound_is_never_below_the_data() -> None:
    assert Plan(((4, 3),), (Row(),), 2, (0,), 6).lower_bound_numel == 12


def test_equality_and_hash_ignore_how_good_the_layout_was_proved_to_be() -> None:
    other = dataclasses.replace(ROWS, lower_bound_numel=18, binding="another story")
    assert other == ROWS
    assert hash(other) == hash(ROWS)
    assert other.fingerprint() == ROWS.fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": (6, 0)},
        {"shard_numel": 7},
        {"num_shards": 4},
        {"granularities": (Row(), Whole())},
        {"shapes": ((3, 4), (5,))},
        {"alignment_numel": 2},
    ],
)
def test_every_part_of_the_layout_changes_the_fingerprint(change: dict[str, object]) -> None:
    other = dataclasses.replace(ROWS, **change)  # type: ignore[arg-type]
    assert other != ROWS
    assert other.fingerprint() != ROWS.fingerprint()


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    assert ROWS.fingerprint() == "075630601fdc48a1"


@pytest.mark.parametrize(("padding", "itemsize", "draws"), [(10, 100, False), (11, 10, True), (11, 9, False)])
def test_the_fallback_is_drawn_by_padding_beyond_its_ratio_and_its_bytes(
    padding: int, itemsize: int, draws: bool
) -> None:
    limits = PaddingLimits(relax_ratio=0.1, relax_bytes=100)
    assert limits.is_relaxed_from(padding, 100, itemsize) == draws


def test_shapes_and_offsets_in_other_sequences_make_the_same_plan() -> None:
    other = Plan(([4, 3], torch.Size([5])), (Row(), Row()), 3, [0, 12], 6)  # type: ignore[arg-type]
    assert other == ROWS
    assert other.fingerprint() == ROWS.fingerprint()


def test_a_plan_survives_pickling_and_cannot_be_changed() -> None:
    assert pickle.loads(pickle.dumps(ROWS)) == ROWS
    with pytest.raises(dataclasses.FrozenInstanceError):
        ROWS.shard_numel = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": (0, 14)}, "leaves the buffer"),
        ({"offsets": (-1, 12)}, "leaves the buffer"),
        ({"offsets": (0, 11)}, "tensor 1 .* overlaps tensor 0"),
        ({"offsets": (1, 13)}, "is cut after 5 elements"),
        ({"shard_numel": 7}, "is cut after 7 elements"),
        ({"granularities": (Whole(), Row())}, "is cut after 6 elements"),
        ({"granularities": (Block(4), Row())}, "is cut after 6 elements"),
        ({"alignment_numel": 4}, "shards of 6 are not aligned"),
        ({"alignment_numel": 2, "offsets": (0, 13)}, "not aligned"),
        ({"offsets": (0,)}, "1 offsets for 2 tensors"),
        ({"granularities": (Row(),)}, "1 granularities for 2 tensors"),
        ({"num_shards": 0}, "at least one shard"),
        ({"shapes": ((4, 3), (-5,))}, "negative dim"),
        ({"lower_bound_numel": 19}, "below the claimed lower bound"),
    ],
)
def test_check_plan_names_the_rule_that_is_broken(change: dict[str, object], message: str) -> None:
    check_plan(ROWS)
    with pytest.raises(LayoutError, match=message):
        check_plan(dataclasses.replace(ROWS, **change))  # type: ignore[arg-type]


def test_check_plan_sees_an_illegal_second_cut_behind_a_legal_first_one() -> None:
    with pytest.raises(LayoutError, match="is cut after 8 elements"):
        check_plan(Plan(((5, 3),), (Row(),), 4, (2,), 5))


@given(layout=element_plans())
def test_check_plan_accepts_every_layout_of_elements_that_do_not_overlap(layout: Plan) -> None:
    check_plan(layout)


def padded(data: int, numel: int) -> tuple[Region]:
    return (Region((0,), Plan(((data,),), (Row(),), 1, (0,), numel, binding="rows of 7")),)


def test_padding_within_the_limits_is_silent_and_beyond_them_warns_then_refuses() -> None:
    limits = PaddingLimits(warn_ratio=0.5, warn_bytes=100, refuse_ratio=2.0, refuse_bytes=400)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_padding(padded(100, 150), limits, itemsize=2)
        check_padding(padded(10, 60), limits, itemsize=2)
    with pytest.warns(PaddingWarning, match=r"1.51x their data.*rows of 7"):
        check_padding(padded(100, 151), limits, itemsize=2)
    with pytest.warns(PaddingWarning, match="3.00x"):
        check_padding(padded(100, 300), limits, itemsize=2)
    with pytest.raises(LayoutError, match=r"3.01x their data.*rows of 7.*replicate it"):
        check_padding(padded(100, 301), limits, itemsize=2)
