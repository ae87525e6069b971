"""Hooks on saved tensors that pickle them, and units whose backward finds no weights by choice."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import fully_shard
from megatron_fsdp.runtime.step.unit import units_below
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Made, inputs, three_blocks
from tests.harness.twins import Twins


def groups_of(model: nn.Module) -> list[Any]:
    """Return the parameter groups of all units of a model."""
    return [group for unit in units_below(model) for group in unit.groups]


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


OFFLOADS: dict[str, Callable[[], Any]] = {
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "copies": lambda: torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda it: it),
    "views": lambda: torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.view_as(tensor), lambda it: it),
    "detached": lambda: torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda it: it),
}


@pytest.mark.parametrize("reshard", [True, None, False])
@pytest.mark.parametrize("kind", OFFLOADS)
@on_ranks(2)
def test_gradients_equal_the_whole_models_when_saved_tensors_are_offloaded(kind: str, reshard: bool | None) -> None:
    def shard_all(model: Any) -> None:
        for part in (*model.layers, model):
            fully_shard(part, reshard_after_forward=reshard)

    twins = Twins(three_blocks, shard=shard_all)
    for step in range(2):
        with OFFLOADS[kind]():
            loss = twins.model(inputs(dist.get_rank(), step)).square().mean()
        loss.backward()
        twins.plain_backward(step)
    assert twins.gradients_apart() < 1e-6


@on_ranks(2)
def test_frozen_units_are_resharded_after_a_checkpointed_backward() -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
    blocks[1].requires_grad_(False)
    blocks[3].requires_grad_(False)

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    model: Any = Made(forward, blocks=blocks)
    for part in (*blocks, model):
        fully_shard(part)
    for step in range(2):
        model(inputs(dist.get_rank(), step)).square().mean().backward()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert all(not group.gathered.is_allocated for group in groups_of(model))


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
