"""What is registered in the place of a sharded parameter takes that place, as in a plain model, or is refused by name.

The refusals are in test_errors.py; here is what works.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import (
    CheckpointError,
    StateError,
    fully_shard,
    fully_shard_optimizer,
    save_checkpoint,
)
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Block, Made, Stack, inputs
from tests.harness.oracle import whole
from tests.harness.twins import Twins


def two_layers() -> nn.Module:
    return Made(
        lambda m, x: m.second(torch.tanh(m.first(x))), first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH)
    )


def pair(*layers: nn.Module, strategy: str | None = None, **options: Any) -> Twins:
    return Twins(lambda: Stack(*(layers or (Block(), Block(hidden=5)))), strategy, **options)


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.detach() - other.detach()).abs().max())


@on_ranks(2)
def test_tied_parameters_may_be_tied_again() -> None:
    def build() -> nn.Module:
        model = two_layers()
        model.second.weight = model.first.weight
        return model

    twins = Twins(build, shard=fully_shard)
    model = twins.model
    for _ in range(2):
        model.second.weight = model.first.weight
        twins.backward()
        model.load_state_dict(model.state_dict())
    assert model.second.weight is model.first.weight
    assert twins.gradients_apart() < 2e-6


ADOPTERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adapted AdamW": lambda parameters: fully_shard_optimizer(torch.optim.AdamW(parameters, lr=0.1)),
}


@pytest.mark.parametrize(("strategy", "make"), [("optim", "SGD"), ("optim_grads_params", "adapted AdamW")])
@on_ranks(2)
def test_a_sharded_parameter_assigned_before_the_first_forward_is_trained(strategy: str, make: str) -> None:
    twins = pair(strategy=strategy)
    model, oracle = twins
    old, value = model.layers[0].up.weight, model.layers[0].up.weight.full_tensor()
    for each in (model, oracle):
        layer = each.layers[0]
        layer.up.weight = nn.Parameter(layer.up.weight.detach() * 2)
        layer.norm.bias = nn.Parameter(layer.norm.bias.detach() + 1, requires_grad=False)
    assigned = model.layers[0].up.weight
    assert assigned is not old
    optimizers = [
        ADOPTERS[make]([p for p in model.parameters() if p.requires_grad]),
        torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9)
        if make == "SGD"
        else torch.optim.AdamW(oracle.parameters(), lr=0.1),
    ]
    for step in range(3):
        twins.backward(step)
        assert model.layers[0].norm.bias.grad is None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert model.layers[0].up.weight is assigned
    assert twins.weights_apart() < 2e-6
    assert gap(whole(old, old), value) == 0.0


@on_ranks(2)
def test_a_parameter_on_the_meta_device_may_be_assigned_before_the_first_forward() -> None:
    with torch.device("meta"):
        model: Any = Made(
            lambda m, x: m.second(m.first(x)) * m.norm,
            first=nn.Linear(3, 3, bias=False), second=nn.Linear(3, 3, bias=False), norm=nn.Parameter(torch.empty(3)),
        )  # fmt: skip
    for layer in (model.first, model.second):
        fully_shard(layer)
    fully_shard(model)
    for layer in (model.first, model.second):
        layer.to_empty(device="cpu")
        with torch.no_grad():
            layer.weight.copy_(layer.weight.new_ones(()) * 0.5)
    with torch.no_grad():
        model.norm = nn.Parameter(torch.linalg.norm(model.first.weight + model.second.weight, dim=1))
    x = inputs(dist.get_rank(), 0, 2, 3)
    model(x).sum().backward()
    gradient = sum((inputs(rank, 0, 2, 3) @ torch.full((3, 3), 0.75)).sum(0) for rank in range(2)) / 2
    error = gap(whole(model.norm, model.norm), torch.full((3,), 3.0).sqrt())
    of_gradient = gap(whole(model.norm.grad, model.norm), gradient)
    assert error < 2e-6
    assert of_gradient < 2e-6


@on_ranks(2)
def test_modules_that_are_added_train_when_they_are_sharded_and_stay_when_they_are_frozen() -> None:
    def shard(model: Any) -> None:
        fully_shard(model.layers[1], ignored_params=[model.layers[1][1].bias])
        fully_shard(model)

    twins = Twins(lambda: Stack(Block(), nn.Sequential(Block(hidden=5), nn.Linear(WIDTH, WIDTH))), shard=shard)
    model = twins.model
    adapter, constant = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    for step, added in enumerate((None, adapter, constant)):
        for each in twins:
            if added is not None:
                each.layers[1].append(copy.deepcopy(added))
                each.layers.append(copy.deepcopy(added))
        if added is adapter:
            for part in (model.layers[1][-1], model.layers[-1]):
                fully_shard(part)
        twins.backward(step)
    # What no unit owns is each rank's own.
    for each in twins:
        each.layers[1][1].bias.grad = None
    assert twins.gradients_apart() < 5e-6


@on_ranks(2)
def test_a_save_refuses_a_weight_that_is_not_the_unit_s(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    model, _ = pair(two_layers())
    model.layers[0].first.weight = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
    with pytest.raises(CheckpointError) as refused:
        save_checkpoint(model, None, folder)
    message = str(refused.value)
    assert "parameter 'first.weight' was replaced" in message
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_a_tensor_that_was_a_parameter_before_fully_shard_is_refused_in_backward() -> None:
    model: Any = Made(lambda m, x: x @ m.kept[0] + m.second(x), second=nn.Linear(WIDTH, WIDTH))
    model.first = nn.Parameter(torch.ones(WIDTH, WIDTH))
    model.kept = [model.first]
    fully_shard(model)
    x = inputs(dist.get_rank(), 0, 2, WIDTH)
    with pytest.raises(StateError, match=r"parameter 'first'.*before fully_shard"):
        model(x).sum().backward()
