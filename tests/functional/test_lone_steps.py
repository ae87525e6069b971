"""Changes that one rank makes alone, and weights that modules show between forwards and steps."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import StateError, no_sync, unsharded
from tests.harness import RankError, on_ranks, run_ranks
from tests.harness.models import Block, Made, Stack, inputs, squared
from tests.harness.oracle import whole
from tests.harness.timeouts import give_up_after
from tests.harness.twins import Twins, sharded

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def build() -> nn.Module:
    return Stack(Block(), Block(hidden=5))


def headed() -> nn.Module:
    """Return a model whose root has parameters, which stay gathered after forward."""
    return Made(lambda m, x: m.head(m.body(x)), body=build(), head=nn.Linear(7, 7))


def step_on_rank_0(probe: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step a plain model of rank 0 alone."""
    if dist.get_rank() == 0:
        probe(torch.ones(2, 3)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("keeps_weights", [False, True])
@pytest.mark.parametrize("accumulation", ["two forwards", "no_sync"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_an_optimizer_of_one_rank_alone_makes_no_difference(
    strategy: str, accumulation: str, keeps_weights: bool
) -> None:
    twins = Twins(headed, strategy)
    if keeps_weights:
        twins.model.set_reshard_after_backward(False)
    ours, theirs = twins.optimizers(torch.optim.SGD, lr=0.1)
    probe = nn.Linear(3, 3)
    lone, rank = torch.optim.SGD(probe.parameters(), lr=0.1), dist.get_rank()
    for step in range(5):
        losses = []
        with no_sync(twins.model) if accumulation == "no_sync" else contextlib.nullcontext():
            losses.append(squared(twins.model, rank, 2 * step))
            if accumulation == "no_sync":
                losses.pop().backward()
        step_on_rank_0(probe, lone)
        losses.append(squared(twins.model, rank, 2 * step + 1))
        sum(losses, torch.zeros(())).backward()
        step_on_rank_0(probe, lone)
        for number in (2 * step, 2 * step + 1):
            twins.plain_backward(number)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert twins.weights_apart() < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_block_with_a_change_through_numpy_is_refused_on_all_ranks(strategy: str) -> None:
    model = sharded(build(), strategy)
    loss = squared(model, dist.get_rank(), 0)
    with unsharded(model, writeback=True):
        # The first row is on rank 0 alone.
        model.layers[0].up.weight.detach().numpy()[:1] *= 2
    with pytest.raises(StateError, match=r"unit 'layers\.0': its main weights .* were changed between a forward"):
        loss.backward()


def change_rows_of_rank_0() -> None:
    give_up_after(5.0)
    model = sharded(build(), "optim_grads_params")
    for step in range(4):
        squared(model, dist.get_rank(), step).backward()
        model.zero_grad()
    loss = squared(model, dist.get_rank(), 0)
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.layers[0].norm.weight.to_local().mul_(2)
    loss.backward()


def test_the_other_ranks_quote_a_refusal_on_one_rank() -> None:
    with pytest.raises(RankError) as found:
        run_ranks(2, change_rows_of_rank_0, timeout=120, fresh=True)
    texts = {failure.rank: failure.report for failure in found.value.failures}
    assert "StateError: unit 'layers.0': its main weights" in texts[0], texts
    assert "rank 0 raised StateError: unit 'layers.0': its main weights" in texts[1], texts


@pytest.mark.parametrize("reshard", [None, True, False])
@on_ranks(2)
def test_modules_show_current_weights_after_an_evaluation_and_a_step(reshard: bool | None) -> None:
    model = sharded(headed(), reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    held = list(model.parameters())
    squared(model, dist.get_rank(), 0).backward()
    with torch.no_grad():
        squared(model, dist.get_rank(), 1)
    optimizer.step()
    for shown, parameter in zip(model.parameters(), held, strict=True):
        assert torch.equal(whole(shown, shown), whole(parameter, parameter))


def _teacher_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    student: torch.Tensor = model.student(x)
    with torch.no_grad():
        for mine, other in zip(model.student.parameters(), model.teacher.parameters(), strict=True):
            other.mul_(0.9).add_(mine, alpha=0.1)
        teacher = model.teacher(x + 1)
    return student * teacher


def momentum_teacher() -> nn.Module:
    model = Made(_teacher_step, student=Block(), teacher=Block())
    model.teacher.requires_grad_(False)
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_teacher_follows_the_student_inside_of_forward(strategy: str) -> None:
    twins = Twins(momentum_teacher, strategy)
    optimizers = twins.optimizers(torch.optim.SGD, lr=0.1)
    for _ in range(3):
        # Every rank has the same input, so that the whole model runs one forward for all of them.
        twins.model(inputs(0, 0)).square().mean().backward()
        twins.plain(inputs(0, 0)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert twins.weights_apart() < 1e-5


@pytest.mark.filterwarnings("ignore:.*was used by")
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_weight_that_is_read_after_its_unit_s_forward_gets_its_gradient(strategy: str) -> None:
    def compute(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.first(x)
        penalty = m.first.up.weight.square().sum()
        return m.second(x) + 0.1 * penalty

    twins = Twins(lambda: Made(compute, first=Block(), second=Block()), strategy)
    for step in range(2):
        twins.backward(step)
        assert twins.gradients_apart() < 1e-5
        twins.zero_grad()
