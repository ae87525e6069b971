"""An optimizer that steps between a forward and its backward: refused where it stepped the unit's weights."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import AdamW, Placements, StateError, fully_shard, fully_shard_optimizer
from tests.harness import on_ranks
from tests.harness.models import Block, Stack, inputs, make_mesh
from tests.harness.oracle import whole

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW of PyTorch": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "a fused one": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "a foreach one": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "a wrapped one": lambda parameters: fully_shard_optimizer(torch.optim.AdamW(parameters, lr=0.1)),
    "AdamW of this library": lambda parameters: AdamW(parameters, lr=0.1),
}


def sharded(strategy: str) -> Stack:
    torch.manual_seed(0)
    model = Stack(Block(), Block(hidden=1))
    mesh, placements = make_mesh((dist.get_world_size(),)), getattr(Placements, strategy)()
    for part in (*model.layers, model):
        fully_shard(part, mesh, placements)
    return model


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step)).square().mean()


def _refuse_and_go_on(strategy: str, name: str) -> float:
    model = sharded(strategy)
    oracle = Stack(Block(), Block(hidden=1))
    oracle.load_state_dict({key: whole(value, value) for key, value in model.state_dict().items()})
    ours, theirs = OPTIMIZERS[name](model.parameters()), torch.optim.AdamW(oracle.parameters(), lr=0.1)
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    late = loss_of(model, rank, 1)
    retained = loss_of(model, rank, 0)
    retained.backward(retain_graph=True)
    ours.step()
    ours.zero_grad()
    message = r"unit 'layers\.1': an optimizer has stepped its weights .* Call backward\(\) before optimizer\.step\(\)"
    for loss in (late, retained):
        with pytest.raises(StateError, match=message):
            loss.backward()
        ours.zero_grad()
    loss_of(model, rank, 2).backward()
    ours.step()
    for step in (0, 2):
        (sum(loss_of(oracle, each, step) for each in ranks) / len(ranks)).backward()
        theirs.step()
        theirs.zero_grad()
    return max(
        float((whole(p, q) - q.detach()).abs().max())
        for p, q in zip(model.parameters(), oracle.parameters(), strict=True)
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_backward_through_weights_that_were_stepped_is_refused_and_training_goes_on(strategy: str) -> None:
    distances = {name: _refuse_and_go_on(strategy, name) for name in OPTIMIZERS}
    assert max(distances.values()) < 2e-5, distances


def play(model: nn.Module, critic: nn.Module, ranks: list[int]) -> list[torch.Tensor]:
    """Train two models by turns: each steps between a forward and a backward of the other one."""
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
    models = [sharded(strategy) for _ in range(2)]
    plain = [copy.deepcopy(Stack(Block(), Block(hidden=1))) for _ in range(2)]
    for one, other in zip(models, plain, strict=True):
        other.load_state_dict({key: whole(value, value) for key, value in one.state_dict().items()})
    found = play(models[0], models[1], [dist.get_rank()])
    wanted = play(plain[0], plain[1], list(range(dist.get_world_size())))
    assert max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_step_that_leaves_a_unit_s_weights_is_no_matter_for_it(strategy: str) -> None:
    model = sharded(strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    first, second = (loss_of(layer, dist.get_rank(), 0) for layer in model.layers)
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    second.backward()
    assert (all(parameter.grad is not None for parameter in model.layers[1].parameters())) is True
