"""What is registered in the place of a sharded parameter is computed with, as in a plain model, or refused by name.

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
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import (
    CheckpointError,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_optimizer,
    save_checkpoint,
)
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Block, Made, Stack, inputs
from tests.harness.oracle import whole
from tests.harness.twins import Twins

# Each strategy, and weights that stay gathered where they need not.
KINDS = [("no_shard", None), ("optim", False), ("optim_grads", None), ("optim_grads_params", None),
         ("optim_grads_params", False)]  # fmt: skip


def two_layers() -> nn.Module:
    return Made(
        lambda m, x: m.second(torch.tanh(m.first(x))), first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH)
    )


def recurrent() -> nn.Module:
    """Return a layer of whose weights PyTorch keeps references of its own."""
    return Made(lambda m, x: m.rnn(x)[0], rnn=nn.GRU(WIDTH, WIDTH))


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def pair(*layers: nn.Module, strategy: str | None = None, **options: Any) -> Twins:
    return Twins(lambda: Stack(*(layers or (Block(), Block(hidden=5)))), strategy, **options)


def halves(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() * 0.5 for name, parameter in model.named_parameters()}


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.detach() - other.detach()).abs().max())


# What the sharded model is given instead of its weights, from halves of the whole ones.
Given = Callable[[nn.Module, dict[str, torch.Tensor]], dict[str, torch.Tensor]]
REPLACEMENTS: dict[str, Given] = {
    "sharded tensors": lambda model, _: halves(model),
    "whole tensors": lambda _, values: values,
    "parameters": lambda _, values: {name: nn.Parameter(value) for name, value in values.items()},
    "sharded parameters": lambda model, _: {name: nn.Parameter(value) for name, value in halves(model).items()},
}


@pytest.mark.parametrize(("strategy", "reshard_after_forward"), KINDS)
@on_ranks(2)
def test_functional_call_computes_with_the_tensors_it_is_given(
    strategy: str, reshard_after_forward: bool | None
) -> None:
    found = {}
    x = inputs(dist.get_rank(), 0)
    for name, given in REPLACEMENTS.items():
        layers = (Block(), recurrent(), Checkpointed())
        twins = pair(*layers, strategy=strategy, reshard_after_forward=reshard_after_forward)
        model, oracle = twins
        values = halves(oracle)
        weights = given(model, values)
        if name != "sharded tensors":
            # Some only, and those of every layer but the first.
            values, weights = ({k: v for k, v in one.items() if "layers.0" not in k} for one in (values, weights))
        shown = dict(weights)
        with torch.no_grad():
            worst = gap(
                torch.func.functional_call(model, weights, (x,)), torch.func.functional_call(oracle, values, (x,))
            )
            effect = gap(oracle(x), torch.func.functional_call(oracle, values, (x,)))
        assert all(weights[key] is shown[key] for key in shown)
        if reshard_after_forward is not False:
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        twins.backward()
        found[name] = (worst, effect, twins.gradients_apart())
    for name, (worst, effect, after) in found.items():
        assert worst < 2e-6 < 0.01 < effect, name
        assert after < 2e-6, name


@on_ranks(3)
def test_functional_call_with_a_fixed_weight_trains_the_others() -> None:
    twins, name = pair(), "layers.0.up.weight"
    fixed = torch.full((13, WIDTH), 0.1)

    def loss(model: nn.Module, rank: int, _: int) -> torch.Tensor:
        return torch.func.functional_call(model, {name: fixed}, (inputs(rank, 0),)).square().mean()

    assert gap(*(loss(model, dist.get_rank(), 0) for model in twins)) < 2e-6
    twins.backward(0, loss)
    assert twins.gradients_apart() < 2e-6


@on_ranks(2)
def test_functional_call_computes_in_the_policy_s_dtype() -> None:
    model, oracle = pair(mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    values = halves(oracle)
    x = inputs(dist.get_rank(), 0)
    with torch.no_grad():
        wanted = torch.func.functional_call(
            oracle.bfloat16(), {name: value.bfloat16() for name, value in values.items()}, (x.bfloat16(),)
        )
        assert gap(torch.func.functional_call(model, values, (x,)), wanted) == 0.0


@on_ranks(2)
def test_weights_that_need_no_gradient_may_be_assigned() -> None:
    model, oracle = pair(two_layers(), two_layers())
    x = inputs(dist.get_rank(), 0)
    model(x).square().mean().backward()
    errors = []
    with torch.no_grad():
        for each in (model, oracle):
            each.layers[0].first.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.05))
        errors.append(gap(model(x), oracle(x)))
        for each in (model, oracle):
            each.layers[1].second.weight = each.layers[1].first.weight
        errors.append(gap(model(x), oracle(x)))
        before = oracle.layers[1].first.weight.detach().clone()
        errors.append(gap(whole(model.layers[1].first.weight, before), before))
    for each in (model, oracle):
        each.layers[0].first.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.07), requires_grad=False)
        each.layers[1].second.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.03), requires_grad=False)
    errors.append(gap(model(x), oracle(x)))
    assert len(errors) == 4
    assert max(errors) < 2e-6


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
    model(inputs(dist.get_rank(), 0))
    with pytest.raises(CheckpointError) as refused:
        save_checkpoint(model, None, folder)
    message = str(refused.value)
    assert "parameter 'first.weight' was replaced" in message
    assert not list(tmp_path.iterdir())
