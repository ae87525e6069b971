"""Ranks with different groups, meshes and numbers of units train as one plain model does, or are told what differs."""

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
from tests.harness import on_ranks, run_ranks
from tests.harness.models import Stack, inputs, squared
from tests.harness.oracle import shard_layers
from tests.harness.twins import Twins


def distance_to_plain_model(mesh: DeviceMesh, shard: Callable[[nn.Module], None], steps: int = 2) -> float:
    """Train a model on the ranks of a mesh and a plain copy on all of their data; return how far the weights are apart.

    Two steps: the second one gathers weights that the first one's gradients have changed.
    """
    twins = Twins(shard=shard)
    ranks: list[int] = mesh.mesh.flatten().tolist()
    optimizers = twins.optimizers(torch.optim.SGD, lr=0.5)
    for step in range(steps):
        for rank in ranks:
            (squared(twins.plain, rank, step) / len(ranks)).backward()
        squared(twins.model, dist.get_rank(), step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return twins.weights_apart()


def make_uneven_groups(makers: str) -> None:
    """Make groups of some ranks, so that ranks are members of different numbers.

    In one of the two ways that PyTorch knows: it does not itself make groups in one way after the other.
    """
    if makers == "members":
        if dist.get_rank() in (0, 2):
            dist.new_group([0, 2], use_local_synchronization=True)
        return
    dist.new_group([0, 1])
    dist.new_group([0, 3])


STRATEGIES: dict[str, tuple[tuple[int, ...], Placements, bool | int | None]] = {
    "ZeRO-3": ((4,), Placements.optim_grads_params(0), None),
    "ZeRO-1": ((4,), Placements.optim(0), None),
    "HSDP": ((2, 2), Placements.hsdp(0, 1), True),
    "HFSDP on the flattened mesh": ((2, 2), Placements.hfsdp(0, 1), None),
    "parts kept for backward by two neighbours": ((4,), Placements.optim_grads_params(0), 2),
}


def train_after_uneven_groups(makers: str) -> dict[str, float]:
    # PyTorch 2.15 makes no mesh after a group that only its members made.
    meshes = {shape: init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))}
    make_uneven_groups(makers)
    distances = {}
    for name, (shape, placements, reshard) in STRATEGIES.items():
        mesh = meshes[shape]
        options: dict[str, Any] = {"mesh": mesh, "placements": placements, "reshard_after_forward": reshard}
        distances[name] = distance_to_plain_model(mesh, partial(shard_layers, **options))
    return distances


@pytest.fixture(scope="module", params=["members", "all ranks"])
def distances(request: pytest.FixtureRequest) -> list[dict[str, float]]:
    return run_ranks(4, train_after_uneven_groups, request.param)


@pytest.mark.parametrize("name", STRATEGIES)
def test_training_is_right_after_groups_of_some_ranks_were_made(distances: list[dict[str, float]], name: str) -> None:
    for distance in distances:
        assert distance[name] < 1e-6


@on_ranks(4)
def test_stages_with_other_numbers_of_units_and_groups_train_right_alone_and_together() -> None:
    stage = dist.get_rank() // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))["data"]
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": (None, 1)[stage]}
    found = {"stage": distance_to_plain_model(mesh, partial(shard_layers, **options))}
    if stage == 1:
        # More models, a watch and other groups on one stage only.
        model = Stack(nn.Linear(7, 7))
        shard_layers(model, mesh=mesh, placements=Placements.optim_grads(0))
        with Watch(model):
            squared(model, dist.get_rank(), 0).backward()
    world = init_device_mesh("cpu", (4,))
    found["all"] = distance_to_plain_model(world, partial(shard_layers, mesh=world))
    assert found["stage"] < 1e-6
    assert found["all"] < 1e-6


def train_on_a_part() -> str | float:
    mesh = init_device_mesh("cpu", (2,))
    try:
        return distance_to_plain_model(mesh, partial(shard_layers, mesh=mesh))
    except MeshError as error:
        return str(error)


def test_a_rank_outside_of_the_mesh_is_told_so_and_the_others_train_right() -> None:
    first, second, outside = run_ranks(3, train_on_a_part)
    assert isinstance(first, float)
    assert isinstance(second, float)
    assert max(first, second) < 1e-6
    assert "rank 2 is not part of" in str(outside)


@on_ranks(2)
def test_a_mesh_without_names_trains_right_and_one_that_counts_backwards_is_refused() -> None:
    found: dict[str, float | str] = {}
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", shape)
        found[str(shape)] = distance_to_plain_model(mesh, partial(shard_layers, mesh=mesh))
    backwards = DeviceMesh("cpu", [1, 0])
    try:
        fully_shard(nn.Linear(3, 3), backwards)
    except MeshError as error:
        found["backwards"] = str(error)
    rank = dist.get_rank()
    for shape in ("(1, 2)", "(2, 1)"):
        assert float(found[shape]) < 1e-6
    assert f"this rank, {rank}, has place {1 - rank}" in str(found["backwards"])
    assert "ascending order" in str(found["backwards"])


def rank_zero_looks_first(placements: Placements) -> float:
    """One rank runs the model alone before training, which needs no other rank where weights rest whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(model: nn.Module) -> None:
        shard_layers(model, mesh=mesh, placements=placements)
        if dist.get_rank() == 0:
            with torch.no_grad():
                assert torch.isfinite(model(inputs(0, 9))).all()

    return distance_to_plain_model(mesh, shard)


@on_ranks(2)
def test_one_rank_may_run_a_model_whose_weights_rest_whole_before_the_others_come() -> None:
    found = [rank_zero_looks_first(placements) for placements in (Placements.no_shard(0), Placements.optim_grads(0))]
    assert max(found) < 1e-6
