"""A unit may return its tensors inside of objects that PyTorch's pytree does not know; backward gathers in time."""

import collections
import functools
import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributions, nn

from tests.harness import on_ranks
from tests.harness.models import squared
from tests.harness.twins import Twins

WIDTH = 7


class Box:
    """An object of the user's own."""

    def __init__(self, content: Any) -> None:
        self.content = content


class Slotted:
    """An output class without a dictionary."""

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


def queued(y: torch.Tensor) -> Any:
    made: queue.Queue[torch.Tensor] = queue.Queue()
    made.put(y)
    return made


# The unit's output, and the function that takes the tensor from it.
WAYS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "set": (lambda y: {y}, lambda found: next(iter(found))),
    "frozenset in a dict": (lambda y: {"a": frozenset([y])}, lambda found: next(iter(found["a"]))),
    "distribution": (lambda y: distributions.Normal(y, 1.0), lambda found: found.mean),
    "independent distribution": (
        lambda y: distributions.Independent(distributions.Normal(y, 1.0), 1),
        lambda found: found.base_dist.mean,
    ),
    "closure": (lambda y: lambda: y, lambda found: found()),
    "default argument": (lambda y: lambda kept=y: kept, lambda found: found()),
    "partial": (lambda y: functools.partial(torch.add, y), lambda found: found(torch.ones(WIDTH))),
    "bound method": (lambda y: y.add, lambda found: found(torch.ones(WIDTH))),
    "object": (Box, lambda found: found.content),
    "object in an object": (lambda y: Box([Box({"a": {y}})]), lambda found: next(iter(found.content[0].content["a"]))),
    "slots": (Slotted, lambda found: found.content),
    "generator": (lambda y: (each for each in [y]), next),
    "map": (lambda y: map(torch.sin, [y]), next),
    "values": (lambda y: {"a": y}.values(), lambda found: next(iter(found))),
    "deque of objects": (lambda y: collections.deque([Box(y)]), lambda found: found[0].content),
    "queue": (queued, lambda found: found.get()),
}  # fmt: skip


class Returning(nn.Module):
    """A linear layer whose output is in an object."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(WIDTH, WIDTH), way

    def forward(self, x: torch.Tensor) -> Any:
        return WAYS[self.way][0](torch.tanh(self.linear(x)))


class Chain(nn.Module):
    """A layer, a layer that returns an object, and a layer that uses the tensor in it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), Returning(way), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(WAYS[self.middle.way][1](self.middle(self.first(x))))
        return found


@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks(lambda num_ranks: num_ranks)
def test_a_unit_that_returns_an_object_trains_like_the_plain_model(num_ranks: int) -> None:
    for way in WAYS:
        twins = Twins(functools.partial(Chain, way), units=lambda m: [m.middle], reshard_after_forward=True)
        optimizers = twins.optimizers(torch.optim.SGD, lr=0.1)
        for step in range(2):
            twins.backward(step, squared)
            assert twins.gradients_apart() < 1e-6, way
            twins.step(optimizers)
        assert twins.weights_apart() < 1e-6, way


@on_ranks(2)
def test_tensors_of_earlier_calls_in_an_object_enter_no_unit() -> None:
    twins = Twins(functools.partial(Chain, "object"), units=lambda m: [m.middle], reshard_after_forward=True)
    for model in twins:
        kept: list[Any] = []

        def keep(module: nn.Module, args: Any, output: Any, kept: list[Any] = kept) -> None:
            kept.append(output.content)
            output.history = kept

        model.middle.register_forward_hook(keep)
    for step in range(3):
        twins.backward(step, squared)
        assert twins.gradients_apart() < 1e-6
        twins.zero_grad()
