"""If each microbatch's reduction is final on a shard, ``.grad`` shows the sum so far, like in FSDP2."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import Placements, StateError, fully_shard
from megatron_fsdp.megatron import fully_shard_model
from tests.harness import on_ranks

NUM_MICROBATCHES = 3
HSDP, HFSDP, ZERO2 = Placements.hsdp(0, 1), Placements.hfsdp(0, 1), Placements.optim_grads(0)


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False))


def batch(microbatch: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 7, generator=torch.Generator().manual_seed(10 * microbatch + rank))


def shard(model: nn.Sequential, shape: tuple[int, ...], placements: Placements | None) -> Any:
    mesh = init_device_mesh("cpu", shape)
    for module in (*model, model):
        fully_shard(module, mesh, placements)
    return model


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
    plain = make_model()
    model = make(copy.deepcopy(plain), *arguments)
    apart = []
    for microbatch in range(NUM_MICROBATCHES):
        with said_not_to_be_last(model, microbatch):
            model(batch(microbatch, dist.get_rank())).square().sum().backward()
        for rank in range(dist.get_world_size()):
            (plain(batch(microbatch, rank)).square().sum() / dist.get_world_size()).backward()
        pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
        assert all(wanted is not None and wanted.count_nonzero() for _, wanted in pairs)
        apart.append(max((found.full_tensor() - wanted).abs().max().item() for found, wanted in pairs))
        if microbatch == 0:
            for gradient in (gradient for pair in pairs for gradient in pair):
                gradient.mul_(0.5)
    assert max(apart) < 1e-5


@on_ranks(2)
def test_a_sum_that_replicas_have_parts_of_is_not_shown() -> None:
    model = shard(make_model(), (2, 1), HSDP)
    model.set_is_last_backward(False)
    model(batch(0, dist.get_rank())).sum().backward()
    with pytest.raises(StateError) as refused:
        model[0].weight.grad.norm()
    text = str(refused.value)
    assert "'weight' is a sum under way, not reduced over all ranks yet" in text
