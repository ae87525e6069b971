"""Forward-mode derivatives and ``vmap`` through sharded units equal those of the whole model."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad

from tests.harness import on_ranks
from tests.harness.grids import covering, nightly_but
from tests.harness.models import WIDTH, inputs, three_blocks
from tests.harness.twins import Twins, sharded

# PyTorch compiles its rules for forward mode at first use.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:`torch.jit.script:{kind}") for kind in ("DeprecationWarning", "FutureWarning")
]

Pair = tuple[torch.Tensor, torch.Tensor]


def by_dual_numbers(model: nn.Module, x: torch.Tensor, tangent: torch.Tensor) -> Pair:
    with forward_ad.dual_level():
        output = forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent)))
        assert output.tangent is not None
        return output.primal, output.tangent


WAYS: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], Any]] = {
    "jvp": lambda model, x, tangent: torch.func.jvp(model, (x,), (tangent,)),
    "jacfwd": lambda model, x, tangent: (
        jacobian := torch.func.jacfwd(lambda each: model(each).sum())(x), (jacobian * tangent).sum()
    ),
    "dual numbers": by_dual_numbers,
}  # fmt: skip


RUNS = list(product(WAYS, (True, False), (True, False)))


@pytest.mark.parametrize(("name", "is_released", "is_recorded"), nightly_but(covering(RUNS), RUNS))
@on_ranks(2)
def test_derivatives_along_inputs_equal_the_whole_models(name: str, is_released: bool, is_recorded: bool) -> None:
    twins = Twins(reshard_after_forward=is_released)
    x, tangent = inputs(dist.get_rank(), 0), inputs(dist.get_rank(), 1)
    with torch.set_grad_enabled(is_recorded):
        pairs = zip(*(WAYS[name](model, x, tangent) for model in twins), strict=True)
        assert max(float((found - wanted).detach().abs().max()) for found, wanted in pairs) < 1e-5
    twins.backward()
    assert twins.gradients_apart() < 1e-5


@pytest.mark.parametrize("is_released", [True, False], ids=["released", "kept"])
@pytest.mark.parametrize("name", WAYS)
@on_ranks(2)
def test_gradients_of_derivatives_along_inputs_equal_the_whole_models(name: str, is_released: bool) -> None:
    twins = Twins(reshard_after_forward=is_released)

    def loss(model: nn.Module, rank: int, _: int) -> torch.Tensor:
        value, derivative = WAYS[name](model, inputs(rank, 0), inputs(rank, 1))
        return value.square().mean() + derivative.square().mean()

    twins.backward(0, loss)
    assert twins.gradients_apart() < 1e-5


@pytest.mark.parametrize("is_released", [True, False], ids=["released", "kept"])
@pytest.mark.parametrize("is_mapped", [False, True])
@on_ranks(2)
def test_a_transform_that_records_its_own_backward_is_refused_by_the_units_name(
    is_mapped: bool, is_released: bool
) -> None:
    model = sharded(three_blocks(), reshard_after_forward=is_released)
    function = torch.vmap(model) if is_mapped else model
    with pytest.raises(ValueError) as refused:
        torch.func.grad(lambda x: function(x).sum())(inputs(0, 0))
    found = str(refused.value)
    assert found.startswith("unit ")
    assert "create_graph=True is not supported" in found


@pytest.mark.parametrize("is_released", [True, False], ids=["released", "kept"])
@pytest.mark.parametrize("depth", [1, 2])
@on_ranks(2)
def test_a_model_mapped_over_samples_trains_like_the_whole_model(depth: int, is_released: bool) -> None:
    twins = Twins(reshard_after_forward=is_released)
    optimizers = twins.optimizers(torch.optim.SGD, lr=0.1)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        mapped = torch.vmap(model) if depth == 1 else torch.vmap(torch.vmap(model))
        output: torch.Tensor = mapped(inputs(rank, step, *(2, 3)[:depth], WIDTH))
        return output.square().mean()

    for step in range(2):
        twins.backward(step, loss)
        assert twins.gradients_apart() < 1e-5
        twins.step(optimizers)
    assert twins.weights_apart() < 1e-5
