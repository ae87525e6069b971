"""Ranks with different groups, meshes and numbers of units train like one plain model, or raise a named error."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dbuffer import MeshError
from megatron_fsdp import Placements, Watch, fully_shard
from tests.harness import on_ranks
from tests.harness.models import Stack, inputs, squared
from tests.harness.oracle import sharded
from tests.harness.twins import Twins


def distance_to_plain_model(mesh: DeviceMesh, shard: Callable[[nn.Module], None], steps: int = 2) -> float:
    """Train a model on the ranks of a mesh and a plain copy on all of their data; return the distance of their weights.

    Two steps: the second one gathers weights that the first one's gradients have changed.
    """
    twins = Twins(shard=shard)
    ranks: list[int] = mesh.mesh.flatten().tolist()
    optimizers = twins.optimizers(torch.optim.SGD, lr=0.5)
    for step in range(steps):
        for rank in ranks:
            (squared(twins.plain, rank, step) / len(ranks)).backward()
        squared(twins.model, dist.get_rank(), step).backward()
        twins.step(optimizers)
    return twins.weights_apart()


STRATEGIES: dict[str, tuple[tuple[int, ...], Placements, bool | int | None]] = {
    "ZeRO-3": ((4,), Placements.optim_grads_params(0), None),
    "ZeRO-1": ((4,), Placements.optim(0), None),
    "HSDP": ((2, 2), Placements.hsdp(0, 1), True),
    "HFSDP on the flattened mesh": ((2, 2), Placements.hfsdp(0, 1), None),
    "parts kept for backward by two neighbours": ((4,), Placements.optim_grads_params(0), 2),
}


@on_ranks(4)
def test_training_is_right_after_some_ranks_made_a_group() -> None:
    # PyTorch 2.15 makes no mesh after a group that only its members created. Random uses cover groups that all ranks
    # make.
    shapes: tuple[tuple[int, ...], ...] = ((4,), (2, 2))
    meshes = {shape: init_device_mesh("cpu", shape) for shape in shapes}
    if dist.get_rank() in (0, 2):
        dist.new_group([0, 2], use_local_synchronization=True)
    distances = {}
    for name, (shape, placements, reshard) in STRATEGIES.items():
        mesh = meshes[shape]
        options: dict[str, Any] = {"mesh": mesh, "placements": placements, "reshard_after_forward": reshard}
        distances[name] = distance_to_plain_model(mesh, partial(sharded, **options))
    assert max(distances.values()) < 1e-6, distances


@on_ranks(4)
def test_stages_with_different_numbers_of_units_and_groups_train_together() -> None:
    stage = dist.get_rank() // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))["data"]
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": (None, 1)[stage]}
    assert distance_to_plain_model(mesh, partial(sharded, **options)) < 1e-6
    if stage == 1:
        # One stage has more models, a watch and other groups.
        model = sharded(Stack(nn.Linear(7, 7)), mesh=mesh, placements=Placements.optim_grads(0))
        with Watch(model):
            squared(model, dist.get_rank(), 0).backward()
    world = init_device_mesh("cpu", (4,))
    assert distance_to_plain_model(world, partial(sharded, mesh=world)) < 1e-6


@on_ranks(3)
def test_a_rank_outside_of_the_mesh_raises_and_the_others_train_right() -> None:
    mesh = init_device_mesh("cpu", (2,))
    if dist.get_rank() == 2:
        with pytest.raises(MeshError, match="rank 2 is not part of"):
            distance_to_plain_model(mesh, partial(sharded, mesh=mesh))
    else:
        assert distance_to_plain_model(mesh, partial(sharded, mesh=mesh)) < 1e-6


@on_ranks(2)
def test_a_mesh_without_names_trains_right_and_one_that_counts_backwards_is_refused() -> None:
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", shape)
        assert distance_to_plain_model(mesh, partial(sharded, mesh=mesh)) < 1e-6
    rank = dist.get_rank()
    with pytest.raises(MeshError, match=rf"this rank, {rank}, has place {1 - rank}.*ascending order"):
        fully_shard(nn.Linear(3, 3), DeviceMesh("cpu", [1, 0]))


def rank_zero_looks_first(placements: Placements) -> float:
    """Run the model on one rank alone before training, which needs no other rank if weights are whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(model: nn.Module) -> None:
        sharded(model, mesh=mesh, placements=placements)
        if dist.get_rank() == 0:
            with torch.no_grad():
                assert torch.isfinite(model(inputs(0, 9))).all()

    return distance_to_plain_model(mesh, shard)


@on_ranks(2)
def test_one_rank_may_run_a_model_with_unsharded_weights_before_the_others() -> None:
    found = [rank_zero_looks_first(placements) for placements in (Placements.no_shard(0), Placements.optim_grads(0))]
    assert max(found) < 1e-6
