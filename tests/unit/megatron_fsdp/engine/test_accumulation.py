"""The sum of a group's gradients exists from the first gradient of a step until ``.grad`` shows it."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import Placements, StateError, fully_shard, no_sync
from megatron_fsdp.engine.accumulation import GradBinding
from megatron_fsdp.engine.pending_gradient import PendingGradient
from tests.harness.models import RaisesInBackward

pytestmark = pytest.mark.usefixtures("eight_ranks")


def linear(placements: Placements | None = None) -> tuple[Any, GradBinding]:
    model: Any = fully_shard(nn.Linear(7, 3), placements=placements or Placements.optim_grads_params(0))
    (group,) = model.parameter_groups
    assert group.gradient_buffer is not None
    return model, group.gradient_buffer.binding


def microbatch(model: Any) -> None:
    model(torch.ones(2, 7)).sum().backward()


def test_a_sum_exists_from_the_first_gradient_until_grad_shows_it() -> None:
    model, binding = linear()
    assert (binding.sum, binding.has_final) == (None, False)
    with no_sync(model):
        microbatch(model)
    under_way = binding.sum
    assert under_way is not None
    assert not under_way.is_in_main_grad
    assert isinstance(model.weight.grad, PendingGradient)
    model.set_is_last_backward(False)
    microbatch(model)
    model.set_is_last_backward(True)
    microbatch(model)
    assert (binding.sum, binding.has_final) == (None, True)
    assert not isinstance(model.weight.grad, PendingGradient)


def test_a_partial_sum_of_zero1_lies_in_main_grad() -> None:
    model, binding = linear(Placements.optim(0))
    with no_sync(model):
        microbatch(model)
    assert binding.sum is not None
    assert binding.sum.is_in_main_grad


def test_zero_grad_leaves_neither_a_sum_nor_final_gradients() -> None:
    model, binding = linear()
    microbatch(model)
    model.zero_grad()
    assert (binding.sum, binding.has_final, binding.main_grad.is_allocated) == (None, False, False)


def test_a_second_backward_continues_with_the_gradients_that_grad_shows() -> None:
    model, binding = linear()
    microbatch(model)
    first = model.weight.grad.to_local().clone()
    microbatch(model)
    assert binding.sum is None
    assert torch.equal(model.weight.grad.to_local(), 2 * first)


def test_a_dropped_sum_ends_before_the_next_backward() -> None:
    model, binding = linear()
    microbatch(model)
    alone = model.weight.grad.to_local().clone()
    model.zero_grad()
    with no_sync(model):
        microbatch(model)
    model.zero_grad()
    assert binding.sum is not None
    microbatch(model)
    assert binding.sum is None
    assert torch.equal(model.weight.grad.to_local(), alone)


def test_a_backward_that_raises_leaves_a_void_sum() -> None:
    model, binding = linear()

    x = torch.ones(2, 7, requires_grad=True)
    with pytest.raises(ArithmeticError, match="in backward"):
        model(RaisesInBackward.apply(x)).sum().backward()
    assert binding.sum is not None
    assert binding.sum.is_incomplete
    with pytest.raises(StateError, match="incomplete"):
        model.weight.grad.norm()
    model.reset_iter_state()
    found: Any = (binding.sum, binding.has_final, model.weight.grad)
    assert found == (None, False, None)
