"""3-D expert weights keep their shape for the user while ranks hold rows of any expert."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dbuffer import Row
from megatron_fsdp import (
    fully_shard,
    load_checkpoint,
    materialize,
    save_checkpoint,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import WIDTH, Block, Stack, squared
from tests.harness.oracle import Case, compare, differing, train, whole
from tests.harness.twins import sharded

NUM_EXPERTS = 2


class Experts(nn.Module):
    """Two experts of (5, WIDTH) and (WIDTH, 3) weights, and one weight of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH, 5))
        self.down = nn.Parameter(torch.empty(NUM_EXPERTS, 5, WIDTH))
        self.mix = nn.Parameter(torch.empty(1, 3, 2, WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(torch.einsum("...d,edh->...eh", x, self.up))
        return x + torch.einsum("...eh,ehd->...d", hidden, self.down) * self.mix.sum((0, 1, 2))


def build() -> Any:
    return Stack(Block(), Experts())


def shard_by_rows(model: nn.Module) -> None:
    sharded(model, granularity=Row())


def shard_on_two_axes(model: nn.Module) -> None:
    sharded(model, "hfsdp", granularity=Row())


SIZES = [(2, 1), (3, 1), (4, 1), (4, 2)]


@pytest.mark.parametrize(("num_ranks", "num_axes"), nightly_but([(3, 1), (4, 2)], SIZES))
@on_ranks(lambda num_ranks: num_ranks)
def test_gradients_are_exact_when_experts_are_cut_between_rows(num_ranks: int, num_axes: int) -> None:
    result = compare(Case(build, squared, shard=shard_by_rows if num_axes == 1 else shard_on_two_axes))
    assert result.is_exact, result


def made(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return sharded(build(), granularity=Row())


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(value, value) for name, value in model.state_dict().items()}


@on_ranks(3)
def test_parameters_show_their_natural_shape_over_rows_of_any_expert() -> None:
    model = made()
    torch.manual_seed(0)
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, [face.to_local().shape[0] for face in model.layers[1].parameters()])
    for face, plain in zip(model.layers[1].parameters(), build().layers[1].parameters(), strict=True):
        assert isinstance(face, DTensor)
        assert torch.equal(whole(face, face), plain)
    assert [sum(each) for each in zip(*rows, strict=True)] == [14, 10, 6]
    assert any(of_up % 7 for of_up, *_ in rows), "some cut must lie inside an expert"


def saved(path: str, way: str) -> dict[str, torch.Tensor]:
    model = made(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    train(model, optimizer, loss=squared)
    if way == "save_checkpoint":
        save_checkpoint(model, optimizer, path)
    else:
        save({"model": get_model_state_dict(model)}, checkpoint_id=path)
    return values_of(model)


def loaded(path: str, way: str, is_sharded: bool) -> dict[str, torch.Tensor]:
    model = made(9) if is_sharded else build()
    if not is_sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    train(model, optimizer, range(1), loss=squared)
    if way == "save_checkpoint":
        load_checkpoint(model, optimizer, path)
    else:
        state = {"model": get_model_state_dict(model)}
        load(state, checkpoint_id=path)
        set_model_state_dict(model, state["model"])
    return values_of(model)


@pytest.mark.parametrize("way", ["DCP", "save_checkpoint"])
@pytest.mark.parametrize(
    ("num_ranks", "is_sharded"), [(3, True), pytest.param(2, True, marks=pytest.mark.slow), (4, True), (2, False)]
)
def test_a_checkpoint_of_experts_cut_between_rows_loads_on(
    num_ranks: int, is_sharded: bool, way: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    wanted = run_ranks(3, saved, path, way)[0]
    for found in run_ranks(num_ranks, loaded, path, way, is_sharded):
        assert differing(found, wanted) == []


@pytest.mark.filterwarnings("ignore:Multiple backends are registered:UserWarning")
@pytest.mark.filterwarnings("ignore:`_get_pg_default_device`:UserWarning")
@pytest.mark.parametrize("way", ["plain", "assign", "canonical", "broadcast"])
@on_ranks(3)
def test_sharded_experts_take_whole_values_from(way: str) -> None:
    torch.manual_seed(5)
    wanted = {name: value.detach().clone() for name, value in build().state_dict().items()}
    model = made()
    if way == "plain":
        model.load_state_dict(wanted)
    elif way == "assign":
        model.load_state_dict(wanted, assign=True)
    elif way == "canonical":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model.load_state_dict({name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in wanted.items()})
    else:
        # PyTorch copies slices of the first dimension into existing memory and raises: rows are no slices.
        with torch.device("meta"):
            model = build()
        shard_by_rows(model)
        full = dict(wanted) if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, full, options=options)
    assert differing(values_of(model), wanted) == []


def materialized() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = build()
    shard_by_rows(model)
    torch.manual_seed(11)
    materialize(model)
    return values_of(model)


def test_sharded_experts_are_initialised_like_whole_ones() -> None:
    one = run_ranks(1, materialized)[0]
    for found in run_ranks(3, materialized):
        assert differing(found, one) == []


@on_ranks(4)
def test_by_default_experts_are_cut_between_rows_where_whole_ones_would_pad() -> None:
    torch.manual_seed(0)
    weight: Any = nn.Module()
    weight.up = nn.Parameter(torch.randn(2, 640, 96))
    kept = weight.up.detach().clone()
    fully_shard(weight)
    (group,) = weight.parameter_groups
    face = next(iter(group.parameters.values()))
    assert group.plan.padding_ratio < 0.01
    assert torch.equal(whole(face, face), kept)
