"""A tensor registered instead of a sharded parameter replaces it, like in a plain model, or raises an error.

The refusals are in test_errors.py; here is what works.
"""

import copy
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
    save_checkpoint,
)
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Block, Made, Stack, inputs
from tests.harness.twins import Twins


def two_layers() -> nn.Module:
    return Made(
        lambda m, x: m.second(torch.tanh(m.first(x))), first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH)
    )


def pair(*layers: nn.Module, strategy: str | None = None, **options: Any) -> Twins:
    return Twins(lambda: Stack(*(layers or (Block(), Block(hidden=5)))), strategy, **options)


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


@on_ranks(2)
def test_added_modules_train_if_sharded_and_stay_constant_if_frozen() -> None:
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
    # Each rank has its own gradients of parameters outside units.
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
