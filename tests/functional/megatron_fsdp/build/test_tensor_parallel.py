"""Parameters that are already DTensors over a tensor-parallel axis are also sharded over data-parallel axes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_fsdp import (
    DataParallelMeshDims,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import WIDTH, Made, inputs
from tests.harness.oracle import differing, whole_state
from tests.harness.twins import sharded

MESHES = {
    "dp2 tp2": ((2, 2), ("dp", "tp")),
    "dp1 tp2": ((1, 2), ("dp", "tp")),
    "dp4 tp1": ((4, 1), ("dp", "tp")),
    "hsdp, tp1": ((2, 2, 1), ("outer", "dp", "tp")),
    "hsdp of one replica, tp2": ((1, 2, 2), ("outer", "dp", "tp")),
}
CASES = [
    ("dp2 tp2", "optim_grads_params"), ("dp2 tp2", "no_shard"), ("dp2 tp2", "optim"), ("dp2 tp2", "optim_grads"),
    ("dp1 tp2", "optim_grads_params"), ("dp4 tp1", "optim_grads_params"), ("hsdp, tp1", "hsdp"),
    ("hsdp of one replica, tp2", "hfsdp"),
]  # fmt: skip


def feedforward() -> nn.Module:
    """Return a block whose first layer is cut by columns and whose second by rows."""
    return Made(
        lambda m, x: x + m.down(torch.tanh(m.up(m.norm(x)))),
        norm=nn.LayerNorm(WIDTH), up=nn.Linear(WIDTH, 10), down=nn.Linear(10, WIDTH),
    )  # fmt: skip


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(feedforward(), feedforward())


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.children():
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def made(mesh: DeviceMesh, strategy: str) -> Any:
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    model = build()
    parallelize(model, mesh)
    return sharded(model, strategy, mesh=mesh[names])


def loss(model: nn.Module, data_rank: int, step: int) -> torch.Tensor:
    return model(inputs(data_rank, step)).square().mean()


def train(model: nn.Module, data_rank: int, steps: range) -> list[float]:
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    norms = []
    for step in steps:
        for index in range(2):
            with microbatch(model, index == 1):
                (loss(model, data_rank, 2 * step + index) / 2).backward()
        norms.append(clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def train_whole(num_data_ranks: int, steps: range) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in steps:
        for index in range(2):
            for rank in range(num_data_ranks):
                (loss(model, rank, 2 * step + index) / 2 / num_data_ranks).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(model), norms


def data_rank_in(mesh: DeviceMesh) -> int:
    coordinate, rank = mesh.get_coordinate(), 0
    assert coordinate is not None
    for size, position in zip(mesh.mesh.shape[:-1], coordinate[:-1], strict=True):
        rank = rank * size + position
    return rank


@pytest.mark.parametrize(("name", "strategy"), nightly_but([CASES[0], CASES[2], CASES[7]], CASES))
@on_ranks(lambda name: torch.Size(MESHES[name][0]).numel())
def test_weights_and_norms_equal_those_of_a_whole_model_on(name: str, strategy: str) -> None:
    shape, names = MESHES[name]
    wanted, wanted_norms = train_whole(torch.Size(shape[:-1]).numel(), range(3))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = made(mesh, strategy)
    assert train(model, data_rank_in(mesh), range(3)) == pytest.approx(wanted_norms, rel=1e-5)
    assert differing(whole_state(model), wanted, 2e-6) == []


@on_ranks(4)
def test_sharded_parameters_show_their_whole_shape_over_both_axes() -> None:
    model = made(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), "optim_grads_params")
    found = {}
    for name, parameter in model[0].named_parameters():
        assert isinstance(parameter, DTensor)
        found[name] = (tuple(parameter.shape), parameter.device_mesh.mesh_dim_names)
    assert found["up.weight"] == ((10, WIDTH), ("tp", "dp"))
    assert found["down.weight"] == ((WIDTH, 10), ("tp", "dp"))
    assert found["norm.weight"] == ((WIDTH,), ("dp",))
    rows = torch.tensor(model[0].up.weight.to_local().shape[0])
    dist.all_reduce(rows)
    assert int(rows) == 10
    assert model[0].down.weight.to_local().shape[1] == 5


def saved(path: str, ours: bool) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = made(mesh, "optim_grads_params")
    train(model, data_rank_in(mesh), range(2))
    if ours:
        save_checkpoint(model, None, path)
    else:
        save({"model": model.state_dict()}, checkpoint_id=path)
    return whole_state(model)


def loaded(path: str, ours: bool, num_tp: int) -> dict[str, torch.Tensor]:
    if num_tp == 0:
        model = build()
        fully_shard(model)
    else:
        shape = (dist.get_world_size() // num_tp, num_tp)
        model = made(init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")), "optim_grads_params")
    if ours:
        load_checkpoint(model, None, path)
    else:
        state = {"model": model.state_dict()}
        load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
    return whole_state(model)


LOADERS = [(4, 2, True), (2, 2, False), (4, 1, False), (3, 0, True), (1, 0, False)]


@pytest.mark.parametrize(
    ("num_ranks", "num_tp", "ours"),
    nightly_but(LOADERS[::2], [(*case[:2], ours) for case in LOADERS for ours in (False, True)]),
)
def test_a_tensor_parallel_checkpoint_loads_on(num_ranks: int, num_tp: int, ours: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    wanted = run_ranks(4, saved, path, ours)[0]
    for found in run_ranks(num_ranks, loaded, path, ours, num_tp):
        assert differing(found, wanted) == []


@on_ranks(4)
def test_dp_mesh_dims_shards_parameters_that_span_the_whole_mesh() -> None:
    wanted = whole_state(build())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build()
    parallelize(model, mesh)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
            own = parameter.placements[0] if isinstance(parameter, DTensor) else Replicate()
            placed = distribute_tensor(full.detach(), mesh, [Replicate(), own])
            setattr(module, name, nn.Parameter(placed))
    for block in model.children():
        fully_shard(block, mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    fully_shard(model, mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    found = whole_state(model)
    assert differing(found, wanted) == []


@on_ranks(4)
def test_dp_mesh_dims_flattens_several_axes_into_one() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = build()
    fully_shard(model, mesh, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))
    (group, *_) = model.parameter_groups
    assert group.main_weight.axes[0].size == 4
    assert differing(whole_state(model), whole_state(build())) == []


@on_ranks(4)
def test_meshes_that_do_not_fit_are_refused_with_the_way_to_build_them() -> None:
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for mesh, words in (
        (named["tp"], "sharded over the data-parallel axis 'tp' already"),
        (init_device_mesh("cpu", (4,)), r"(?s)slices of one mesh.*'0\.up\.weight'|'0\.up\.weight'.*slices of one mesh"),
    ):
        model = build()
        parallelize(model, named)
        with pytest.raises(ValueError, match=words):
            fully_shard(model, mesh)
