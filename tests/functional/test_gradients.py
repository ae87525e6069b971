"""Gradients of sharded models equal whole ones', whatever is frozen, tied or unused and however modules are called."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import guard_released_storage, memory_meter, observe_collectives
from megatron_fsdp import StateError, clip_grad_norm_, fully_shard
from tests.harness import on_ranks, run_ranks
from tests.harness.models import WIDTH, Block, Stack, inputs, squared, three_blocks
from tests.harness.oracle import Case, compare, shard_each


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


class Dropped(nn.Module):
    """Owns what comes before its blocks; the first rank leaves out the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.first, self.second = nn.Linear(7, 7), Block(), Block()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.entry(x)
        return self.second(x if rank == 0 else self.first(x))


class TwoHeads(nn.Module):
    """Owns what comes after its blocks; the first rank uses one head of two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head, self.extra = Block(), Block(), nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.second(self.first(x))
        return self.head(x) + (self.extra(x) if rank else 0)


class Skipping(Block):
    def forward(self, x: torch.Tensor, skips: bool = False) -> torch.Tensor:
        return x if skips else super().forward(x)


class Skipped(Dropped):
    """Like ``Dropped``, but the block is called and returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Skipping()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.second(self.first(self.entry(x), rank == 0))


def shard_blocks(model: nn.Module) -> None:
    for child in (model.first, model.second):
        assert isinstance(child, nn.Module)
        fully_shard(child)
    fully_shard(model)


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step), rank).square().mean()


@pytest.mark.parametrize("kind", [TwoHeads, Skipped])
@on_ranks(3, timeout=30)
def test_a_unit_around_others_is_reduced_after_them_on_every_rank(kind: type[nn.Module]) -> None:
    result = compare(Case(kind, loss, shard=shard_blocks))
    assert result.is_exact, result


@on_ranks(2)
def test_a_unit_with_parameters_of_its_own_frees_everything_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    before = memory_meter().current_bytes
    plain = nn.Linear(64, 64)
    original = weakref.ref(plain.weight)
    model = fully_shard(plain)
    del plain
    is_gone = original() is None
    model(torch.ones(1, 64)).sum().backward()
    del model
    held = memory_meter().current_bytes - before
    gc.enable()
    assert (held, is_gone) == (0, True)


@on_ranks(2)
def test_the_norm_of_fp64_gradients_has_fp64_precision() -> None:
    model = nn.Linear(5, 3).double()
    oracle = nn.Linear(5, 3).double()
    oracle.load_state_dict(model.state_dict())
    fully_shard(model)
    x = torch.full((2, 5), 1e-3 * (dist.get_rank() + 1), dtype=torch.float64)
    model(x).square().sum().backward()
    for rank in range(dist.get_world_size()):
        y = torch.full((2, 5), 1e-3 * (rank + 1), dtype=torch.float64)
        (oracle(y).square().sum() / dist.get_world_size()).backward()
    wanted = nn.utils.clip_grad_norm_(oracle.parameters(), float("inf"))
    found = clip_grad_norm_(model, float("inf")).item()
    wanted = wanted.item()
    assert found == pytest.approx(wanted, rel=1e-12)


def called_twice(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = inputs(rank, step)
    for index in (0, 1, 1, 0, 2):
        x = model.layers[index](x)
    return x.square().mean()


class Recurrent(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 1, 0, 2):
            x = self.layers[index](x)
        return x


def recurrent() -> nn.Module:
    return Recurrent(Block(), Block(), Block())


def two_forwards(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    first: torch.Tensor = model(inputs(rank, 2 * step))
    second: torch.Tensor = model(inputs(rank, 2 * step + 1))
    return (first * second).mean()


def two_graphs(model: nn.Module, rank: int, step: int) -> tuple[torch.Tensor, ...]:
    return squared(model, rank, 2 * step), squared(model, rank, 2 * step + 1)


def two_losses_of_one_graph(model: nn.Module, rank: int, step: int) -> tuple[torch.Tensor, ...]:
    output = model(inputs(rank, step))
    return output.square().mean(), output.sin().mean()


def with_input_gradient_first(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = inputs(rank, step).requires_grad_()
    output = model(x)
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    return output.square().mean()


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


class ForkModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Block()
        self.fork = Fork()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = self.fork(self.stem(x))
        return left, right


def left_output_only(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step))[0].square().mean()


def one_output_per_rank(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step))[(rank + step) % 2].square().mean()


def other_order_each_step(model: nn.Module, step: int) -> None:
    model.order = [(3 * step + index) % len(model.layers) if step % 2 else index for index in range(len(model.layers))]


class Shuffled(Stack):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.order = list(range(len(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


def shuffled() -> nn.Module:
    return Shuffled(*(Block(hidden=5 + index) for index in range(5)))


class AddedInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += torch.tanh(x.clone() * self.scale)
        return x


def with_residuals_in_place() -> nn.Module:
    return Stack(Block(), AddedInPlace(), AddedInPlace(), Block())


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Block()
        self.lstm = nn.LSTM(WIDTH, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.stem(x))[0])


def sequence_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step, 2, 4, WIDTH)).square().sum()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3)
        self.second = nn.Conv2d(5, 7, (3, 1), bias=False)
        self.norm = nn.GroupNorm(1, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(torch.tanh(self.first(x))))


def image_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    output: torch.Tensor = model(inputs(rank, step, 2, 3, 8, 7))
    return (output.sin() * output).mean()


@dataclass
class Output:
    hidden: torch.Tensor
    extra: dict[str, list[torch.Tensor]]
    label: str = "two tensors"


class Structured(nn.Module):
    """Passes its two tensors on as a tuple, a dict or a dataclass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> Any:
        left, right = self.left(x), self.right(x) * scale
        if self.kind == "tuple":
            return left, (right, None)
        if self.kind == "dict":
            return {"left": left, "nested": [right], "name": "dict"}
        return Output(left, {"right": [right]})


class StructuredModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Structured("tuple"), Structured("dict"), Structured("dataclass")

    def forward(self, x: torch.Tensor) -> Output:
        scale = torch.tensor(0.5)
        left, (right, _) = self.a(x, scale=scale)
        both = self.b(left * right, scale=scale)
        return self.c(both["left"] + both["nested"][0], scale=scale)


def structured_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    output: Output = model(inputs(rank, step))
    return (output.hidden * output.extra["right"][0]).square().sum()


CALLS = {
    "layers that run twice in one forward": Case(recurrent, squared),
    "units called twice by the trainer": Case(three_blocks, called_twice, shard=shard_without_root),
    "two forwards before one backward": Case(three_blocks, two_forwards),
    "two forwards before two backwards": Case(three_blocks, two_graphs),
    "two backwards through one retained graph": Case(three_blocks, two_losses_of_one_graph),
    "an input gradient taken before backward": Case(three_blocks, with_input_gradient_first),
    "a backward through one of two outputs": Case(ForkModel, left_output_only),
    "another one of two outputs on each rank": Case(ForkModel, one_output_per_rank),
    "another order of blocks at each step": Case(shuffled, squared, prepare=other_order_each_step, steps=4),
    "residuals that are added in place to what a unit returns": Case(with_residuals_in_place, squared),
    "a recurrent module that assigns its own weights": Case(Recursive, sequence_loss),
    "convolutions with four-dimensional weights": Case(Convolutions, image_loss),
    "outputs that are tuples, dicts and dataclasses": Case(StructuredModel, structured_loss),
}


@pytest.mark.parametrize("name", CASES | CALLS)
@on_ranks(2, timeout=20)
def test_gradients_and_weights_equal_those_of_a_whole_model_with(name: str) -> None:
    result = compare((CASES | CALLS)[name])
    assert result.is_exact, result


def take_input_gradients_only() -> list[str]:
    """Return the collectives and transcript lines of a backward that asks for no parameter's gradient."""
    model = Stack(Block(), Block())
    shard_each(model)
    x = inputs(dist.get_rank(), 0).requires_grad_()
    loss = model(x).square().mean()
    calls: list[str] = []
    with observe_collectives(lambda call: calls.append(call.kind)), guard_released_storage():
        torch.autograd.grad(loss, x)
    assert all(parameter.grad is None for parameter in model.parameters())
    return calls


def test_a_backward_to_the_inputs_alone_reduces_nothing() -> None:
    first, second = run_ranks(2, take_input_gradients_only)
    # The last unit keeps its weights from forward; the first one is gathered again.
    assert first == second == ["all_gather"]


def _take_input_gradient(model: nn.Module, step: int) -> None:
    x = inputs(dist.get_rank(), 77).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)


@on_ranks(2)
def test_training_goes_on_right_after_a_backward_to_the_inputs_alone() -> None:
    result = compare(Case(three_blocks, squared, prepare=_take_input_gradient))
    assert result.is_exact, result


@on_ranks(2)
def test_a_recorded_backward_is_refused_by_name() -> None:
    model = Stack(Block(), Block())
    shard_each(model)
    x = inputs(dist.get_rank(), 0).requires_grad_()
    loss = model(x).square().mean()
    with pytest.raises(StateError) as refused:
        torch.autograd.grad(loss, x, create_graph=True)
    message = str(refused.value)
    assert "create_graph=True" in message
    assert "unsharded" in message
