"""Gradients of sharded models equal whole models' for many ways to call modules (more: ``random_use.cases``)."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import memory_meter
from megatron_fsdp import clip_grad_norm_, fully_shard
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Block, Made, Stack, inputs, squared, three_blocks
from tests.harness.oracle import Case, compare
from tests.harness.twins import Twins


def adapted() -> nn.Module:
    """Frozen base weights with trainable low-rank adapters; the base runs first in forward, so its backward is last."""

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(module.base(x))
        return x + hidden + module.second(module.first(hidden))

    def layer() -> nn.Module:
        base, first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)
        return Made(forward, base=base.requires_grad_(False), first=first, second=second)

    return Stack(Block(), layer(), layer())


@on_ranks(2)
def test_a_unit_with_own_parameters_frees_all_memory_without_the_collector() -> None:
    gc.collect()
    gc.disable()
    before = memory_meter().current_bytes
    plain = nn.Linear(64, 64)
    original = weakref.ref(plain.weight)
    model = fully_shard(plain)
    del plain
    is_gone = original() is None
    model(torch.ones(1, 64)).sum().backward()
    del model
    held = memory_meter().current_bytes - before
    gc.enable()
    assert (held, is_gone) == (0, True)


@on_ranks(2)
def test_the_norm_of_fp64_gradients_has_fp64_precision() -> None:
    twins = Twins(lambda: nn.Linear(5, 3).double())

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(torch.full((2, 5), 1e-3 * (rank + 1), dtype=torch.float64)).square().sum()

    twins.backward(0, loss)
    wanted = nn.utils.clip_grad_norm_(twins.plain.parameters(), float("inf")).item()
    assert clip_grad_norm_(twins.model, float("inf")).item() == pytest.approx(wanted, rel=1e-12)


def shard_without_root(model: Any) -> None:
    for layer in model.layers:
        fully_shard(layer)


def called_twice(model: Any, rank: int, step: int) -> torch.Tensor:
    x = inputs(rank, step)
    for index in (0, 1, 1, 0, 2):
        x = model.layers[index](x)
    return x.square().mean()


def take_input_gradient(model: nn.Module, step: int) -> None:
    x = inputs(dist.get_rank(), 77).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)


def other_order_each_step(model: Any, step: int) -> None:
    model.order = [(3 * step + index) % 5 if step % 2 else index for index in range(5)]


def shuffled() -> nn.Module:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        for index in model.order:
            x = model.layers[index](x)
        return x

    return Made(forward, layers=nn.ModuleList(Block(hidden=5 + index) for index in range(5)))


def with_residuals_in_place() -> nn.Module:
    def added(module: Any, x: torch.Tensor) -> torch.Tensor:
        x += torch.tanh(x.clone() * module.scale)
        return x

    scales = [nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)) for _ in range(2)]
    return Stack(Block(), *(Made(added, scale=scale) for scale in scales), Block())


def recurrent() -> nn.Module:
    return Made(
        lambda m, x: m.head(m.lstm(m.stem(x))[0]),
        stem=Block(), lstm=nn.LSTM(WIDTH, 5, num_layers=2, batch_first=True), head=nn.Linear(5, 3),
    )  # fmt: skip


def sequence_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step, 2, 4, WIDTH)).square().sum()


def convolutions() -> nn.Module:
    return Made(
        lambda m, x: m.norm(m.second(torch.tanh(m.first(x)))),
        first=nn.Conv2d(3, 5, 3), second=nn.Conv2d(5, 7, (3, 1), bias=False), norm=nn.GroupNorm(1, 7),
    )  # fmt: skip


def image_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    output: torch.Tensor = model(inputs(rank, step, 2, 3, 8, 7))
    return (output.sin() * output).mean()


CASES = {
    "a frozen base weight whose backward follows the last trainable gradient": Case(adapted, squared),
    "units called twice by the trainer": Case(three_blocks, called_twice, shard=shard_without_root),
    "a backward to the inputs alone before": Case(three_blocks, squared, prepare=take_input_gradient),
    "another order of blocks at each step": Case(shuffled, squared, prepare=other_order_each_step, steps=4),
    "residuals that are added in place to what a unit returns": Case(with_residuals_in_place, squared),
    "a recurrent module that assigns its own weights": Case(recurrent, sequence_loss),
    "convolutions with four-dimensional weights": Case(convolutions, image_loss),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_gradients_and_weights_equal_those_of_a_whole_model_with(name: str) -> None:
    result = compare(CASES[name])
    assert result.is_exact, result
