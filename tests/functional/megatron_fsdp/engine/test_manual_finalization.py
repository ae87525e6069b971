"""Gradients that become final in finalize_backward(), not when a backward returns: equal to a plain model's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import GradientReductionHandle, StateError
from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import inputs, squared
from tests.harness.transcript import record_transcript
from tests.harness.twins import Twins

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp")
NUM_MICROBATCHES = 3


def twins_of(strategy: str = "optim_grads_params", *, is_manual: bool = True) -> Twins:
    twins = Twins(strategy=strategy)
    twins.model.set_manual_backward_finalization(is_manual)
    return twins


def run(model: Any, step: int) -> None:
    squared(model, dist.get_rank(), step).backward()


def apart(twins: Twins, steps: range) -> float:
    """Return how far gradients are from the mean over ranks of the sums over microbatches."""
    twins.plain.zero_grad()
    for step in steps:
        twins.plain_backward(step)
    return twins.gradients_apart()


def each_backward(model: Any, finalize: Callable[[Any], None]) -> None:
    for step in range(NUM_MICROBATCHES):
        run(model, step)
        finalize(model)


def all_backwards(model: Any, finalize: Callable[[Any], None]) -> None:
    for step in range(NUM_MICROBATCHES):
        run(model, step)
    finalize(model)


def without_sync(model: Any, finalize: Callable[[Any], None]) -> None:
    model.set_requires_gradient_sync(False)
    for step in range(NUM_MICROBATCHES):
        run(model, step)
    model.set_requires_gradient_sync(True)
    finalize(model)


def not_last(model: Any, finalize: Callable[[Any], None]) -> None:
    model.set_is_last_backward(False)
    all_backwards(model, finalize)


def at_once(model: Any) -> None:
    assert model.finalize_backward() is None


def later(model: Any) -> None:
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, GradientReductionHandle)
    handle.wait()
    handle.wait()


@pytest.mark.parametrize("strategy", nightly_but(["optim", "optim_grads_params"], STRATEGIES))
@on_ranks(lambda strategy: 4 if strategy == "hsdp" else 2)
def test_gradients_are_a_plain_models_once_they_are_finalized(strategy: str) -> None:
    found = []
    for schedule in (each_backward, all_backwards, without_sync, not_last):
        for finalize in (at_once, later):
            twins = twins_of(strategy)
            # A second step of the same model, with other gradients.
            for _ in range(2):
                schedule(twins.model, finalize)
                found.append(apart(twins, range(NUM_MICROBATCHES)))
                twins.model.zero_grad()
    assert len(found) == 16
    assert max(found) < 2e-6


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_nothing_reads_or_steps_with_gradients_that_are_not_finalized(strategy: str) -> None:
    model = twins_of(strategy).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []

    def collect(action: Callable[[], object]) -> None:
        with pytest.raises(StateError) as error:
            action()
        said.append(str(error.value))

    run(model, 0)
    weight = next(model.parameters())
    collect(lambda: weight.grad + 1)
    collect(optimizer.step)
    handle = model.finalize_backward(async_op=True)
    collect(lambda: weight.grad + 1)
    collect(model.finalize_backward)
    handle.wait()
    optimizer.step()
    assert ["call finalize_backward() if that is manual" in one for one in said] == [True] * 3 + [False]
    assert "finalize_backward() was called before wait() of the last handle" in said[3]


@on_ranks(2)
def test_a_step_can_be_dropped_before_finalize_backward() -> None:
    twins, found = twins_of(), []
    model = twins.model
    for how in ("zero_grad", "zero_grad", "reset_iter_state"):
        run(model, 0)
        getattr(model, how)()
        run(model, 1)
        model.finalize_backward()
        found.append(apart(twins, range(1, 2)))
        model.zero_grad()
    run(model, 0)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    with pytest.raises(StateError, match=r"after reset_iter_state\(\), which dropped the gradients"):
        handle.wait()
    assert all(parameter.grad is None for parameter in model.parameters())
    run(model, 1)
    model.finalize_backward()
    found.append(apart(twins, range(1, 2)))
    assert len(found) == 4
    assert max(found) < 2e-6


@on_ranks(2)
def test_finalizing_without_a_backward_changes_nothing() -> None:
    twins = twins_of(is_manual=False)
    model = twins.model
    assert model.finalize_backward() is None
    model.finalize_backward(async_op=True).wait()
    model.set_manual_backward_finalization(True)
    model(inputs(0, 0))
    model.finalize_backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    # A backward that reaches no parameter.
    x = inputs(0, 0).requires_grad_()
    (x * 2).sum().backward()
    model.finalize_backward()
    run(model, 0)
    model.finalize_backward()
    before = apart(twins, range(1))
    model.finalize_backward()
    assert apart(twins, range(1)) == before < 2e-6
    # Let backward finalize by itself again.
    model.set_manual_backward_finalization(False)
    model.zero_grad()
    run(model, 0)
    assert apart(twins, range(1)) < 2e-6


@on_ranks(2)
def test_wrong_calls_of_manual_finalization_are_refused_by_name() -> None:
    said = []

    def collect(action: Callable[[], object]) -> None:
        with pytest.raises(StateError) as error:
            action()
        said.append(str(error.value))

    model = twins_of(is_manual=False).model
    collect(lambda: model.layers[0].set_manual_backward_finalization(True))
    run(model, 0)
    collect(model.finalize_backward)
    model.set_manual_backward_finalization(True)
    collect(model.layers[0].finalize_backward)
    hook = model.layers[1].register_forward_hook(
        lambda module, args, out: out.register_hook(lambda grad: collect(model.finalize_backward)) and None
    )
    run(model, 0)
    hook.remove()
    collect(lambda: model.set_manual_backward_finalization(False))
    assert "set_manual_backward_finalization() was called on a unit below the root" in said[0]
    assert "fix: call it on the root module, which is 'Stack'" in said[0]
    assert "finalize_backward() was called without set_manual_backward_finalization(True)" in said[1]
    assert "finalize_backward() was called on a unit below the root" in said[2]
    assert "finalize_backward() was called in a backward" in said[3]
    assert "set_manual_backward_finalization(False) in or after a backward that is not finalized" in said[4]


@on_ranks(2)
def test_reductions_start_in_backward_and_are_added_in_finalize_backward() -> None:
    model = twins_of().model
    run(model, 0)
    model.finalize_backward()
    model.zero_grad()
    loss = squared(model, dist.get_rank(), 1)
    parts = []
    for action in (loss.backward, model.finalize_backward):
        with record_transcript() as transcript:
            action()
        parts.append(list(transcript))
    during, after = parts
    assert sum("reduce" in line for line in during) >= 2
    assert not any("final" in line for line in during)
    assert sum("final" in line for line in after) >= 2
