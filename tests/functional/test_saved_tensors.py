"""Hooks on saved tensors that pickle them, and units whose backward finds no weights by choice."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Made, inputs, three_blocks
from tests.harness.twins import Twins


def packed(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def unpacked(content: bytes) -> torch.Tensor:
    return torch.load(io.BytesIO(content))


def build() -> nn.Module:
    """Return a model whose first part passes its input on, beside what it makes of it."""
    first = Made(lambda m, x: (m.linear(x.sin()), x), linear=nn.Linear(WIDTH, WIDTH))

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        y, same = model.first(x)
        return model.blocks(y * same.cos())

    return Made(forward, first=first, blocks=three_blocks())


def shard(model: Any) -> None:
    for part in (model.first, *model.blocks.layers, model):
        fully_shard(part)


@on_ranks(2)
def test_gradients_equal_the_whole_models_when_saved_tensors_are_pickled() -> None:
    twins, worst = Twins(build, shard=shard), []
    xs = [inputs(rank, 0).requires_grad_() for rank in range(dist.get_world_size() + 1)]
    xs[-1] = inputs(dist.get_rank(), 0).requires_grad_()
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
            twins.model(xs[-1]).square().mean().backward()
        twins.plain_backward(0, lambda model, rank, _: model(xs[rank]).square().mean())
        own = xs[dist.get_rank()].grad * dist.get_world_size()
        worst += [float((xs[-1].grad - own).abs().max()), twins.gradients_apart()]
        twins.zero_grad()
        for x in xs:
            x.grad = None
    assert max(worst) < 1e-6


@on_ranks(2)
def test_a_backward_that_reads_weights_which_are_not_to_be_gathered_is_refused() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5000), nn.Linear(5000, 3), nn.Tanh())
    for part in (*model[:3], model):
        fully_shard(part, reshard_after_forward=True)
    # The first one's input needs no gradient, so that its backward reads no weight.
    model[0].set_unshard_in_backward(False)
    model(inputs(dist.get_rank(), 0)).square().mean().backward()
    model.zero_grad()
    model[1].set_unshard_in_backward(False)
    with pytest.raises(RuntimeError, match="is at version 1000000000"):
        model(inputs(dist.get_rank(), 0)).square().mean().backward()
