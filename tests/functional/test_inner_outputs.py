"""Hooks on modules inside of a unit: there until backward came by the unit's outputs first, and again with a user's."""

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard
from tests.harness import on_ranks
from tests.harness.models import Block, Stack, inputs, three_blocks


def sharded() -> Stack:
    torch.manual_seed(7)
    model = three_blocks()
    for part in (*model.layers, model):
        fully_shard(part)
    return model


def num_hooks(model: Stack) -> list[int]:
    return [len(block.norm._forward_hooks) for block in model.layers if isinstance(block, Block)]


def train(model: Stack, step: int) -> None:
    model(inputs(dist.get_rank(), step)).square().mean().backward()
    model.zero_grad()


@on_ranks(2)
def test_modules_inside_are_hooked_until_backward_came_by_the_outputs_and_again_when_a_user_hooks_one() -> None:
    model = sharded()
    found = [num_hooks(model)]
    for step in range(2):
        train(model, step)
    found.append(num_hooks(model))
    handle = model.layers[1].norm.register_forward_hook(lambda module, args, output: None)
    train(model, 2)
    found.append(num_hooks(model))
    handle.remove()
    for step in range(3, 5):
        train(model, step)
    found.append(num_hooks(model))
    assert found == [[1, 1, 1], [0, 0, 0], [1, 2, 1], [0, 0, 0]]


def loss_of(model: nn.Module, taken: list[torch.Tensor], step: int) -> torch.Tensor:
    """Return a loss of what a hook takes from the norm of the second block alone."""
    handle = model.layers[1].norm.register_forward_hook(lambda module, args, output: taken.append(output))
    model(inputs(dist.get_rank(), step))
    handle.remove()
    return taken.pop().square().mean()


@on_ranks(2)
def test_what_a_hook_takes_later_leads_backward_into_the_unit_and_its_hooks_stay() -> None:
    model = sharded()
    torch.manual_seed(7)
    plain = three_blocks()
    for step in range(3):
        train(model, step)
    worst = []
    for step in range(3, 5):
        loss_of(model, [], step).backward()
        loss_of(plain, [], step).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            if theirs.grad is None:
                theirs.grad = torch.zeros_like(theirs)
            dist.all_reduce(theirs.grad, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
            wanted = theirs.grad / dist.get_world_size()
            found = torch.zeros_like(wanted) if mine.grad is None else mine.grad.full_tensor()
            worst.append((found - wanted).abs().max().item())
        model.zero_grad()
        plain.zero_grad()
    assert num_hooks(model)[1] == 1
    assert max(worst) < 1e-6
