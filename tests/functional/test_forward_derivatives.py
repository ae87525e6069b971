"""Derivatives in forward mode through sharded units equal those of the whole model, whoever gathers the weights."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad

from megatron_fsdp import fully_shard
from tests.harness import on_ranks
from tests.harness.grids import covering, nightly_but
from tests.harness.models import inputs, three_blocks
from tests.harness.oracle import whole

# PyTorch's own rules for forward mode are scripted when they are first needed.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:`torch.jit.script:{kind}") for kind in ("DeprecationWarning", "FutureWarning")
]

Pair = tuple[torch.Tensor, torch.Tensor]


def by_jvp(model: nn.Module, x: torch.Tensor, tangent: torch.Tensor) -> Pair:
    return torch.func.jvp(model, (x,), (tangent,))


def by_jacobian(model: nn.Module, x: torch.Tensor, tangent: torch.Tensor) -> Pair:
    jacobian = torch.func.jacfwd(lambda each: model(each).sum())(x)
    return jacobian, (jacobian * tangent).sum()


def by_dual_numbers(model: nn.Module, x: torch.Tensor, tangent: torch.Tensor) -> Pair:
    with forward_ad.dual_level():
        output = forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent)))
        assert output.tangent is not None
        return output.primal, output.tangent


WAYS: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], Pair]] = {
    "jvp": by_jvp,
    "jacfwd": by_jacobian,
    "dual numbers": by_dual_numbers,
}


RUNS = list(product(WAYS, (True, False), (True, False)))


@pytest.mark.parametrize(("name", "is_released", "is_recorded"), nightly_but(covering(RUNS), RUNS))
@on_ranks(2)
def test_derivatives_along_inputs_equal_the_whole_models(name: str, is_released: bool, is_recorded: bool) -> None:
    torch.manual_seed(0)
    model = three_blocks()
    torch.manual_seed(0)
    oracle = three_blocks()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=is_released)
    fully_shard(model, reshard_after_forward=is_released)
    x, tangent = inputs(dist.get_rank(), 0), inputs(dist.get_rank(), 1)
    with torch.set_grad_enabled(is_recorded):
        pairs = zip(WAYS[name](model, x, tangent), WAYS[name](oracle, x, tangent), strict=True)
        derivatives = max(float((found - wanted).detach().abs().max()) for found, wanted in pairs)
    model(x).square().mean().backward()
    for rank in range(dist.get_world_size()):
        (oracle(inputs(rank, 0)).square().mean() / dist.get_world_size()).backward()
    gradients = 0.0
    for parameter, wanted_parameter in zip(model.parameters(), oracle.parameters(), strict=True):
        assert wanted_parameter.grad is not None
        difference = whole(parameter.grad, parameter) - wanted_parameter.grad
        gradients = max(gradients, float(difference.abs().max()))
    assert derivatives < 1e-5
    assert gradients < 1e-5


@pytest.mark.parametrize("is_released", [True, False], ids=["released", "kept"])
@pytest.mark.parametrize("name", WAYS)
@on_ranks(2)
def test_gradients_of_derivatives_along_inputs_equal_the_whole_models(name: str, is_released: bool) -> None:
    torch.manual_seed(0)
    model = three_blocks()
    torch.manual_seed(0)
    oracle = three_blocks()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=is_released)
    fully_shard(model, reshard_after_forward=is_released)

    def loss(trained: nn.Module, rank: int) -> torch.Tensor:
        value, derivative = WAYS[name](trained, inputs(rank, 0), inputs(rank, 1))
        return value.square().mean() + derivative.square().mean()

    loss(model, dist.get_rank()).backward()
    for rank in range(dist.get_world_size()):
        (loss(oracle, rank) / dist.get_world_size()).backward()
    pairs = zip(model.parameters(), oracle.parameters(), strict=True)
    assert (
        max(float((whole(one.grad, one) - other.grad).abs().max()) for one, other in pairs if other.grad is not None)
        < 1e-5
    )


@pytest.mark.parametrize("is_released", [True, False], ids=["released", "kept"])
@on_ranks(2)
def test_a_transform_that_records_its_own_backward_is_refused_by_the_units_name(is_released: bool) -> None:
    torch.manual_seed(0)
    model = three_blocks()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=is_released)
    fully_shard(model, reshard_after_forward=is_released)
    with pytest.raises(ValueError) as refused:
        torch.func.grad(lambda x: model(x).sum())(inputs(0, 0))
    found = str(refused.value)
    assert found.startswith("unit ")
    assert "create_graph=True is not supported" in found
