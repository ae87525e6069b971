"""The null group: any world in one process, and memory that no collective touches."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from benchmarks.engines import world_mesh
from benchmarks.null_group import NullGroup, null_world


@pytest.mark.parametrize("num_ranks", [1, 3, 1024])
def test_this_process_is_one_rank_of_a_world_of_any_size(num_ranks: int) -> None:
    with null_world(num_ranks, rank=num_ranks - 1):
        assert (dist.get_world_size(), dist.get_rank()) == (num_ranks, num_ranks - 1)
        assert isinstance(dist.group.WORLD, NullGroup)
    assert not dist.is_initialized()


def test_no_collective_writes() -> None:
    shard, whole = torch.full((3,), 1.0), torch.full((12,), 7.0)
    with null_world(4):
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        gather(whole, shard)
        scatter(shard, whole)
        dist.all_reduce(shard)
        dist.broadcast(shard, 1)
        dist.all_gather(list(whole.split(3)), shard)
        dist.reduce_scatter(shard, list(whole.split(3)))
        dist.barrier()
    assert shard.tolist() == [1.0] * 3
    assert whole.tolist() == [7.0] * 12


def test_functional_collectives_find_the_group() -> None:
    with null_world(4):
        whole = DTensor.from_local(torch.ones(2, 3), world_mesh(), (Shard(0),), run_check=False).full_tensor()
    assert whole.shape == (8, 3)
