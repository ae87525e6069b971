"""``fully_shard`` and ``Watch`` in jobs whose ranks meet in other stores than torchrun's, or in none."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_fsdp import Watch, fully_shard
from megatron_fsdp.checks import rendezvous
from tests.harness import on_ranks

TIMES = 2


def train(model: nn.Module) -> None:
    with Watch(model):
        for _ in range(TIMES):
            model(torch.ones(2, 5)).sum().backward()


@on_ranks(2)
def test_a_rank_may_come_late_to_a_rendezvous_in_a_file(tmp_path: Path) -> None:
    path = os.fspath(tmp_path / "store")
    rank = dist.get_rank()
    # The other rank may still be connecting to this one.
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    store = dist.distributed_c10d._get_default_store()
    look = rendezvous._Rendezvous.look_for_ended

    def tell_and_look(one: rendezvous._Rendezvous) -> None:
        store.set("the first has looked", "")
        look(one)

    model = nn.Linear(5, 3)
    # With such a long interval the store's own wait replaces the looks.
    looks = mock.patch.object(rendezvous._Rendezvous, "look_for_ended", tell_and_look)
    with mock.patch.object(rendezvous, "_LOOK_S", 0.02), looks:
        if rank == 1:
            store.wait(["the first has looked"])
        fully_shard(model)
    train(model)
    assert float(model.weight.grad.full_tensor().sum()) == TIMES * 30.0


@pytest.mark.parametrize("backend", ["fake", "cpu:fake", "cpu:fake,cuda:fake"])
@pytest.mark.parametrize("num_axes", [1, 2])
@on_ranks(1)
def test_a_job_of_fake_ranks_needs_no_rendezvous(backend: str, num_axes: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=4)
    model = nn.Linear(5, 3)
    fully_shard(model, init_device_mesh("cpu", (4,) if num_axes == 1 else (2, 2)))
    train(model)
    assert model.weight.grad.shape == (3, 5)


@on_ranks(3)
def test_the_store_keeps_the_keys_of_the_last_rendezvous_alone() -> None:
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for _ in range(2):
        for _ in range(5):
            rendezvous.meet((0, 1, 2), "comes", ["with a detail"])
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    assert counts[0] == counts[1]
