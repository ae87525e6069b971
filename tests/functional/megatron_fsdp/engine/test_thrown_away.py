"""Errors after microbatches that were dropped or interrupted; allowed uses are in ``random_use.cases``."""

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import StateError, clip_grad_norm_, no_sync
from megatron_fsdp.engine import backward
from megatron_fsdp.engine.accumulation import GradBinding
from megatron_fsdp.engine.unit import Root
from tests.harness import on_ranks
from tests.harness.models import Block, Headed, inputs, make_mesh, squared
from tests.harness.twins import Twins, sharded


def build() -> nn.Module:
    return Headed(Block(), Block(hidden=1), Block(), outputs=3)


def made(strategy: str) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {"mesh": make_mesh((2, 1))} if strategy == "hsdp" else {}
    return sharded(build(), strategy, **options)


def train(model: nn.Module, step: int) -> None:
    squared(model, dist.get_rank(), step).backward()


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
@on_ranks(2)
def test_a_sum_under_way_is_not_read_as_a_gradient(strategy: str) -> None:
    model = made(strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    with no_sync(model):
        train(model, 0)
    model.reshard()
    reads: list[tuple[str, Callable[[], object]]] = [
        ("", optimizer.step),
        ("", lambda: clip_grad_norm_(model, 1.0)),
        ("", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        ("parameter 'head.weight'.*", lambda: model.head.weight.grad.full_tensor().sum()),
        ("parameter 'head.weight'.*", lambda: model.head.weight.grad.mul_(0.5)),
    ]
    for name, read in reads:
        with pytest.raises(
            StateError, match=rf"(?s){name}(is a sum under way|before gradients are final).*outside of no_sync"
        ):
            read()
    for one, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(one, parameter.to_local())


def fail(model: Any, step: int) -> None:
    """Run forward and backward of a step; a hook behind the middle block raises."""

    def explode(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.layers[1].register_forward_hook(lambda module, _, output: output.register_hook(explode) and None)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(model, step)
    handle.remove()


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim", "hsdp"])
@on_ranks(2)
def test_training_on_gradients_of_a_failed_backward_is_refused(strategy: str) -> None:
    model = made(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, 0)
    fail(model, 1)
    # Units behind the one that raised have gradients; so has the root if the strategy keeps gradients from the start.
    incomplete = (
        r"unit '(layers\.2|Headed)': the gradient of parameter '.*' is incomplete, because the last backward raised"
    )
    for step in (optimizer.step, lambda: train(model, 2), lambda: train(model, 3)):
        with pytest.raises(StateError) as refused:
            step()
        assert re.match(incomplete, str(refused.value))
        assert "model.reset_iter_state()" in str(refused.value)
    model.reset_iter_state()
    train(model, 4)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard", "hsdp"])
@on_ranks(2)
def test_a_failed_backward_has_ended_though_a_thread_still_holds_its_task(strategy: str) -> None:
    options: dict[str, Any] = {"mesh": make_mesh((2, 1))} if strategy == "hsdp" else {}
    twins = Twins(build, strategy, **options)
    model = twins.model
    held: list[Any] = []
    queue = backward._queue_final_callback

    def keep(root: Root) -> Any:
        reference = queue(root)
        # A device's thread behaves like this until it has dropped the graph task.
        held.append(reference())
        return reference

    with mock.patch.object(backward, "_queue_final_callback", keep):
        fail(model, 0)
    assert held[0] is not None
    # Gradients that the caller dropped before the engine saw the end of the task do not count: it has to drop them now.
    with pytest.raises(StateError, match="is incomplete, because the last backward raised"):
        train(model, 1)
    model.zero_grad()
    twins.backward(1)
    assert twins.gradients_apart() < 1e-6


@pytest.mark.parametrize("strategy", ["optim", "hsdp"])
@on_ranks(2)
def test_a_sum_that_a_failed_backward_reduced_without_adding_to_it_is_refused(strategy: str) -> None:
    options: dict[str, Any] = {"mesh": make_mesh((2, 1))} if strategy == "hsdp" else {}
    twins = Twins(lambda: Headed(Block(), Block(), outputs=3), strategy, **options)
    model: Any = twins.model
    first, second = model.layers

    model.set_is_last_backward(False)
    train(model, 0)
    model.set_is_last_backward(True)
    # Only the first block gets gradients. The last reductions of all are complete when adding up earlier parts raises.
    with (
        mock.patch.object(GradBinding, "complete", side_effect=RuntimeError("out of memory")),
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        first(inputs(dist.get_rank(), 1)).square().mean().backward()
    with pytest.raises(StateError, match="is incomplete, because the last backward raised"):
        second(inputs(dist.get_rank(), 2)).square().mean().backward()
    model.zero_grad()
    twins.backward(3)
    assert twins.gradients_apart() < 1e-6
