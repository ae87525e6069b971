"""What autograd asks for beside a plain backward does not disturb gradients that are multiplied into packed buffers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import CollectiveCall, observe_collectives
from megatron_fsdp import FsdpModule, MixedPrecisionPolicy, fully_shard
from tests.functional.linear_uses import Layer, counted_products, shard_as, stack_of
from tests.harness import on_ranks, run_ranks
from tests.harness.models import WIDTH, Stack, inputs, squared, three_blocks
from tests.harness.oracle import Case, Comparison, compare


@pytest.mark.parametrize("backward", [False, True], ids=["autograd.grad", "backward(inputs=)"])
@on_ranks(2)
def test_a_backward_for_inputs_alone_multiplies_no_weight_gradient_and_reduces_nothing(backward: bool) -> None:
    torch.manual_seed(0)
    oracle = three_blocks()
    torch.manual_seed(0)
    model = three_blocks()
    shard_as("optim_grads_params", MixedPrecisionPolicy())(model)
    x = inputs(dist.get_rank(), 0).requires_grad_()
    (wanted,) = torch.autograd.grad(oracle(x).square().sum(), x)
    collectives: list[CollectiveCall] = []
    with counted_products() as products, observe_collectives(collectives.append):
        loss = model(x).square().sum()
        if backward:
            loss.backward(inputs=[x])
            found = x.grad
            assert found is not None
        else:
            (found,) = torch.autograd.grad(loss, x)
    num_gradients = sum(parameter.grad is not None for parameter in model.parameters())
    num_reductions = sum(call.kind != "all_gather" for call in collectives)
    worst, *counts = float((found - wanted).abs().max()), len(products), num_gradients, num_reductions
    assert worst < 1e-6
    assert counts == [0, 0, 0]


@on_ranks(1)
def test_the_gradient_of_a_gathered_weight_that_is_asked_for_goes_to_who_asked() -> None:
    torch.manual_seed(0)
    model, kept = Layer(), []
    oracle = nn.Linear(WIDTH, WIDTH)
    oracle.load_state_dict(model.linear.state_dict())
    model.linear.register_forward_hook(lambda module, *_: kept.append(module.weight))
    fully_shard(model)
    x = inputs(0, 0)
    with counted_products() as products:
        (found,) = torch.autograd.grad(model(x).square().sum(), kept)
    (wanted,) = torch.autograd.grad((x + torch.tanh(oracle(x))).square().sum(), oracle.weight)
    worst = float((found - wanted).abs().max())
    products = len(products)
    assert worst < 1e-5
    assert products == 0


class Withholding(torch.autograd.Function):
    """A linear layer's output, with a gradient for the input alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return gradients[0] @ weight, None


class Withheld(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Withholding.apply(x, self.linear.weight)


@on_ranks(2)
def test_a_weight_that_gets_neither_gradient_nor_product_counts_as_unused() -> None:
    model = Stack(Withheld(), Withheld())
    shard_as("optim_grads_params", MixedPrecisionPolicy())(model)
    calls: list[CollectiveCall] = []
    loss = squared(model, dist.get_rank(), 0)
    with observe_collectives(calls.append):
        loss.backward()
    has_gradient = [parameter.grad is not None for parameter in model.parameters()]
    kinds = [call.kind for call in calls]
    assert not any(has_gradient)
    assert set(kinds) <= {"all_gather"}


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("backward went wrong")


class Breakable(Layer):
    """Uses its layer twice, and fails between the two in backward when told."""

    is_broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        if self.is_broken and isinstance(self, FsdpModule):
            x = Failing.apply(x)
        return self.linear(x)


def fail_first(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Run a backward that raises with one of two products done, then return the loss of another forward."""
    for layer in model.layers:
        layer.is_broken = True
    if isinstance(model, FsdpModule):
        with pytest.raises(ArithmeticError):
            (100 * squared(model, rank, step)).backward()
        model.zero_grad()
    for layer in model.layers:
        layer.is_broken = False
    return squared(model, rank, step)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@on_ranks(2)
def test_a_backward_that_raises_between_two_products_leaves_nothing_behind(strategy: str) -> None:
    shard = shard_as(strategy, MixedPrecisionPolicy())
    result = compare(Case(stack_of(Breakable, Breakable), fail_first, shard=shard))
    assert result.is_exact, result


def train_in_anomaly_mode() -> Comparison:
    with torch.autograd.set_detect_anomaly(True):
        return compare(Case(three_blocks, squared))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_finds_nothing_wrong_with_products() -> None:
    assert all(result.is_exact for result in run_ranks(2, train_in_anomaly_mode))
