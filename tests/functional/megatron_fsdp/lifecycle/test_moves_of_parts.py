"""``.to()`` of a module inside of a unit: allowed where it changes neither dtype nor device, else refused by name."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


class Moving(nn.Module):
    """Moves a part of itself in forward, as the router of Switch Transformers does."""

    def __init__(self, move: Callable[[Any], object]) -> None:
        super().__init__()
        self.move, self.router, self.inner = move, nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.move(self)
        return self.inner(torch.tanh(self.router(x))) * self.scale


def moving(move: Callable[[Any], object]) -> nn.Module:
    return nn.Sequential(Moving(move), nn.Linear(3, 3))


def recomputed(move: Callable[[Any], object]) -> nn.Module:
    return nn.Sequential(Recomputed(Moving(move)), nn.Linear(3, 3))


IN_FORWARD: list[Callable[[Any], object]] = [
    lambda model: model.router.to(torch.float32), lambda model: model.inner.cpu(), lambda model: model.to("cpu"),
    lambda model: model.inner[0].float(),
]  # fmt: skip


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


@on_ranks(2)
def test_a_move_that_changes_nothing_is_allowed_in_a_recomputation() -> None:
    for move in IN_FORWARD:
        build = partial(recomputed, move)
        for units in (lambda model: [model[0]], lambda model: [model[0].inner], lambda model: []):
            twins = Twins(build, units=units)
            twins.backward(loss=loss)
            twins.backward(1, loss=loss)
            assert twins.gradients_apart() < 1e-3


@pytest.mark.parametrize("is_unit", [True, False])
@on_ranks(2)
def test_a_move_in_forward_that_changes_nothing_is_allowed(is_unit: bool) -> None:
    for move in IN_FORWARD:
        build = partial(moving, move)
        twins = Twins(build, units=lambda model: [model[0]] if is_unit else [])
        twins.backward(loss=loss)
        with torch.no_grad():
            twins.model(torch.ones(4, 3))
        assert twins.gradients_apart() < 1e-3


class MovingLSTM(nn.Module):
    """Moves an LSTM, which keeps further references to its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.recurrent.to(torch.float32)
        output: torch.Tensor = self.recurrent(x)[0]
        return output


@on_ranks(2)
def test_an_lstm_may_be_moved_in_forward() -> None:
    for units in (lambda model: [model[0]], lambda model: [model[0].recurrent], lambda model: []):
        twins = Twins(lambda: nn.Sequential(MovingLSTM(), nn.Linear(3, 3)), units=units)
        twins.backward(loss=loss)
        twins.backward(1, loss=loss)
        assert twins.gradients_apart() < 1e-3


@pytest.mark.parametrize("index", range(len(IN_FORWARD)))
@on_ranks(2)
def test_a_move_in_forward_that_changes_a_gathered_weight_is_refused_by_name(index: int) -> None:
    parts: list[Callable[[Any], Any]] = [
        lambda model: model.router, lambda model: model.inner, lambda model: model, lambda model: model.inner[0],
    ]  # fmt: skip
    moved, is_moving = parts[index], [True]
    model = sharded(
        moving(lambda part: moved(part).double() if is_moving else None),
        units=lambda model: [model[0]],
    )
    with pytest.raises(StateError, match=r"unit '0': parameter '[a-z.0]*weight': .*torch\.float64.*fix:.*fully_shard"):
        model(torch.ones(4, 3))
    is_moving.clear()
    model(torch.ones(4, 3)).sum().backward()
