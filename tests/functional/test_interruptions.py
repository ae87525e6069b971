"""A step that is broken off anywhere, by an interrupt or for want of memory, and what a model is worth after it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer.collectives_rare import wait_with
from dbuffer.storage import FlatStorage
from megatron_fsdp import AdamW, fully_shard_optimizer
from tests.functional.interruptions import SWEEPS, Sweep, run
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import WIDTH, Block, Headed, Stack, inputs, squared
from tests.harness.oracle import whole
from tests.harness.twins import Twins

ZERO = ("no_shard", "optim", "optim_grads", "optim_grads_params")


# What ends in a norm has small gradients alone when backward begins, which wait to be copied together.
LAST: dict[str, Callable[[], Any]] = {
    "head": lambda: Headed(Block(), Block(), nn.LayerNorm(WIDTH)),
    "norm": lambda: Stack(Block(), Block(), nn.LayerNorm(WIDTH)),
}


def twins_of(strategy: str, last: str = "head", *, frozen: bool = False) -> Twins:
    """Return twins.

    Args:
        frozen: norms are; they have buffers of their own, which are gathered with the others'.
    """

    def build() -> nn.Module:
        model = LAST[last]()
        for layer in model.layers[:2] if frozen else ():
            layer.norm.requires_grad_(False)
        return model

    return Twins(build, strategy)


@contextmanager
def interrupted_at(file: str, function: str, number: int = 1) -> Iterator[list[Any]]:
    """Interrupt, as Ctrl-C does, the ``number``-th call of a function while the block runs; it has to come.

    Yields:
        A list, which gets the interrupt.
    """
    calls, kept = 0, list[Any]()

    def profile(frame: Any, event: str, _: object) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file):
            calls += 1
            if calls == number:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            yield kept
        kept.append(caught.value)
    finally:
        sys.setprofile(None)


def distance(twins: Twins, step: int) -> float:
    # With gradients: an evaluation refreshes weights in any case.
    mine, wanted = (model(inputs(dist.get_rank(), step)) for model in twins)
    return (mine - wanted).abs().max().item()


def worst_gradient_after(twins: Twins, *steps: int) -> float:
    """Run a forward and a backward of both for each step, and return how far gradients were from the plain model's."""
    found = []
    for step in steps:
        twins.zero_grad()
        twins.backward(step)
        found.append(twins.gradients_apart())
    return max(found)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_a_gather_of_new_weights_that_was_interrupted_is_made_by_the_next_forward(strategy: str) -> None:
    twins = twins_of(strategy)
    twins.backward()
    for optimizer in twins.optimizers(torch.optim.SGD, lr=0.1):
        optimizer.step()
        optimizer.zero_grad()
    with interrupted_at("collectives.py", "all_gather"):
        twins.model(inputs(dist.get_rank(), 1))
    assert distance(twins, 2) < 1e-6


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


@pytest.mark.parametrize("build", [fused, refreshing, adamw])
@pytest.mark.parametrize("strategy", ZERO)
@on_ranks(2)
def test_weights_that_an_interrupted_step_has_changed_are_those_of_the_next_forward(
    strategy: str, build: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    twins = twins_of(strategy)
    model, plain = twins
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
    assert distance(twins, 2) < 1e-6


@on_ranks(2)
def test_a_gather_that_failed_is_made_again_by_the_next_forward() -> None:
    twins = twins_of("optim_grads_params")
    model = twins.model
    assert distance(twins, 0) < 1e-6
    failed: list[dist.Work] = []

    def fail(work: dist.Work) -> None:
        work.wait()
        if work is (failed or [work])[0]:
            failed.append(work)
            raise RuntimeError("timed out")

    with wait_with(fail):
        with pytest.raises(RuntimeError, match="timed out"):
            model(inputs(dist.get_rank(), 1))
        assert distance(twins, 2) < 1e-6


@on_ranks(2)
def test_a_wait_that_was_interrupted_is_made_again_before_weights_are_used() -> None:
    twins = twins_of("optim_grads_params", frozen=True)
    with interrupted_at("gloo.py", "sort"):
        twins.model(inputs(dist.get_rank(), 1))
    assert distance(twins, 2) < 1e-6


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("strategy", ZERO)
@on_ranks(2)
def test_gradients_are_right_after_there_was_no_memory_for_the_first_ones(strategy: str, last: str) -> None:
    twins = twins_of(strategy, last)
    model = twins.model
    wanted = model.layers[1].parameter_groups[0].main_grad.storage
    reallocate, asked = FlatStorage.reallocate, []

    def no_memory(storage: FlatStorage) -> None:
        if storage is wanted and not asked:
            asked.append(storage)
            raise torch.OutOfMemoryError("simulated")
        reallocate(storage)

    with mock.patch.object(FlatStorage, "reallocate", no_memory), pytest.raises(torch.OutOfMemoryError):
        squared(model, dist.get_rank(), 0).backward()
    assert worst_gradient_after(twins, 1, 2) < 1e-6


# The last two are for what is reduced while backward runs, and for weights that come and go.
INTERRUPTED = (
    ("gradients.py", "wait"), ("grad_binding.py", "begin_sum"), ("backward.py", "begin"), ("backward.py", "finish"),
    ("backward.py", "drain"), ("gradients.py", "fold"), ("fsdp_params.py", "brought_back"),
)  # fmt: skip
INTERRUPTS = [
    *(("no_shard", *place) for place in INTERRUPTED[:-2]),
    *(("optim_grads_params", *place) for place in INTERRUPTED),
]


@pytest.mark.parametrize(("strategy", "file", "function"), INTERRUPTS)
@on_ranks(2)
def test_gradients_are_right_after_an_interrupt_inside_of_a_backward(strategy: str, file: str, function: str) -> None:
    twins = twins_of(strategy, "norm")
    model = twins.model
    squared(model, dist.get_rank(), 0).backward()
    model.zero_grad()
    loss = squared(model, dist.get_rank(), 1)
    # What is raised refers to all frames that it went through, for as long as the next steps take.
    with interrupted_at(file, function) as kept:
        loss.backward()
    assert worst_gradient_after(twins, 2, 3) < 1e-6
    assert kept


QUICK = [
    Sweep("optim_grads_params", "memory", 13, is_fresh=True),
    Sweep("optim", "memory", 23, is_fresh=True),
    Sweep("slots static", "memory", 17, is_fresh=True),
    Sweep("no_shard", "calls", 401, is_fresh=True),
    Sweep("optim_grads_params", "calls", 401, is_fresh=True),
    Sweep("mixed", "calls", 401),
    Sweep("hfsdp", "calls", 401),
    Sweep("optim_grads, adamw", "calls", 401),
    Sweep("optim, refreshed", "calls", 401, num_ranks=2),
]


@pytest.mark.parametrize("sweep", nightly_but(QUICK, [*QUICK, *SWEEPS]), ids=str)
def test_a_step_that_is_broken_off_anywhere_does_not_show_in_those_after_it(sweep: Sweep) -> None:
    for found in run_ranks(sweep.num_ranks, run, sweep, timeout=1200):
        assert found.num_steps >= 5
        assert found.wrong == []
