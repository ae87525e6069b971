"""Hooks on saved tensors that pickle them, and units whose backward finds no weights by choice."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard
from tests.harness import on_ranks
from tests.harness.models import WIDTH, inputs, three_blocks
from tests.harness.oracle import whole


def packed(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def unpacked(content: bytes) -> torch.Tensor:
    return torch.load(io.BytesIO(content))


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x.sin()), x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = Passing(), three_blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, same = self.first(x)
        return self.blocks(y * same.cos())


@on_ranks(2)
def test_gradients_equal_the_whole_models_when_saved_tensors_are_pickled() -> None:
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    for part in (model.first, *model.blocks.layers, model):
        fully_shard(part)
    worst = 0.0
    given = inputs(dist.get_rank(), 0).requires_grad_()
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
            model(given).square().mean().backward()
        assert given.grad is not None
        size, mine = dist.get_world_size(), given.grad
        for rank in range(size):
            x = inputs(rank, 0).requires_grad_()
            (plain(x).square().mean() / size).backward()
            if rank == dist.get_rank():
                assert x.grad is not None
                worst = max(worst, float((mine - x.grad * size).abs().max()))
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        worst = max(worst, *(float((whole(a.grad, a) - b.grad).abs().max()) for a, b in pairs if b.grad is not None))
        model.zero_grad()
        plain.zero_grad()
        given.grad = None
    assert worst < 1e-6


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


PARTS = {
    "'weight'": lambda: nn.Linear(WIDTH, WIDTH),
    "'0.": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.ReLU()),
    "'scale'": Own,
}


@pytest.mark.parametrize("name", PARTS)
@on_ranks(2)
def test_a_backward_that_reads_weights_which_are_not_to_be_gathered_names_unit_and_parameter(name: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), PARTS[name](), nn.Linear(WIDTH, 3), nn.Tanh())
    for part in (*model[:3], model):
        fully_shard(part, reshard_after_forward=True)
    # The first one's input needs no gradient, so that its backward reads no weight.
    model[0].set_unshard_in_backward(False)
    model(inputs(dist.get_rank(), 0)).square().mean().backward()
    model.zero_grad()
    model[1].set_unshard_in_backward(False)
    with pytest.raises(ValueError) as refused:
        model(inputs(dist.get_rank(), 0)).square().mean().backward()
    found = f"{type(refused.value).__name__}: {refused.value}"
    assert found.startswith(f"StateError: unit '1': its backward reads parameter {name}")
    assert "set_unshard_in_backward(False)" in found
