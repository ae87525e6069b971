"""Checkpoints of a model that lies on some ranks of the job: the ranks of ``process_group`` save and load."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp import (
    CheckpointError,
    CheckpointSeries,
    ConfigError,
    full_state_dict,
    load_checkpoint,
    reshard_,
    save_checkpoint,
)
from megatron_fsdp.checkpoint.ranks import checkpoint_ranks
from tests.harness import on_ranks
from tests.harness.models import make_model
from tests.harness.oracle import sharded, token_loss

TRAINERS = [1, 2]


def trained(mesh: DeviceMesh, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = sharded(make_model(), "optim_grads_params", mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    token_loss(model, dist.get_rank(), 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks(3)
def test_trainers_save_and_load_beside_a_rank_that_does_something_else(asynchronous: bool, tmp_path: Path) -> None:
    if dist.get_rank() not in TRAINERS:
        return
    group = dist.new_group(TRAINERS, use_local_synchronization=True)
    mesh = DeviceMesh("cpu", TRAINERS)
    model, optimizer = trained(mesh, 0)
    handle = save_checkpoint(model, optimizer, tmp_path / "a", process_group=group, asynchronous=asynchronous)
    other, loaded = trained(mesh, 1)
    load_checkpoint(other, loaded, tmp_path / "a", process_group=group)
    assert handle.done
    wanted, found = (full_state_dict(each, process_group=group) for each in (model, other))
    assert bool(found) == (dist.get_rank() == TRAINERS[0])
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name
    losses = [token_loss(each, dist.get_rank(), 1) for each in (model, other)]
    assert losses[0].item() == losses[1].item()
    series = CheckpointSeries(tmp_path / "series", process_group=group)
    series.save(other, loaded, step=7)
    latest = series.load(model, optimizer)
    assert latest is not None
    assert latest.step == 7


def fail_on_rank_2() -> None:
    if dist.get_rank() == 2:
        raise KeyError("words")


@on_ranks(3)
def test_a_failure_names_the_rank_by_its_number_in_the_job() -> None:
    if dist.get_rank() not in TRAINERS:
        return
    ranks = checkpoint_ranks("calls save_checkpoint", dist.new_group(TRAINERS, use_local_synchronization=True))
    with pytest.raises(CheckpointError, match="reading words failed on rank 2: KeyError"):
        ranks.check("reading words", fail_on_rank_2)


@on_ranks(3)
def test_a_rank_outside_of_the_group_is_refused(tmp_path: Path) -> None:
    group = dist.new_group(TRAINERS)
    if dist.get_rank() in TRAINERS:
        return
    with pytest.raises(ConfigError, match="a process_group that it is not in"):
        save_checkpoint(make_model(), None, tmp_path / "a", process_group=group)


@on_ranks(3)
def test_after_reshard_to_fewer_ranks_these_save_and_all_together_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained(DeviceMesh("cpu", [0, 1, 2]), 0)
    reshard_(model, DeviceMesh("cpu", TRAINERS), optimizer=optimizer)
    with pytest.raises(CheckpointError, match=r"rank 0: reshard_ moved the model.*process_group="):
        save_checkpoint(model, optimizer, tmp_path / "all")
    if dist.get_rank() in TRAINERS:
        group = dist.new_group(TRAINERS, use_local_synchronization=True)
        save_checkpoint(model, optimizer, tmp_path / "two", process_group=group)
        load_checkpoint(model, optimizer, tmp_path / "two", process_group=group)
        token_loss(model, dist.get_rank(), 1).backward()
