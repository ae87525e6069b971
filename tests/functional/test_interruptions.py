"""A step that is broken off anywhere, by an interrupt or for want of memory, and what a model is worth after it."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import AdamW, Placements, fully_shard, fully_shard_optimizer
from tests.harness import run_ranks
from tests.harness.models import Block, Headed, inputs, squared, world_mesh
from tests.harness.oracle import whole

ZERO = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def pair(strategy: str) -> tuple[Any, nn.Module]:
    """Return a sharded model and the same one whole."""
    torch.manual_seed(0)
    plain = Headed(Block(), Block(), nn.LayerNorm(7))
    model = copy.deepcopy(plain)
    for part in (*model.layers, model):
        fully_shard(part, world_mesh(), getattr(Placements, strategy)(0))
    return model, plain


@contextmanager
def interrupted_at(file: str, function: str, number: int = 1) -> Iterator[None]:
    """Interrupt, as Ctrl-C does, the ``number``-th call of a function while the block runs; it has to come."""
    calls = 0

    def profile(frame: Any, event: str, _: object) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file):
            calls += 1
            if calls == number:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sys.setprofile(None)


def distance(model: nn.Module, plain: nn.Module, step: int) -> float:
    """Return how far outputs are from the plain model's."""
    x = inputs(dist.get_rank(), step)
    # With gradients: an evaluation refreshes weights in any case.
    return (model(x) - plain(x)).abs().max().item()


def train_plain(plain: nn.Module, step: int) -> None:
    """Take a step of SGD on the data of all ranks."""
    size = dist.get_world_size()
    for rank in range(size):
        (squared(plain, rank, step) / size).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    plain.zero_grad()


# ---------------------------------------------------------------- weights


def output_after_an_interrupted_gather(strategy: str) -> float:
    model, plain = pair(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    squared(model, dist.get_rank(), 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    train_plain(plain, 0)
    with interrupted_at("collectives.py", "gather_together"):
        model(inputs(dist.get_rank(), 1))
    return distance(model, plain, 2)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_a_gather_of_new_weights_that_was_interrupted_is_made_by_the_next_forward(strategy: str) -> None:
    assert max(run_ranks(2, output_after_an_interrupted_gather, strategy)) < 1e-6


def kept_gathered(model: Any) -> None:
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    # No version counter shows what it changes.
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def refreshing(model: nn.Module) -> torch.optim.Optimizer:
    return fully_shard_optimizer(fused(model))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW(model.parameters(), lr=0.1)


def output_after_a_step_that_raised(strategy: str, build: Callable[[nn.Module], torch.optim.Optimizer]) -> float:
    """Interrupt a step that has changed some weights, in whatever order, before its hooks are called."""
    model, plain = pair(strategy)
    kept_gathered(model)
    optimizer = build(model)
    squared(model, dist.get_rank(), 0).backward()
    if build is adamw:
        with interrupted_at("adamw_update.py", "run", 3):
            optimizer.step()
    else:

        def fail(*_: object) -> None:
            raise KeyboardInterrupt

        # Hooks are called in the order of registration, those of all optimizers last.
        optimizer._optimizer_step_post_hooks = {-1: fail, **optimizer._optimizer_step_post_hooks}
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    model.zero_grad()
    weights = {name: whole(value, value) for name, value in model.named_parameters()}
    assert any(not torch.equal(value, weights[name]) for name, value in plain.named_parameters())
    plain.load_state_dict(weights)
    return distance(model, plain, 2)


@pytest.mark.parametrize("build", [fused, refreshing, adamw])
@pytest.mark.parametrize("strategy", ZERO)
def test_weights_that_an_interrupted_step_has_changed_are_those_of_the_next_forward(
    strategy: str, build: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    assert max(run_ranks(2, output_after_a_step_that_raised, strategy, build)) < 1e-6
