"""Gradients of sharded models equal a whole model's, however modules are called and whatever they take and return."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import guard_released_storage, observe_collectives
from megatron_fsdp import StateError, fully_shard
from tests.harness import on_ranks, run_ranks
from tests.harness.models import WIDTH, Block, Stack, inputs, squared
from tests.harness.oracle import Case, compare, shard_each


def three_blocks() -> nn.Module:
    return Stack(Block(), Block(hidden=1), Block(hidden=17))


def shard_without_root(model: nn.Module) -> None:
    for layer in model.layers:
        fully_shard(layer)


def called_twice(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = inputs(rank, step)
    for index in (0, 1, 1, 0, 2):
        x = model.layers[index](x)
    return x.square().mean()


class Recurrent(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 1, 0, 2):
            x = self.layers[index](x)
        return x


def recurrent() -> nn.Module:
    return Recurrent(Block(), Block(), Block())


def two_forwards(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    first: torch.Tensor = model(inputs(rank, 2 * step))
    second: torch.Tensor = model(inputs(rank, 2 * step + 1))
    return (first * second).mean()


def two_graphs(model: nn.Module, rank: int, step: int) -> tuple[torch.Tensor, ...]:
    return squared(model, rank, 2 * step), squared(model, rank, 2 * step + 1)


def two_losses_of_one_graph(model: nn.Module, rank: int, step: int) -> tuple[torch.Tensor, ...]:
    output = model(inputs(rank, step))
    return output.square().mean(), output.sin().mean()


def with_input_gradient_first(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = inputs(rank, step).requires_grad_()
    output = model(x)
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    return output.square().mean()


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


class ForkModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Block()
        self.fork = Fork()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = self.fork(self.stem(x))
        return left, right


def left_output_only(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step))[0].square().mean()


def one_output_per_rank(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step))[(rank + step) % 2].square().mean()


def other_order_each_step(model: nn.Module, step: int) -> None:
    model.order = [(3 * step + index) % len(model.layers) if step % 2 else index for index in range(len(model.layers))]


class Shuffled(Stack):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.order = list(range(len(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


def shuffled() -> nn.Module:
    return Shuffled(*(Block(hidden=5 + index) for index in range(5)))


class AddedInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += torch.tanh(x.clone() * self.scale)
        return x


def with_residuals_in_place() -> nn.Module:
    return Stack(Block(), AddedInPlace(), AddedInPlace(), Block())


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Block()
        self.lstm = nn.LSTM(WIDTH, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.stem(x))[0])


def sequence_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step, 2, 4, WIDTH)).square().sum()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3)
        self.second = nn.Conv2d(5, 7, (3, 1), bias=False)
        self.norm = nn.GroupNorm(1, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(torch.tanh(self.first(x))))


def image_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    output: torch.Tensor = model(inputs(rank, step, 2, 3, 8, 7))
    return (output.sin() * output).mean()


@dataclass
class Output:
    hidden: torch.Tensor
    extra: dict[str, list[torch.Tensor]]
    label: str = "two tensors"


class Structured(nn.Module):
    """Passes its two tensors on as a tuple, a dict or a dataclass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> Any:
        left, right = self.left(x), self.right(x) * scale
        if self.kind == "tuple":
            return left, (right, None)
        if self.kind == "dict":
            return {"left": left, "nested": [right], "name": "dict"}
        return Output(left, {"right": [right]})


class StructuredModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Structured("tuple"), Structured("dict"), Structured("dataclass")

    def forward(self, x: torch.Tensor) -> Output:
        scale = torch.tensor(0.5)
        left, (right, _) = self.a(x, scale=scale)
        both = self.b(left * right, scale=scale)
        return self.c(both["left"] + both["nested"][0], scale=scale)


def structured_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    output: Output = model(inputs(rank, step))
    return (output.hidden * output.extra["right"][0]).square().sum()


CASES = {
    "layers that run twice in one forward": Case(recurrent, squared),
    "units called twice by the trainer": Case(three_blocks, called_twice, shard=shard_without_root),
    "two forwards before one backward": Case(three_blocks, two_forwards),
    "two forwards before two backwards": Case(three_blocks, two_graphs),
    "two backwards through one retained graph": Case(three_blocks, two_losses_of_one_graph),
    "an input gradient taken before backward": Case(three_blocks, with_input_gradient_first),
    "a backward through one of two outputs": Case(ForkModel, left_output_only),
    "another one of two outputs on each rank": Case(ForkModel, one_output_per_rank),
    "another order of blocks at each step": Case(shuffled, squared, prepare=other_order_each_step, steps=4),
    "residuals that are added in place to what a unit returns": Case(with_residuals_in_place, squared),
    "a recurrent module that assigns its own weights": Case(Recursive, sequence_loss),
    "convolutions with four-dimensional weights": Case(Convolutions, image_loss),
    "outputs that are tuples, dicts and dataclasses": Case(StructuredModel, structured_loss),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout=20)
def test_gradients_and_weights_equal_those_of_a_whole_model_with(name: str) -> None:
    result = compare(CASES[name])
    assert result.is_exact, result


def take_input_gradients_only() -> list[str]:
    """Return the collectives and transcript lines of a backward that asks for no parameter's gradient."""
    model = Stack(Block(), Block())
    shard_each(model)
    x = inputs(dist.get_rank(), 0).requires_grad_()
    loss = model(x).square().mean()
    calls: list[str] = []
    with observe_collectives(lambda call: calls.append(call.kind)), guard_released_storage():
        torch.autograd.grad(loss, x)
    assert all(parameter.grad is None for parameter in model.parameters())
    return calls


def test_a_backward_to_the_inputs_alone_reduces_nothing() -> None:
    first, second = run_ranks(2, take_input_gradients_only)
    # The last unit keeps its weights from forward; the first one is gathered again.
    assert first == second == ["all_gather"]


def _take_input_gradient(model: nn.Module, step: int) -> None:
    x = inputs(dist.get_rank(), 77).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)


@on_ranks(2)
def test_training_goes_on_right_after_a_backward_to_the_inputs_alone() -> None:
    result = compare(Case(three_blocks, squared, prepare=_take_input_gradient))
    assert result.is_exact, result


@on_ranks(2)
def test_a_recorded_backward_is_refused_by_name() -> None:
    model = Stack(Block(), Block())
    shard_each(model)
    x = inputs(dist.get_rank(), 0).requires_grad_()
    loss = model(x).square().mean()
    with pytest.raises(StateError) as refused:
        torch.autograd.grad(loss, x, create_graph=True)
    message = str(refused.value)
    assert "create_graph=True" in message
    assert "unsharded" in message
