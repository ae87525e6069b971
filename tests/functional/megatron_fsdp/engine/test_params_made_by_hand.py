"""Optimizer state and averages that users make by hand from the placements of parameters have their rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dbuffer import FlatDTensor
from megatron_fsdp import fully_shard
from tests.harness import on_ranks


def one_model(mesh_kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a sharded model and its whole weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1))
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if mesh_kind == "tensor parallel":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)  # type: ignore[arg-type]
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model)
    return model, whole


def offloaded(parameter: DTensor) -> DTensor:
    """Return an optimizer's state after it was offloaded and made again."""
    local = parameter.to_local().detach().to("cpu", copy=True)
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


@pytest.mark.parametrize("kind", ["three ranks", "tensor parallel"])
@on_ranks(lambda kind: 4 if kind == "tensor parallel" else 3)
def test_averages_and_state_of_parameters_made_by_hand_are_whole(kind: str, tmp_path: Path) -> None:
    model, whole = one_model(kind)
    parameters = {name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
    assert parameters.keys() == whole.keys()
    made = {name: offloaded(parameter) for name, parameter in parameters.items()}
    for name, each in made.items():
        assert isinstance(each, FlatDTensor)
        doubled: Any = each.mul(2)
        largest: Any = each.abs().max()
        assert torch.equal(doubled.full_tensor(), whole[name] * 2)
        assert torch.equal(largest.full_tensor(), whole[name].abs().max())
        with torch.no_grad():
            each.mul_(0.5).add_(parameters[name], alpha=2)
        torch.testing.assert_close(each.full_tensor(), whole[name] * 2.5)
    # Use the same folder on every rank.
    folders = [str(tmp_path)]
    dist.broadcast_object_list(folders)
    folder = folders[0]
    save(made, checkpoint_id=folder)
    loaded: dict[str, Any] = {name: torch.zeros_like(each) for name, each in made.items()}
    load(loaded, checkpoint_id=folder)
    for name, each in loaded.items():
        torch.testing.assert_close(each.full_tensor(), whole[name] * 2.5)
    model.load_state_dict(made)
    state: dict[str, Any] = get_model_state_dict(model)
    for name, each in state.items():
        torch.testing.assert_close(each.full_tensor(), whole[name] * 2.5)
