"""Allowed cuts of a tensor between shards, compared with counting elements one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbuffer.errors import LayoutError
from dbuffer.planner.granularity import (
    Block,
    Element,
    Granularity,
    Row,
    Whole,
    aligned_sizes,
    granularity_per_tensor,
    next_offset,
    row_numel,
    two_piece_shard,
)


def is_legal(offset: int, numel: int, unit: int, shard: int) -> bool:
    """Return whether every boundary strictly inside the tensor lies between units, by checking each inner position."""
    return all(cut % unit == 0 for cut in range(1, numel) if (offset + cut) % shard == 0)


@pytest.mark.parametrize(
    ("granularity", "shape", "unit"),
    [
        (Element(), (8, 28672, 4096), 1),
        (Row(), (8, 28672, 4096), 4096),
        (Row(), (4304,), 1),
        (Row(), (), 1),
        (Row(), (5, 0), 0),
        (Block(128), (4096, 14336), 128 * 14336),
        (Block(3), (7,), 3),
        (Whole(), (3, 5, 7), 105),
        (Whole(), (), 1),
    ],
)
def test_a_unit_has_the_elements_its_granularity_names(
    granularity: Granularity, shape: tuple[int, ...], unit: int
) -> None:
    assert granularity.unit_numel(shape) == unit


def test_an_expert_weight_has_rows_of_its_last_dim_rather_than_whole_experts() -> None:
    assert row_numel((8, 28672, 4096)) == 4096


@pytest.mark.parametrize("rows", [0, -1, 1.5, True, "2"])
def test_a_block_without_a_positive_integer_of_rows_is_refused(rows: object) -> None:
    with pytest.raises(LayoutError, match="integer >= 1"):
        Block(rows)  # type: ignore[arg-type]


def test_granularities_with_equal_rows_are_equal_and_hash_alike() -> None:
    assert {Block(4), Block(4), Row(), Row()} == {Block(4), Row()}
    assert Block(4) != Block(5)


def test_one_granularity_stands_for_all_tensors() -> None:
    assert granularity_per_tensor(Row(), 3) == (Row(), Row(), Row())


@pytest.mark.parametrize(
    ("granularity", "message"),
    [
        ([Row()], "1 granularities for 2 tensors"),
        ([Row(), Row], "granularity of tensor 1"),
        (Row, "give Element"),
        (7, "give Element"),
    ],
)
def test_a_list_that_does_not_name_one_granularity_per_tensor_is_refused(granularity: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        granularity_per_tensor(granularity, 2)  # type: ignore[arg-type]


def test_alignment_widens_units_to_a_common_multiple_and_rounds_tensors_up() -> None:
    sizes = aligned_sizes([(10, 12), (3,), (2, 50257), (0, 4)], [Row(), Row(), Row(), Row()], alignment=8)
    assert sizes == [(15, 3), (1, 1), (12565, 12565), (0, 1)]


@given(
    cursor=st.integers(0, 60),
    numel=st.integers(1, 40),
    unit=st.integers(1, 40),
    shard=st.integers(1, 40),
)
def test_the_next_offset_is_the_first_legal_one(cursor: int, numel: int, unit: int, shard: int) -> None:
    unit = min(unit, numel)
    if shard < two_piece_shard(numel, unit) and shard % unit:
        return
    expected = next(offset for offset in range(cursor, cursor + 200) if is_legal(offset, numel, unit, shard))
    assert next_offset(cursor, numel, unit, shard) == expected


@given(numel=st.integers(1, 40), unit=st.integers(1, 40), shard=st.integers(1, 50))
def test_a_shard_below_the_two_piece_length_must_be_a_multiple_of_the_unit(numel: int, unit: int, shard: int) -> None:
    unit = min(unit, numel)
    has_a_legal_offset = any(is_legal(offset, numel, unit, shard) for offset in range(shard))
    assert has_a_legal_offset == (shard >= two_piece_shard(numel, unit) or shard % unit == 0)
