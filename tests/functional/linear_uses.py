"""Ways to use linear layers in a unit, for the tests of gradients that are multiplied into packed buffers."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megatron_fsdp import MixedPrecisionPolicy, Placements, fully_shard
from megatron_fsdp.runtime.step.gradients import GradientBuffer
from tests.harness.models import WIDTH, Block, Stack, inputs, squared, three_blocks
from tests.harness.oracle import Case


@contextmanager
def counted_products() -> Iterator[list[int]]:
    """Yield a list that gets the elements of every gradient that is multiplied into a packed buffer."""
    products: list[int] = []

    receive = GradientBuffer.receive_product

    def count(buffer: GradientBuffer, index: int, left: torch.Tensor, right: torch.Tensor) -> None:
        products.append(left.shape[-2] * right.shape[-1] * (len(left) if left.ndim == 3 else 1))
        receive(buffer, index, left, right)

    with mock.patch.object(GradientBuffer, "receive_product", count):
        yield products


# ---------------------------------------------------------------- ways to use a linear layer


class Layer(nn.Module):
    """One linear layer, used as a subclass says."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Twice(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class TwiceWithoutBias(Twice):
    """Its weight alone makes its unit's gradients complete, which they are after the second product."""

    def __init__(self) -> None:
        super().__init__(bias=False)


class BesideTheFunction(Layer):
    """Uses the weight in the layer and in an operator of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * functional.linear(x, self.linear.weight)


class Penalized(Layer):
    """Uses the weight in the layer, and itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.linear.weight.square().sum()


class Transposed(Layer):
    """Hands the layer three dimensions that do not lie one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.stack([x, x.sin()]).transpose(0, 1)
        return torch.tanh(self.linear(pairs)).transpose(0, 1).sum(0)


class OneByOne(Layer):
    """Hands the layer one dimension at a time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.tanh(self.linear(row)) for row in x])


class InputFrozen(Layer):
    """Its layer's input needs no gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.linear(x.detach())


class Hooked(Layer):
    """Wants to see, and to double, the gradient of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.linear.weight._backward_hooks:
            self.linear.weight.register_hook(lambda gradient: 2 * gradient)
        return x + torch.tanh(self.linear(x))


class Own(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 2 * super().forward(x)


class Named(nn.Linear):
    """A linear layer of another name."""


class Recomputing(Stack):
    """Recomputes its layers without reentering autograd."""

    is_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.is_reentrant)
        return x


class Reentering(Recomputing):
    is_reentrant = True


class RecomputingSelectively(Stack):
    """Keeps the outputs of matrix products, and recomputes the rest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=kept)
        return x


class RecomputingInside(Layer):
    """Recomputes within the unit, and uses its layer outside of that too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: torch.tanh(self.linear(y)), x, use_reentrant=False) + self.linear(x)


class Tied(nn.Module):
    """Embedding and output layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def stack_of(*kinds: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Stack(*(kind() for kind in kinds))


def freeze(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = three_blocks()
        for own_name, parameter in model.named_parameters():
            if own_name.endswith(name) and "norm" not in own_name:
                parameter.requires_grad_(False)
        return model

    return build


def shard_as(strategy: str, policy: MixedPrecisionPolicy) -> Callable[[nn.Module], None]:
    def shard(model: nn.Module) -> None:
        options: dict[str, Any] = {"placements": getattr(Placements, strategy)(0), "mp_policy": policy}
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)

    return shard


def shard_whole(model: nn.Module) -> None:
    fully_shard(model)


def shard_linears(model: nn.Module) -> None:
    """Make a unit of every linear layer alone."""
    for module in list(model.modules()):
        if type(module) is nn.Linear:
            fully_shard(module)
    fully_shard(model)


def gradient_of_inputs(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = inputs(rank, step).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x)
    return (model(x) * slope.tanh()).square().mean()


def of_tokens(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 11, (2, 5), generator=generator)
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def with_no_rows_on_rank_zero(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = inputs(rank, step) if rank else torch.empty(0, WIDTH)
    return model(x).square().sum()


def of_two_forwards(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return squared(model, rank, step) + squared(model, rank, step + 50)


def of_one_graph(model: nn.Module, rank: int, step: int) -> tuple[torch.Tensor, ...]:
    output = model(inputs(rank, step))
    return output.square().mean(), output.sum() / 9


def with_autocast(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(inputs(rank, step))
    return output.float().square().mean()


def dropping_a_layer(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = inputs(rank, step)
    for index, layer in enumerate(model.layers):
        if (index + step) % 3 or index == 0:
            x = layer(x)
    return x.square().mean()


class Skipping(Layer):
    """Leaves its layer out when told."""

    is_skipped = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.is_skipped else super().forward(x)


def skip_on_rank_zero(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    for index, layer in enumerate(model.layers):
        layer.is_skipped = rank == 0 and index == 1 + step % 2
    return squared(model, rank, step)


@dataclass(frozen=True)
class Use:
    """A way to use linear layers, and how many products each of three steps takes on the last rank."""

    case: Case
    products: int


USES = {
    "one unit per block": Use(Case(three_blocks, squared), 6),
    "one unit for all": Use(Case(three_blocks, squared, shard=shard_whole), 6),
    "units of one layer": Use(Case(three_blocks, squared, shard=shard_linears), 6),
    "a layer used twice": Use(Case(stack_of(Twice, Twice), squared), 4),
    "a weight alone in its unit, used twice": Use(Case(stack_of(TwiceWithoutBias, TwiceWithoutBias), squared), 4),
    "a weight used elsewhere too": Use(Case(stack_of(BesideTheFunction, Layer), squared), 2),
    "a weight in the loss": Use(Case(stack_of(Penalized, Layer), squared), 2),
    "inputs of three dimensions": Use(Case(stack_of(Transposed, Layer), squared), 2),
    "inputs of one dimension": Use(Case(stack_of(OneByOne, Layer), squared), 4),
    "inputs without gradients": Use(Case(stack_of(InputFrozen, InputFrozen), squared), 2),
    "inputs without rows": Use(Case(three_blocks, with_no_rows_on_rank_zero), 6),
    "two forwards, one backward": Use(Case(three_blocks, of_two_forwards), 12),
    "two backwards of one graph": Use(Case(three_blocks, of_one_graph), 12),
    "recomputed units": Use(Case(lambda: Recomputing(Block(), Block()), squared), 4),
    "units recomputed by reentering": Use(
        Case(lambda: Reentering(Block(), Block()), lambda m, r, s: m(inputs(r, s).requires_grad_()).square().mean()), 4
    ),
    "units recomputed but for products": Use(Case(lambda: RecomputingSelectively(Block(), Block()), squared), 4),
    "recomputed within a unit": Use(Case(stack_of(RecomputingInside, Layer), squared), 3),
    "frozen weights, trained biases": Use(Case(freeze("weight"), squared), 0),
    "frozen biases, trained weights": Use(Case(freeze("bias"), squared), 6),
    "a weight tied to an embedding": Use(Case(Tied, of_tokens, shard=shard_whole), 2),
    "gradients of inputs before": Use(Case(three_blocks, gradient_of_inputs), 6),
    "a layer that a rank leaves out": Use(Case(stack_of(Skipping, Skipping, Skipping), skip_on_rank_zero), 3),
    "autocast to another dtype": Use(Case(three_blocks, with_autocast), 0),
    "a hook on a gathered weight": Use(Case(stack_of(Hooked, Layer), squared), 1),
    "a forward of its own": Use(Case(lambda: Stack(Own(WIDTH, WIDTH), Layer()), squared), 1),
    "a class of its own": Use(Case(lambda: Stack(Named(WIDTH, WIDTH), Layer()), squared), 2),
}
