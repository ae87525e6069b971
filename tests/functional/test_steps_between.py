"""An optimizer step between a forward and its backward is refused if it changed the unit's weights."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import AdamW, StateError, fully_shard_optimizer
from tests.harness import on_ranks
from tests.harness.models import Block, Stack, inputs, squared
from tests.harness.oracle import whole
from tests.harness.twins import Twins, sharded

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW of PyTorch": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "a fused one": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "a foreach one": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "a wrapped one": lambda parameters: fully_shard_optimizer(torch.optim.AdamW(parameters, lr=0.1)),
    "AdamW of this library": lambda parameters: AdamW(parameters, lr=0.1),
}


def build() -> nn.Module:
    return Stack(Block(), Block(hidden=1))


def _refuse_and_go_on(strategy: str, name: str) -> float:
    twins = Twins(build, strategy)
    model = twins.model
    ours, theirs = OPTIMIZERS[name](model.parameters()), torch.optim.AdamW(twins.plain.parameters(), lr=0.1)
    rank = dist.get_rank()
    late, retained = squared(model, rank, 1), squared(model, rank, 0)
    retained.backward(retain_graph=True)
    ours.step()
    ours.zero_grad()
    message = r"unit 'layers\.1': an optimizer has stepped its weights .* Call backward\(\) before optimizer\.step\(\)"
    for loss in (late, retained):
        with pytest.raises(StateError, match=message):
            loss.backward()
        ours.zero_grad()
    squared(model, rank, 2).backward()
    ours.step()
    for step in (0, 2):
        twins.plain_backward(step)
        theirs.step()
        theirs.zero_grad()
    return twins.weights_apart()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_backward_through_weights_that_were_stepped_is_refused_and_training_goes_on(strategy: str) -> None:
    distances = {name: _refuse_and_go_on(strategy, name) for name in OPTIMIZERS}
    assert max(distances.values()) < 2e-5, distances


def play(model: nn.Module, critic: nn.Module, ranks: list[int]) -> list[torch.Tensor]:
    """Train two models alternately: each steps between a forward and a backward of the other one."""
    one, other = (torch.optim.SGD(each.parameters(), lr=0.3) for each in (model, critic))
    for step in range(3):
        made = [model(inputs(rank, step)) for rank in ranks]
        (sum(critic(each.detach()).square().mean() for each in made) / len(ranks)).backward()
        other.step()
        other.zero_grad()
        (sum(critic(each).sin().mean() for each in made) / len(ranks)).backward()
        one.step()
        one.zero_grad()
        other.zero_grad()
    return [whole(p, p).detach() for each in (model, critic) for p in each.parameters()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_step_of_another_model_is_no_matter(strategy: str) -> None:
    twins = Twins(
        lambda: nn.ModuleList([build(), build()]), shard=lambda both: [sharded(one, strategy) for one in both]
    )
    found = play(*twins.model, [dist.get_rank()])
    wanted = play(*twins.plain, list(range(dist.get_world_size())))
    assert max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_step_that_leaves_a_unit_s_weights_is_no_matter_for_it(strategy: str) -> None:
    model = sharded(build(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    first, second = (squared(layer, dist.get_rank(), 0) for layer in model.layers)
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    second.backward()
    assert all(parameter.grad is not None for parameter in model.layers[1].parameters())
