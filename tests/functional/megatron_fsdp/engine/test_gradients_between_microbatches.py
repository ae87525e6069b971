"""If each microbatch's reduction is final on a shard, ``.grad`` shows the sum so far, like in FSDP2."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import FSDPModule, MixedPrecisionPolicy, Placements, StateError
from megatron_fsdp.megatron import fully_shard_model
from tests.harness import on_ranks
from tests.harness.models import Block, inputs
from tests.harness.twins import Twins, sharded

NUM_MICROBATCHES = 3
HSDP, HFSDP, ZERO2 = Placements.hsdp(0, 1), Placements.hfsdp(0, 1), Placements.optim_grads(0)


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False))


def summed_squares(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step, 2, 7)).square().sum()


def shard(model: nn.Sequential, shape: tuple[int, ...], placements: Placements | None) -> Any:
    return sharded(model, mesh=shape, placements=placements)


def shard_as_megatron(model: nn.Sequential, shape: tuple[int, ...], outer: int) -> Any:
    names = ("dp_outer", "dp_shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return fully_shard_model(model, [nn.Linear], 3, outer, mesh, sync_model_each_microbatch=False)


def said_not_to_be_last(model: Any, microbatch: int) -> AbstractContextManager[None]:
    is_last = microbatch == NUM_MICROBATCHES - 1
    if not hasattr(model, "no_sync"):
        model.set_is_last_backward(is_last)
        return nullcontext()
    return nullcontext() if is_last else model.no_sync()


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (shard, ((2,), None)),
        (shard, ((2,), ZERO2)),
        (shard, ((1, 2), HSDP)),
        (shard, ((1, 2), HFSDP)),
        (shard, ((1, 3), HFSDP)),
        (shard_as_megatron, ((2,), 0)),
        (shard_as_megatron, ((1, 2), 0)),
        (shard_as_megatron, ((1, 2), 1)),
    ],
    ids=["zero3", "zero2", "replicas-of-one", "hfsdp-of-one", "hfsdp-of-one-3", "megatron", "megatron-hsdp",
         "megatron-hfsdp"],
)  # fmt: skip
@on_ranks(lambda arguments: arguments[0][-1])
def test_the_gradient_so_far_is_that_of_a_plain_model_and_may_be_scaled(make: Any, arguments: tuple[Any, ...]) -> None:
    twins = Twins(make_model, shard=lambda model: make(model, *arguments))
    for microbatch in range(NUM_MICROBATCHES):
        with said_not_to_be_last(twins.model, microbatch):
            twins.backward(microbatch, summed_squares)
        assert all(parameter.grad.count_nonzero() for parameter in twins.plain.parameters())
        assert twins.gradients_apart() < 1e-5
        if microbatch == 0:
            for parameter in (parameter for model in twins for parameter in model.parameters()):
                parameter.grad.mul_(0.5)


@on_ranks(2)
def test_a_sum_that_replicas_have_parts_of_is_not_shown() -> None:
    model = shard(make_model(), (2, 1), HSDP)
    model.set_is_last_backward(False)
    summed_squares(model, dist.get_rank(), 0).backward()
    with pytest.raises(StateError) as refused:
        model[0].weight.grad.norm()
    text = str(refused.value)
    assert "'weight' is a sum under way, not reduced over all ranks yet" in text


def divided_later(strategy: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a gradient with a divisor set between two microbatches, and with the same divisor set before both."""
    gradients = []
    for is_late in (True, False):
        torch.manual_seed(3)
        model: Any = sharded(Block(5, 7), strategy, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        torch.manual_seed(dist.get_rank())
        for microbatch in range(2):
            if (microbatch == 1) is is_late:
                for unit in (each for each in model.modules() if isinstance(each, FSDPModule)):
                    unit.set_gradient_divide_factor(96.0)
            model.set_requires_gradient_sync(microbatch == 1)
            model(torch.randn(3, 5)).square().sum().backward()
        gradients.append(model.up.weight.grad.full_tensor())
    return gradients[0], gradients[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@on_ranks(3)
def test_a_divisor_set_between_microbatches_divides_gradients_that_wait(strategy: str, dtype: torch.dtype) -> None:
    found, wanted = divided_later(strategy, dtype)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@on_ranks(2)
def test_a_divisor_set_between_microbatches_is_refused_if_sums_are_divided(strategy: str) -> None:
    with pytest.raises(StateError, match=r"from 2 to 96.*fix: call set_gradient_divide_factor\(\) before the first"):
        divided_later(strategy, torch.float32)


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@on_ranks(2)
def test_a_divisor_is_not_refused_for_gradients_that_the_user_has_dropped(strategy: str) -> None:
    model: Any = sharded(nn.Sequential(nn.Linear(3, 5)), strategy)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 3)).sum().backward()
    model.zero_grad()
    model[0].set_gradient_divide_factor(4.0)
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 3)).sum().backward()
    # Two ranks, each with two rows.
    assert torch.equal(model[0].bias.grad.full_tensor(), torch.full((5,), 2 * 2 / 4.0))
