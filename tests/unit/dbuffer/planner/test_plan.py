"""The queries of a plan, compared with a flat buffer written out element by element."""

import dataclasses
import math
import pickle
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbuffer.errors import LayoutError, PaddingWarning
from dbuffer.planner.granularity import Block, Element, Row, Whole
from dbuffer.planner.plan import PaddingLimits, Plan, Region, check_padding
from dbuffer.planner.regions import plan
from tests.harness.plans import fault_of

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
    """Return for each element of the buffer its tensor and position there, None for padding."""
    buffer: list[tuple[int, int] | None] = [None] * layout.numel
    for tensor, shape in enumerate(layout.shapes):
        for element in range(math.prod(shape)):
            assert buffer[layout.offsets[tensor] + element] is None
            buffer[layout.offsets[tensor] + element] = (tensor, element)
    return buffer


ROWS = Plan(((4, 3), (5,)), (Row(), Row()), 3, (0, 12), 6, 1, 17, "rows of 3 in tensor 0")


@given(sizes=shapes, num_shards=st.integers(1, 9))
def test_shards_store_each_row_once_and_in_order(sizes: list[tuple[int, ...]], num_shards: int) -> None:
    layout = plan(sizes, num_shards, alignment_bytes=4)
    for tensor, shape in enumerate(sizes):
        owned = [layout.owned_rows(tensor, shard) for shard in range(num_shards)]
        rows = math.prod(shape[:-1] if len(shape) >= 2 else shape)
        assert [row for rows in owned for row in rows] == list(range(rows))
        for shard, rows_of_shard in enumerate(owned):
            for row in rows_of_shard if math.prod(shape) else ():
                position = layout.offsets[tensor] + row * (shape[-1] if len(shape) >= 2 else 1)
                assert position // layout.shard_numel == shard


def test_rows_of_a_shard_that_has_a_part_of_one_or_does_not_exist_are_refused() -> None:
    layout = plan([(2, 3)], 4, granularity=Element(), alignment_bytes=4, itemsize=4)
    with pytest.raises(LayoutError, match=r"rows have 3 elements"):
        layout.owned_rows(0, 0)
    for tensor, shard in ((1, 0), (0, 4), (-1, 0), (0, -1)):
        with pytest.raises(IndexError):
            layout.owned_rows(tensor, shard)


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


def test_sizes_add_up() -> None:
    assert (ROWS.numel, ROWS.data_numel, ROWS.tensor_numel(0), ROWS.tensor_numel(1)) == (18, 17, 12, 5)
    assert ROWS.padding_ratio == pytest.approx(1 / 17)
    assert ROWS.gap == pytest.approx(1 / 17)


def test_a_plan_without_elements_has_no_padding_and_no_gap() -> None:
    empty = plan([(0,), (3, 0)], 4)
    assert (empty.numel, empty.padding_ratio, empty.gap) == (0, 0.0, 0.0)


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
    ("change", "fault"),
    [
        ({"offsets": (0, 14)}, "leaves"),
        ({"offsets": (-1, 12)}, "leaves"),
        ({"offsets": (0, 11)}, "tensor 1 overlaps"),
        ({"offsets": (1, 13)}, "tensor 0 is cut"),
        ({"shard_numel": 7}, "is cut"),
        ({"granularities": (Whole(), Row())}, "is cut"),
        ({"granularities": (Block(4), Row())}, "is cut"),
        ({"alignment_numel": 4}, "alignment"),
        ({"alignment_numel": 2, "offsets": (0, 13)}, "alignment"),
        ({"offsets": (0,)}, "sizes"),
        ({"num_shards": 0}, "sizes"),
        ({"lower_bound_numel": 19}, "claim"),
        # A legal first cut, an illegal second one.
        ({"shapes": ((5, 3),), "granularities": (Row(),), "num_shards": 4, "offsets": (2,), "shard_numel": 5}, "cut"),
    ],
)
def test_the_oracle_finds_each_rule_that_is_broken(change: dict[str, object], fault: str) -> None:
    assert fault_of(ROWS) == ""
    assert fault in fault_of(dataclasses.replace(ROWS, **change))  # type: ignore[arg-type]


@given(layout=element_plans())
def test_the_oracle_accepts_every_layout_of_elements_that_do_not_overlap(layout: Plan) -> None:
    assert fault_of(layout) == ""


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
