"""set_forward_order: ranks that run other units train as the plain model does on the data of all of them."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from dbuffer import MeshError
from megatron_fsdp import ConfigError, StateError, fully_shard, microbatch, unsharded
from tests.harness import on_ranks
from tests.harness.grids import covering, nightly_but
from tests.harness.models import Block, inputs, make_mesh
from tests.harness.oracle import STRATEGIES
from tests.harness.twins import Twins

WORLDS = {"optim": 2, "optim_grads": 3, "optim_grads_params": 3, "hsdp": 4}
ON_THEIR_RANKS: Any = on_ranks(lambda strategy: WORLDS[strategy])

Route = list[int]


class Routed(nn.Module):
    """Parts, of which a call runs those that it is told to, between parameters of the root."""

    def __init__(self, num_parts: int, checkpoints: int = 0) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.parts = nn.ModuleList(Block() for _ in range(num_parts))
        self.head = nn.Linear(7, 3)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor, route: Route) -> torch.Tensor:
        """Return (rows, 3)."""
        x = self.embed(x)
        size = self.checkpoints or 1
        for begin in range(0, len(route), size):
            segment = route[begin : begin + size]
            x = checkpoint(self.run, x, segment, use_reentrant=False) if self.checkpoints else self.run(x, segment)
        out: torch.Tensor = self.head(x)
        return out

    def run(self, x: torch.Tensor, segment: Route) -> torch.Tensor:
        """Run some parts."""
        for number in segment:
            x = self.parts[number](x)
        return x


class Experts(nn.Module):
    """Experts that are units inside of a unit, which has a router of its own."""

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(7, 7)
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(num_experts))

    def forward(self, x: torch.Tensor, chosen: Route) -> torch.Tensor:
        """Return (rows, 7)."""
        x = self.router(x)
        return x + sum((self.experts[number](x) for number in chosen), start=torch.zeros(()))


class Mixture(nn.Module):
    """Layers of experts."""

    def __init__(self, checkpoints: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(7, 3)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor, route: Route) -> torch.Tensor:
        """Return (rows, 3). A route's numbers below 3 are experts of the first layer."""
        for place, layer in enumerate(self.layers):
            chosen = [number - 3 * place for number in route if number // 3 == place]
            x = checkpoint(layer, x, chosen, use_reentrant=False) if self.checkpoints else layer(x, chosen)
        out: torch.Tensor = self.head(x)
        return out


def shard(model: Any, strategy: str, **options: Any) -> Any:
    """Make each part, each expert and each layer a unit."""
    world = dist.get_world_size()
    placements = STRATEGIES[strategy]
    mesh = make_mesh((2, world // 2) if len(placements.dp_axes) == 2 else (world,))
    parts = (
        model.parts if hasattr(model, "parts") else [part for layer in model.layers for part in (*layer.experts, layer)]
    )
    for part in (*parts, model):
        fully_shard(part, mesh, placements, **options)
    model.set_forward_order()
    return model


def on_some(rank: int, step: int) -> Route:
    return [0, 1, 2, 3] if rank == 0 else [2, 3]


def alternating(rank: int, step: int) -> Route:
    return [0, 1, 2, 3] if (rank + step) % 2 else [2, 3]


def none_at_first(rank: int, step: int) -> Route:
    return [0, 1, 2, 3] if step >= 2 and rank == 1 else [2, 3]


def two_towers(rank: int, step: int) -> Route:
    return [[0, 1], [2, 3], [0, 1, 2, 3], []][(rank + step) % 4]


def early_exit(rank: int, step: int) -> Route:
    return list(range(1 + (2 * rank + step) % 4))


def never(rank: int, step: int) -> Route:
    return [0, 3]


def seeded(rank: int, step: int) -> Route:
    return [number for number in range(4) if random.Random(f"{rank} {step}").random() < 0.5]


ROUTES: dict[str, Callable[[int, int], Route]] = {
    each.__name__: each for each in (on_some, alternating, none_at_first, two_towers, early_exit, never, seeded)
}


def train(twins: Twins, route: Callable[[int, int], Route], steps: int, size: tuple[int, int]) -> None:
    """Train with two microbatches a step, and evaluate in between, on the routes of each rank."""

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        found: torch.Tensor = model(inputs(rank, step, *size), route(rank, step)).square().mean()
        return found

    optimizers = twins.optimizers(torch.optim.AdamW, lr=1e-2)
    rank = dist.get_rank()
    for step in range(steps):
        for number in range(2):
            with microbatch(twins.model, is_last=number == 1):
                twins.backward(2 * step + number, loss)
        assert twins.gradients_apart() < 1e-6, (step, route(rank, 2 * step), route(rank, 2 * step + 1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(loss(twins.model, rank, 50 + step), loss(twins.plain, rank, 50 + step))
    assert twins.weights_apart() < 1e-5


GRID = list(itertools.product(WORLDS, ROUTES, (0, 1, 3)))


@pytest.mark.parametrize(("strategy", "route", "checkpoints"), nightly_but(covering(GRID), GRID))
@ON_THEIR_RANKS
def test_routes_of_each_rank_train_as_the_plain_model(strategy: str, route: str, checkpoints: int) -> None:
    twins = Twins(lambda: Routed(4, checkpoints), strategy, shard)
    train(twins, ROUTES[route], 3, (2, 5))


@pytest.mark.parametrize("checkpoints", [0, 1])
@pytest.mark.parametrize("strategy", list(WORLDS))
@ON_THEIR_RANKS
def test_experts_inside_of_units_train_as_the_plain_model(strategy: str, checkpoints: int) -> None:
    def route(rank: int, step: int) -> Route:
        return [number for number in range(6) if random.Random(f"{rank} {step}").random() < 0.4]

    twins = Twins(lambda: Mixture(checkpoints), strategy, shard)
    train(twins, route, 4, (2, 7))


@pytest.mark.parametrize("reshard", [True, False, 2])
@on_ranks(2)
def test_every_choice_of_reshard_after_forward_trains_as_the_plain_model(reshard: bool | int) -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard, reshard_after_forward=reshard)
    train(twins, seeded, 3, (2, 5))


@on_ranks(2)
def test_units_that_stay_after_backward_train_as_the_plain_model() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)
    twins.model.set_reshard_after_backward(False)
    train(twins, seeded, 3, (2, 5))


@on_ranks(3)
def test_a_frozen_tower_trains_the_rest_as_the_plain_model() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)
    for model in twins:
        model.parts[:2].requires_grad_(False)
    train(twins, alternating, 3, (2, 5))


@on_ranks(2)
def test_a_rank_without_a_trained_parameter_takes_part() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)
    for model in twins:
        model.requires_grad_(False)
        model.parts[1].requires_grad_(True)
    loss = twins.model(inputs(dist.get_rank(), 0, 2, 5), [0, 1, 2] if dist.get_rank() else [0, 2]).square().mean()
    loss.backward()
    (twins.plain(inputs(1, 0, 2, 5), [0, 1, 2]).square().mean() / 2).backward()
    assert twins.gradients_apart() < 1e-6


@on_ranks(2)
def test_two_forwards_before_one_backward_give_the_plain_gradients() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        losses = [model(inputs(rank, 2 * step + n, 2, 5), seeded(rank, 2 * step + n)).square().mean() for n in range(2)]
        return torch.stack(losses).sum()

    for step in range(3):
        twins.backward(step, loss)
        assert twins.gradients_apart() < 1e-6
        twins.zero_grad()


@on_ranks(2)
def test_a_unit_called_several_times_trains_while_it_stays_gathered() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)
    twins.model.parts[1].set_reshard_after_forward(False)

    def route(rank: int, step: int) -> Route:
        return [[1, 2, 1, 3, 1], [0, 1], [2, 3], [1, 1]][(rank + step) % 4]

    train(twins, route, 4, (2, 5))


@on_ranks(2)
def test_a_call_out_of_order_names_both_units_and_the_fix() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)
    with pytest.raises(StateError, match=r"unit 'parts.1' .* unit 'parts.2'.*set_forward_order.*set_reshard_after"):
        twins.model(inputs(0, 0, 2, 5), [2, 1])


@on_ranks(2)
def test_a_call_outside_of_the_roots_forward_names_the_unit() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)
    with pytest.raises(StateError, match=r"unit 'parts.1' was called outside of the root's forward"):
        twins.model.parts[1](inputs(0, 0, 2, 7))
    with torch.no_grad(), unsharded(twins.model):
        twins.model.parts[dist.get_rank()](inputs(0, 0, 2, 7))


@on_ranks(2)
def test_another_order_than_registration_may_be_given() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)
    twins.model.set_forward_order([twins.model.parts[number] for number in (3, 2, 1, 0)])
    train(twins, lambda rank, step: [3, 1, 0] if rank else [2, 1], 3, (2, 5))


@on_ranks(1)
def test_an_order_has_to_name_every_unit_once() -> None:
    twins = Twins(lambda: Routed(3), "optim_grads_params", shard)
    with pytest.raises(ConfigError, match=r"'parts.2' are missing"):
        twins.model.set_forward_order(twins.model.parts[:2])
    with pytest.raises(ConfigError, match=r"'parts.0' come twice"):
        twins.model.set_forward_order([twins.model.parts[0], *twins.model.parts])
    with pytest.raises(StateError, match="root"):
        twins.model.parts[0].set_forward_order()


@on_ranks(2)
def test_without_an_order_the_error_names_it_as_the_fix() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard_without_order)
    with pytest.raises(MeshError, match=r"fix: root\.set_forward_order\(\).*unsharded\(model\).*join\(model"):
        twins.model(inputs(0, 0, 2, 5), [0, 1] if dist.get_rank() else [1])


def shard_without_order(model: Any, strategy: str) -> None:
    """Make each part a unit."""
    shard(model, strategy).__dict__["_fsdp_unit"].root.order = None


@on_ranks(2)
def test_a_forward_retried_while_an_exception_is_handled_trains() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        try:
            model(inputs(rank, step, 2, 6), [0])
        except RuntimeError:
            found: torch.Tensor = model(inputs(rank, step, 2, 5), seeded(rank, step)).square().mean()
        return found

    for step in range(2):
        twins.backward(step, loss)
        assert twins.gradients_apart() < 1e-6
        twins.zero_grad()
