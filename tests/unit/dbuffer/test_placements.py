"""Placements: accepted combinations, and the shard of each rank."""

import itertools

import pytest
import torch.distributed.tensor

from dbuffer import Flat, Partial, PlacementError, Replicate
from dbuffer.placements import flat_axes, shard_index, validate_placements


def test_replicate_and_partial_are_pytorchs_own() -> None:
    assert Replicate is torch.distributed.tensor.Replicate
    assert Partial is torch.distributed.tensor.Partial


def test_all_flat_placements_are_equal() -> None:
    assert Flat() == Flat()
    assert hash(Flat()) == hash(Flat())


def test_legal_placements_come_back_as_a_tuple() -> None:
    placements = [Replicate(), Partial("sum"), Partial("avg"), Flat()]
    assert validate_placements(placements, 4) == tuple(placements)


@pytest.mark.parametrize("placements", [[], [Flat()], [Flat(), Flat(), Flat()]])
def test_another_number_of_placements_than_axes_is_refused_with_both_numbers(placements: list[Flat]) -> None:
    with pytest.raises(PlacementError, match=f"found {len(placements)} placements .* of 2 axes"):
        validate_placements(placements, 2)


def test_a_tensor_dimension_is_refused_with_a_pointer_to_granularity() -> None:
    with pytest.raises(PlacementError, match=r"axis 1: Shard\(dim=0\).*granularity="):
        validate_placements([Replicate(), torch.distributed.tensor.Shard(0)], 2)


def test_a_class_instead_of_an_instance_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"axis 0: .*Flat.* legal are Replicate\(\), Partial\(op\)"):
        validate_placements([Flat], 1)


def test_a_reduction_that_no_shard_can_finish_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"axis 0: Partial\('max'\).*'sum' and 'avg'"):
        validate_placements([Partial("max")], 1)


def test_the_flat_axes_come_in_mesh_order() -> None:
    assert flat_axes([Flat(), Replicate(), Flat(), Partial()]) == (0, 2)


def test_a_rank_of_a_replicated_mesh_holds_the_only_shard() -> None:
    assert shard_index((), [1, 2], [2, 3]) == 0


def test_on_one_flat_axis_rank_r_holds_shard_r() -> None:
    assert [shard_index((1,), [0, rank], [2, 3]) for rank in range(3)] == [0, 1, 2]


def test_the_last_flat_axis_is_the_major_one() -> None:
    shards = {
        (outer, inner): shard_index((0, 1), [outer, inner], [2, 3])
        for outer, inner in itertools.product(range(2), range(3))
    }
    assert shards == {(0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3, (0, 2): 4, (1, 2): 5}


def test_all_shards_of_three_axes_are_held_by_exactly_one_rank_each() -> None:
    sizes = [2, 3, 5]
    ranks = itertools.product(*map(range, sizes))
    assert sorted(shard_index((0, 1, 2), list(rank), sizes) for rank in ranks) == list(range(30))


def test_a_shard_of_the_major_axis_is_a_run_of_shards_of_the_minor_one() -> None:
    for inner in range(3):
        part = shard_index((1,), [0, inner], [2, 3])
        finer = [shard_index((0, 1), [outer, inner], [2, 3]) for outer in range(2)]
        assert finer == [2 * part, 2 * part + 1]
