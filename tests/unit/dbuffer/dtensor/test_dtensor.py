"""Sharded tensors as DTensors: PyTorch's own tools see the true rows of every rank."""

import copy
import itertools
import pickle
from collections.abc import Callable

import pytest
from torch.distributed.tensor import Replicate, Shard

from dbuffer import RaggedShard
from dbuffer.dtensor.flat_dtensor import FlatRows


def rows_of_all(offset: int, shard: int, row: int, num_rows: int, num_ranks: int) -> list[range]:
    placement = RaggedShard(FlatRows(offset, shard, row, num_rows))
    return [placement.rows_of(rank) for rank in range(num_ranks)]


# ---------------------------------------------------------------- the placement alone


def test_rows_follow_the_boundaries_of_the_flat_buffer() -> None:
    assert rows_of_all(offset=6, shard=12, row=3, num_rows=5, num_ranks=3) == [range(2), range(2, 5), range(5, 5)]


def test_a_tensor_beyond_a_shard_leaves_that_rank_without_rows() -> None:
    assert rows_of_all(offset=24, shard=12, row=3, num_rows=4, num_ranks=4) == [
        range(0),
        range(0),
        range(4),
        range(4, 4),
    ]


def test_rows_of_all_ranks_follow_each_other_without_gap_or_overlap() -> None:
    for offset, row, num_rows in itertools.product((0, 4, 12, 20), (1, 2, 4), (1, 2, 5)):
        flat = [row for part in rows_of_all(offset, 12, row, num_rows, 5) for row in part]
        assert flat == list(range(num_rows))


def test_a_flattened_mesh_counts_shards_with_its_last_axis_as_the_major_one() -> None:
    placement = RaggedShard(FlatRows(0, 2, 1, 12), axis_sizes=(2, 3))
    # Ranks (outer, inner): (0, 0), (0, 1), (0, 2), (1, 0), ... hold shards 0, 2, 4, 1, 3, 5.
    assert [placement.rows_of(rank).start // 2 for rank in range(6)] == [0, 2, 4, 1, 3, 5]


def test_a_flat_placement_equals_a_plain_shard_of_the_first_dimension_only() -> None:
    placement = RaggedShard(FlatRows(0, 6, 3, 4))
    assert placement == Shard(0)
    assert Shard(0) == placement
    assert placement != Shard(1)
    assert placement != Replicate()


def test_two_of_them_are_equal_when_their_rows_are() -> None:
    rows = FlatRows(0, 6, 3, 4)
    assert RaggedShard(rows) == RaggedShard(FlatRows(0, 6, 3, 4))
    assert RaggedShard(rows) != RaggedShard(FlatRows(3, 6, 3, 4))
    assert RaggedShard(rows) != RaggedShard(rows, (2, 3))


def test_the_hash_tells_layouts_apart() -> None:
    hashes = {hash(RaggedShard(FlatRows(3 * offset, 6, 3, 4))) for offset in range(20)}
    assert len(hashes) == 20


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies_and_pickles_keep_the_rows(duplicate: Callable[[RaggedShard], RaggedShard]) -> None:
    placement = RaggedShard(FlatRows(6, 12, 3, 5), (2, 3))
    assert duplicate(placement) == placement
    assert duplicate(placement).rows_of(1) == placement.rows_of(1)
