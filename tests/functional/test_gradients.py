"""Gradients of sharded models equal a whole model's, whichever parameters are frozen, tied, unused, or whose."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from megatron_fsdp import fully_shard
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Block, Stack, inputs
from tests.harness.oracle import Case, compare


def squared(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step)).square().mean()


class Adapted(nn.Module):
    """A frozen base weight beside trainable low-rank ones; the base comes first in forward, so its backward is last."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.first = nn.Linear(WIDTH, 3, bias=False)
        self.second = nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.base(x))
        return x + hidden + self.second(self.first(hidden))


def adapted() -> nn.Module:
    return Stack(Block(), Adapted(), Adapted())


def half_frozen() -> nn.Module:
    model = Stack(Block(), Block(), Block())
    model.layers[1].requires_grad_(False)
    return model


def frozen_first() -> nn.Module:
    model = Stack(Block(), Block(), Block())
    model.layers[0].requires_grad_(False)
    return model


class TiedPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 5, bias=False)
        self.down = nn.Linear(5, WIDTH, bias=False)
        self.again = nn.Linear(WIDTH, 5, bias=False)
        self.again.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)) * self.again(x))


def tied_within_a_unit() -> nn.Module:
    return Stack(Block(), TiedPair(), Block())


class Language(nn.Module):
    """Embedding and output projection share a weight that belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard_blocks_and_root(model: nn.Module) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def next_token_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 11, (2, 6), generator=generator)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.use = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.always(x))
        return x + self.sometimes(x) if self.use else x


def set_used(model: nn.Module, flags: Callable[[int], bool]) -> None:
    for index, module in enumerate(child for child in model.modules() if isinstance(child, Optional)):
        module.use = flags(index)


def optional_stack() -> nn.Module:
    return Stack(*(Optional() for _ in range(4)))


def used_on_rank_one_only(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    set_used(model, lambda index: rank == 1)
    return squared(model, rank, step)


def used_on_alternating_ranks(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    set_used(model, lambda index: (index + step + rank) % 2 == 0)
    return squared(model, rank, step)


def used_nowhere(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    set_used(model, lambda index: False)
    return squared(model, rank, step)


class Droppable(Block):
    dropped = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.dropped else super().forward(x)


def droppable_stack() -> nn.Module:
    return Stack(Block(), *(Droppable() for _ in range(5)), Block())


def drop_at_random(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    # Own generator: the oracle evaluates several ranks in one process.
    draw = random.Random(10 * step + rank)
    for module in model.modules():
        if isinstance(module, Droppable):
            module.dropped = draw.random() < 0.5
    return squared(model, rank, step)


def drop_one_on_rank_zero(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    for index, module in enumerate(model.layers):
        if isinstance(module, Droppable):
            module.dropped = rank == 0 and index == 3
    return squared(model, rank, step)


def drop_all_on_rank_zero(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    for module in model.modules():
        if isinstance(module, Droppable):
            module.dropped = rank == 0
    return squared(model, rank, step)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shard_with_list_unit(model: nn.Module) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard([model.norm, model.head])
    fully_shard(model)


def shard_nested(model: nn.Module) -> None:
    for block in model.layers:
        fully_shard(block.up)
        fully_shard(block)
    fully_shard(model)


def shard_root_only(model: nn.Module) -> None:
    fully_shard(model)


def shard_without_root(model: nn.Module) -> None:
    for layer in model.layers:
        fully_shard(layer)


def shard_keeping_weights(model: nn.Module) -> None:
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model)


def three_blocks() -> nn.Module:
    return Stack(Block(), Block(hidden=1), Block(hidden=17))


def plain_adam(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    # Large eps: Adam divides noise by noise where a gradient is nearly zero, and that is not what is compared here.
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, foreach=True)


def foreach_sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


CASES = {
    "a plain stack of blocks": Case(three_blocks, squared),
    "a root that owns everything": Case(three_blocks, squared, shard=shard_root_only),
    "units without a common root": Case(three_blocks, squared, shard=shard_without_root),
    "units inside units": Case(three_blocks, squared, shard=shard_nested),
    "weights kept between forward and backward": Case(three_blocks, squared, shard=shard_keeping_weights),
    "a frozen base weight whose backward follows the last trainable gradient": Case(adapted, squared),
    "a frozen unit in the middle": Case(half_frozen, squared),
    "a frozen unit at the start": Case(frozen_first, squared),
    "a weight tied within a unit": Case(tied_within_a_unit, squared),
    "a weight tied at the root": Case(Language, next_token_loss, shard=shard_blocks_and_root),
    "parameters used on one rank only": Case(optional_stack, used_on_rank_one_only),
    "parameters used on alternating ranks": Case(optional_stack, used_on_alternating_ranks),
    "parameters used nowhere": Case(optional_stack, used_nowhere),
    "one block dropped on one rank": Case(droppable_stack, drop_one_on_rank_zero),
    "blocks dropped at random on each rank": Case(droppable_stack, drop_at_random, steps=6),
    "all droppable blocks dropped on one rank": Case(droppable_stack, drop_all_on_rank_zero),
    "a unit of two modules": Case(Normalised, squared, shard=shard_with_list_unit),
    "foreach AdamW without an adapter": Case(three_blocks, squared, optimizer=plain_adam),
    "foreach SGD without an adapter": Case(three_blocks, squared, optimizer=foreach_sgd),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout=20)
def test_gradients_and_weights_equal_those_of_a_whole_model_with(name: str) -> None:
    result = compare(CASES[name])
    assert result.is_exact, result
