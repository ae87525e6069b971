"""``.to()`` of a module inside of a unit: allowed where it changes neither dtype nor device, else refused by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import StateError
from tests.harness import on_ranks
from tests.harness.twins import Twins, sharded


def nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), nn.Linear(3, 3))


def loss(model: Any, rank: int, step: int) -> torch.Tensor:
    x = torch.arange(12.0).view(4, 3) + rank + step
    result: torch.Tensor = model(x).square().mean()
    return result


def last(model: Any) -> list[nn.Module]:
    return [model[1]]


SAME: list[Callable[[nn.Module], object]] = [
    lambda part: part.to("cpu"), lambda part: part.cpu(), lambda part: part.float(),
    lambda part: part.to(torch.float32),
]  # fmt: skip
OTHER: list[Callable[[nn.Module], object]] = [
    lambda part: part.double(), lambda part: part.half(), lambda part: part.to("meta"),
    lambda part: part.share_memory(), lambda part: part.to_empty(device="meta"),
]  # fmt: skip


@on_ranks(2)
def test_a_move_of_a_part_that_changes_nothing_is_allowed() -> None:
    twins = Twins(lambda: nested().eval(), units=last)
    parameters = list(twins.model.parameters())
    twins.backward(loss=loss)
    for move in SAME:
        move(twins.model[0])
        move(twins.model[0][0])
        assert all(map(lambda one, other: one is other, twins.model.parameters(), parameters))
        assert twins.gradients_apart() < 1e-3
    twins.backward(1, loss=loss)
    assert twins.gradients_apart() < 1e-3
    assert twins.weights_apart() == 0


@on_ranks(2)
def test_a_function_of_values_is_applied_to_a_part() -> None:
    twins = Twins(nested, units=last)
    for model in twins:
        model[0]._apply(lambda tensor: tensor * 2 if tensor.is_floating_point() else tensor)
    assert twins.weights_apart() == 0


@pytest.mark.parametrize("index", range(len(OTHER)))
@on_ranks(2)
def test_a_move_of_a_part_elsewhere_is_refused_by_name(index: int) -> None:
    model = sharded(nested(), units=last)
    with pytest.raises(StateError, match=r"parameters '0\.0\.weight', .*'0\.2\.bias'.*fix:.*CPUOffloadPolicy"):
        OTHER[index](model[0])
    model(torch.ones(4, 3)).sum().backward()


@on_ranks(2)
def test_the_whole_model_is_converted_with_its_parts() -> None:
    model = sharded(nested(), units=last)
    model.double()
    assert all(parameter.dtype is torch.float64 for parameter in model.parameters())
    model(torch.ones(4, 3, dtype=torch.float64)).sum().backward()


@on_ranks(2)
def test_a_copy_of_a_part_converts_itself() -> None:
    model = sharded(nested(), units=last)
    copied = copy.deepcopy(model[0][1])
    assert copied._apply.__self__ is copied
