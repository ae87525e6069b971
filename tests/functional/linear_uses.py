"""Ways to use linear layers in a unit, for the tests of gradients that are multiplied into packed buffers."""

import functools
from collections.abc import Callable, Iterator, Mapping
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
from tests.harness.models import WIDTH, Block, Made, Stack, inputs, squared, three_blocks
from tests.harness.oracle import Case
from tests.harness.twins import sharded


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


class Layer(Made):
    """One linear layer, used as ``compute(layer, x)`` does."""

    def __init__(self, compute: Callable[[Any, torch.Tensor], torch.Tensor] | None = None, bias: bool = True) -> None:
        linear = nn.Linear(WIDTH, WIDTH, bias=bias)
        super().__init__(compute or (lambda layer, x: x + torch.tanh(layer.linear(x))), linear=linear)


def twice(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.linear(torch.tanh(layer.linear(x)))


def transposed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Hand the layer three dimensions that do not lie one after the other."""
    pairs = torch.stack([x, x.sin()]).transpose(0, 1)
    return torch.tanh(layer.linear(pairs)).transpose(0, 1).sum(0)


def hooked(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Want to see, and to double, the gradient of the weight."""
    if not layer.linear.weight._backward_hooks:
        layer.linear.weight.register_hook(lambda gradient: 2 * gradient)
    return x + torch.tanh(layer.linear(x))


def recomputing_inside(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Recompute within the unit, and use the layer outside of that too."""
    return checkpoint(lambda y: torch.tanh(layer.linear(y)), x, use_reentrant=False) + layer.linear(x)


class Own(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 2 * super().forward(x)


class Named(nn.Linear):
    """A linear layer of another name."""


class Recomputing(Stack):
    """Recomputes its layers as the options of ``checkpoint`` say."""

    options: Mapping[str, Any] = {"use_reentrant": False}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, **self.options)
        return x


class Reentering(Recomputing):
    options: Mapping[str, Any] = {"use_reentrant": True}


class RecomputingSelectively(Recomputing):
    """Keeps the outputs of matrix products, and recomputes the rest."""

    kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    options: Mapping[str, Any] = {"use_reentrant": False, "context_fn": kept}


def tied() -> nn.Module:
    """Return an embedding and an output layer that share a weight."""
    model: Any = Made(
        lambda m, tokens: m.head(torch.tanh(m.mix(m.embed(tokens)))),
        embed=nn.Embedding(11, WIDTH), mix=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, 11, bias=False),
    )  # fmt: skip
    model.head.weight = model.embed.weight
    return model


def stack_of(*computes: Callable[[Any, torch.Tensor], torch.Tensor] | None, bias: bool = True) -> Callable[[], Stack]:
    """Return a function that stacks layers, used as each of these does; None for as usual."""
    return lambda: Stack(*(Layer(compute, bias) for compute in computes))


def freeze(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = three_blocks()
        for own_name, parameter in model.named_parameters():
            if own_name.endswith(name) and "norm" not in own_name:
                parameter.requires_grad_(False)
        return model

    return build


def shard_as(strategy: str, policy: MixedPrecisionPolicy) -> Callable[[nn.Module], None]:
    return functools.partial(sharded, placements=getattr(Placements, strategy)(0), mp_policy=policy)


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


def of_one_graph(model: nn.Module, rank: int, step: int) -> tuple[torch.Tensor, ...]:
    output = model(inputs(rank, step))
    return output.square().mean(), output.sum() / 9


def with_autocast(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(inputs(rank, step))
    return output.float().square().mean()


def skipped_at_times(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Leave the layer out when told."""
    return x if getattr(layer, "is_skipped", False) else x + torch.tanh(layer.linear(x))


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
    "one unit for all": Use(Case(three_blocks, squared, shard=fully_shard), 6),
    "units of one layer": Use(Case(three_blocks, squared, shard=shard_linears), 6),
    "a layer used twice": Use(Case(stack_of(twice, twice), squared), 4),
    "a weight alone in its unit, used twice": Use(Case(stack_of(twice, twice, bias=False), squared), 4),
    "a weight used elsewhere too": Use(
        Case(stack_of(lambda m, x: m.linear(x) * functional.linear(x, m.linear.weight), None), squared), 2
    ),
    "a weight in the loss": Use(
        Case(stack_of(lambda m, x: m.linear(x) + m.linear.weight.square().sum(), None), squared), 2
    ),
    "inputs of three dimensions": Use(Case(stack_of(transposed, None), squared), 2),
    "inputs of one dimension": Use(
        Case(stack_of(lambda m, x: torch.stack([torch.tanh(m.linear(row)) for row in x]), None), squared), 4
    ),
    "inputs without gradients": Use(Case(stack_of(*[lambda m, x: x * m.linear(x.detach())] * 2), squared), 2),
    "inputs without rows": Use(Case(three_blocks, with_no_rows_on_rank_zero), 6),
    "two forwards, one backward": Use(Case(three_blocks, lambda m, r, s: squared(m, r, s) + squared(m, r, s + 50)), 12),
    "two backwards of one graph": Use(Case(three_blocks, of_one_graph), 12),
    "recomputed units": Use(Case(lambda: Recomputing(Block(), Block()), squared), 4),
    "units recomputed by reentering": Use(
        Case(lambda: Reentering(Block(), Block()), lambda m, r, s: m(inputs(r, s).requires_grad_()).square().mean()), 4
    ),
    "units recomputed but for products": Use(Case(lambda: RecomputingSelectively(Block(), Block()), squared), 4),
    "recomputed within a unit": Use(Case(stack_of(recomputing_inside, None), squared), 3),
    "frozen weights, trained biases": Use(Case(freeze("weight"), squared), 0),
    "frozen biases, trained weights": Use(Case(freeze("bias"), squared), 6),
    "a weight tied to an embedding": Use(Case(tied, of_tokens, shard=fully_shard), 2),
    "gradients of inputs before": Use(Case(three_blocks, gradient_of_inputs), 6),
    "a layer that a rank leaves out": Use(Case(stack_of(*[skipped_at_times] * 3), skip_on_rank_zero), 3),
    "autocast to another dtype": Use(Case(three_blocks, with_autocast), 0),
    "a hook on a gathered weight": Use(Case(stack_of(hooked, None), squared), 1),
    "a forward of its own": Use(Case(lambda: Stack(Own(WIDTH, WIDTH), Layer()), squared), 1),
    "a class of its own": Use(Case(lambda: Stack(Named(WIDTH, WIDTH), Layer()), squared), 2),
}
