"""State that must survive: low halves of split weights, weights of ``join``, sums after an error, what was sent."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import (
    AdamW,
    MixedPrecisionPolicy,
    StateError,
    apply_delta,
    fully_shard,
    join,
    no_sync,
    remember_weights,
    weight_stream,
)
from megatron_fsdp.engine.grad_memory import GradMemory
from tests.harness import on_ranks
from tests.harness.models import Block, Stack, inputs, squared
from tests.harness.oracle import whole
from tests.harness.twins import Twins, sharded


def build() -> nn.Module:
    return Stack(Block(), Block(hidden=5))


@on_ranks(2)
def test_a_fused_step_keeps_the_low_halves_of_split_weights() -> None:
    found = []
    for fused in (None, True):
        torch.manual_seed(0)
        model = sharded(build(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, split_main_params=True))
        optimizer = AdamW(model.parameters(), lr=1e-4, fused=fused)
        for step in range(5):
            squared(model, dist.get_rank(), step).backward()
            optimizer.step()
            optimizer.zero_grad()
        groups = [group for layer in model.layers for group in layer.parameter_groups]
        found.append([group.weights.values().local_buffer.clone() for group in groups])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@on_ranks(2)
def test_join_counts_right_while_earlier_gradients_are_kept() -> None:
    twins = Twins(build)
    rank = dist.get_rank()
    squared(twins.model, rank, 5).backward()
    kept = [[parameter.grad for parameter in twins.model.parameters()]]
    twins.model.zero_grad()
    # Rank 0 has one batch, rank 1 has two.
    with join(twins.model, [inputs(rank, step) for step in range(1 + rank)]) as joined:
        for number, batch in enumerate(joined):
            twins.model(batch).square().mean().backward()
            own = [0, 1] if number == 0 else [1]
            sum(twins.plain(inputs(each, number)).square().mean() / len(own) for each in own).backward()
            assert twins.gradients_apart() < 1e-5
            kept.append([parameter.grad for parameter in twins.model.parameters()])
            twins.zero_grad()
    assert len(kept) == 3


def _copies(parameters: Iterator[nn.Parameter]) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """Return an optimizer over FP32 copies of the local parts, and a function that steps and writes back."""
    held: list[Any] = list(parameters)
    masters = [nn.Parameter(each.to_local().detach().float().clone()) for each in held]
    optimizer = torch.optim.SGD(masters, lr=0.3)

    def step() -> None:
        for master, parameter in zip(masters, held, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.to_local().float().clone()
        optimizer.step()
        for master, parameter in zip(masters, held, strict=True):
            parameter.to_local().data.copy_(master)
            parameter.grad = None

    return optimizer, step


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("keeps_weights", [False, True])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_weights_follow_an_optimizer_over_copies(strategy: str, keeps_weights: bool, evaluates: bool) -> None:
    twins = Twins(build, strategy)
    rank = dist.get_rank()
    if keeps_weights:
        twins.model.set_reshard_after_backward(False)
    _, step = _copies(twins.model.parameters())
    theirs = torch.optim.SGD(twins.plain.parameters(), lr=0.3)
    for number in range(3):
        twins.backward(number)
        if evaluates:
            with torch.no_grad():
                squared(twins.model, rank, 7)
        step()
        theirs.step()
        theirs.zero_grad()
    twins.backward(4)
    assert twins.gradients_apart() < 1e-5


@on_ranks(2)
def test_gradients_are_refused_after_an_asynchronous_finalization_that_raised() -> None:
    twins = Twins(build)
    model: Any = twins.model
    model.set_manual_backward_finalization(True)
    with no_sync(model):
        squared(model, dist.get_rank(), 0).backward()
    with (
        mock.patch.object(GradMemory, "allocate", side_effect=RuntimeError("out of memory")),
        pytest.raises(RuntimeError),
    ):
        model.finalize_backward(async_op=True)
    with pytest.raises(StateError, match=r"is incomplete, because the last backward raised.*zero_grad"):
        squared(model, dist.get_rank(), 1).backward()
    model.reset_iter_state()
    model.zero_grad()
    squared(model, dist.get_rank(), 1).backward()
    model.finalize_backward()
    twins.plain_backward(1)
    assert twins.gradients_apart() < 1e-5


class Normed(nn.Module):
    """A linear layer behind batch normalization, whose buffers change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.norm(x))
        return result


@on_ranks(2)
def test_a_buffer_that_changes_during_a_stream_of_changes_is_sent_by_the_next_one() -> None:
    torch.manual_seed(0)
    model: Any = Normed()
    fully_shard(model)
    received = {name: tensor.clone() for name, tensor in weight_stream(model)}
    version = remember_weights(model)
    model(inputs(0, 0))
    for changes_meanwhile in (True, False):
        stream = weight_stream(model, changed_since=version)
        for number, delta in enumerate(stream):
            if changes_meanwhile and number == 0:
                model(inputs(0, 1))
            apply_delta(received, delta, version=version)
        version = stream.version
    for name, tensor in weight_stream(model):
        assert torch.equal(received[name], tensor), name


@on_ranks(2)
def test_an_optimizer_whose_parameters_are_exchanged_counts_for_the_new_ones() -> None:
    first, second = sharded(build()), sharded(build(), reshard_after_forward=False)
    held = list(second.parameters())
    optimizer = torch.optim.SGD(first.parameters(), lr=1.0)
    squared(first, dist.get_rank(), 0).backward()
    optimizer.step()
    squared(second, dist.get_rank(), 0).backward()
    optimizer.param_groups[0]["params"] = held
    with torch.no_grad():
        squared(second, dist.get_rank(), 1)
    optimizer.step()
    for shown, parameter in zip(second.parameters(), held, strict=True):
        assert torch.equal(whole(shown, shown), whole(parameter, parameter))
