"""Main weights that change between a forward and its backward: refused by the name of the unit."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import (
    AdamW,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    StateError,
    full_state_dict,
    fully_shard_optimizer,
    unsharded,
)
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


CHANGED = (
    r"unit 'layers\.1': its main weights \(some of '\w+.*'\) were changed between a forward and the backward .*"
    r"fix: call backward\(\) before the change, or run forward again after it"
)

Change = Callable[[Any], object]
CHANGES: dict[str, Change] = {
    "an operator": lambda weight: weight.mul_(1.5),
    "copy_": lambda weight: weight.copy_(weight * 1.5),
    "out=": lambda weight: torch.mul(weight, 1.5, out=weight),
    "foreach": lambda weight: torch._foreach_mul_([weight], 1.5),
    "the local part": lambda weight: weight.to_local().mul_(1.5),
    ".data": lambda weight: weight.data.mul_(1.5),
    "an assignment to .data": lambda weight: setattr(weight, "data", weight.data * 1.5),
    "an initializer": nn.init.ones_,
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
    for loss in (late, retained):
        with pytest.raises(StateError, match=CHANGED):
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
def test_a_backward_through_stepped_weights_is_refused_and_training_goes_on(strategy: str) -> None:
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
    found = play(twins.model[0], twins.model[1], [dist.get_rank()])
    wanted = play(twins.plain[0], twins.plain[1], list(range(dist.get_world_size())))
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


def _options(precision: str) -> dict[str, Any]:
    policies = {"bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    options: dict[str, Any] = {"mp_policy": policies[precision]} if precision in policies else {}
    if precision == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if precision == "kept":
        options["reshard_after_forward"] = False
    return options


def _change_and_go_on(twins: Twins, change: Change) -> None:
    model = twins.model
    sharded_weights = dict(model.named_parameters())
    loss, other = (squared(each, dist.get_rank(), 0) for each in (model, model.layers[0]))
    weight = sharded_weights["layers.1.norm.weight"]
    with torch.no_grad():
        change(weight)
    with pytest.raises(StateError, match=CHANGED):
        loss.backward()
    # The change is of another unit, so this backward is right.
    other.backward()
    model.zero_grad()
    for name, plain in twins.plain.named_parameters():
        plain.data.copy_(whole(sharded_weights[name], plain))
    twins.backward(1)


SETTINGS = [
    *((strategy, precision) for precision in ("fp32", "bf16") for strategy in STRATEGIES),
    ("optim_grads_params", "offloaded"),
    ("optim_grads_params", "kept"),
]


@pytest.mark.parametrize(("strategy", "precision"), SETTINGS)
@on_ranks(2)
def test_a_backward_through_hand_changed_weights_is_refused_and_training_goes_on(strategy: str, precision: str) -> None:
    twins = Twins(build, strategy, **_options(precision))
    apart = {}
    for name, change in CHANGES.items():
        _change_and_go_on(twins, change)
        apart[name] = twins.gradients_apart()
        twins.zero_grad()
    assert max(apart.values()) < (3e-2 if precision == "bf16" else 1e-5), apart


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_forward_after_the_change_is_right_and_the_one_before_it_is_refused(strategy: str) -> None:
    twins = Twins(build, strategy)
    rank = dist.get_rank()
    early = squared(twins.model, rank, 0)
    with torch.no_grad():
        for mine, plain in zip(twins.model.parameters(), twins.plain.parameters(), strict=True):
            mine.mul_(1.5)
            plain.mul_(1.5)
        # An evaluation brings compute weights up to date, and the change must not be forgotten.
        squared(twins.model, rank, 2)
    late = squared(twins.model, rank, 1)
    with pytest.raises(StateError, match=CHANGED):
        early.backward()
    twins.model.zero_grad()
    late.backward()
    twins.plain_backward(1)
    assert twins.gradients_apart() < 1e-5


class Recomputed(nn.Module):
    """Two blocks, the second one under a checkpoint."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        recomputed: torch.Tensor = checkpoint(self.layers[1], x, use_reentrant=self.use_reentrant)
        return recomputed


def _losses(model: nn.Module, ranks: list[int]) -> torch.Tensor:
    return sum((squared(model, rank, 0) for rank in ranks), torch.zeros(())) / len(ranks)


def _change_before_recomputation(twins: Twins) -> list[torch.Tensor]:
    """Change a weight under the checkpoint of both models, and return their losses from before."""
    losses = [_losses(twins.model, [dist.get_rank()]), _losses(twins.plain, list(range(dist.get_world_size())))]
    with torch.no_grad():
        for model in twins:
            model.layers[1].norm.weight.mul_(1.5)
    return losses


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_reentrant_checkpoint_recomputes_with_changed_weights_like_the_model(strategy: str) -> None:
    twins = Twins(lambda: Recomputed(use_reentrant=True), strategy)
    for loss in _change_before_recomputation(twins):
        loss.backward()
    assert twins.gradients_apart() < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_checkpoint_that_is_not_reentrant_refuses_changed_weights(strategy: str) -> None:
    twins = Twins(lambda: Recomputed(use_reentrant=False), strategy)
    loss, _ = _change_before_recomputation(twins)
    with pytest.raises(StateError, match=CHANGED):
        loss.backward()
    twins.zero_grad()
    twins.backward(1)
    assert twins.gradients_apart() < 1e-5


def _scaled_by_critic(model: nn.Module, critic: nn.Module, ranks: list[int]) -> torch.Tensor:
    """Return a loss whose backward runs a forward of ``critic``, and scales the gradient by the result."""

    def scale(gradient: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return gradient * critic(inputs(0, 7)).square().mean()

    losses = []
    for rank in ranks:
        output = model(inputs(rank, 0))
        output.register_hook(scale)
        losses.append(output.square().mean())
    return sum(losses, torch.zeros(())) / len(ranks)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_forward_inside_of_another_model_s_backward_uses_weights_that_were_stepped(strategy: str) -> None:
    twins = Twins(
        lambda: nn.ModuleList([build(), build()]), shard=lambda both: [sharded(one, strategy) for one in both]
    )
    for (model, critic), ranks in zip(twins, ([dist.get_rank()], list(range(dist.get_world_size()))), strict=True):
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.5)
        for _ in range(2):
            _losses(critic, ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
        _scaled_by_critic(model, critic, ranks).backward()
    assert twins.gradients_apart() < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_reads_and_blocks_without_a_change_do_not_refuse_the_backward(strategy: str) -> None:
    twins = Twins(build, strategy)
    model = twins.model
    twins.backward(2)
    twins.zero_grad()
    loss = squared(model, dist.get_rank(), 0)
    with unsharded(model, writeback=True), torch.no_grad():
        for weight in model.parameters():
            weight.norm()
    model.state_dict()
    full_state_dict(model)
    with torch.no_grad():
        squared(model, dist.get_rank(), 1)
    loss.backward()
    twins.plain_backward(0)
    assert twins.gradients_apart() < 1e-5
