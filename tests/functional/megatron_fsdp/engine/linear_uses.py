"""Ways to use linear layers in a unit, for the tests of gradients that are multiplied into packed buffers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megatron_fsdp import fully_shard
from megatron_fsdp.engine.grads import GradientBuffer
from tests.harness.models import WIDTH, Block, Made, Stack, inputs, squared, three_blocks
from tests.harness.oracle import Case


@contextmanager
def counted_products() -> Iterator[list[int]]:
    """Yield a list; each gradient multiplied into a packed buffer appends its number of elements."""
    products: list[int] = []

    receive = GradientBuffer.receive_product

    def count(buffer: GradientBuffer, index: int, left: torch.Tensor, right: torch.Tensor) -> None:
        products.append(left.shape[-2] * right.shape[-1] * (len(left) if left.ndim == 3 else 1))
        receive(buffer, index, left, right)

    with mock.patch.object(GradientBuffer, "receive_product", count):
        yield products


# ---------------------------------------------------------------- models

Compute = Callable[[Any, torch.Tensor], torch.Tensor]


def usual(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(layer.linear(x))


def stack_of(*computes: Compute, bias: bool = True) -> Callable[[], Stack]:
    """Return a function that stacks layers, each with one linear layer, used in the given way."""
    return lambda: Stack(*(Made(compute, linear=nn.Linear(WIDTH, WIDTH, bias=bias)) for compute in computes))


class Own(nn.Linear):
    """A linear layer with a custom forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 2 * super().forward(x)


class Named(nn.Linear):
    """A linear layer of another name."""


class Recomputing(Stack):
    """Recomputes its layers as the options of ``checkpoint`` say."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Block(), Block())
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, **self.options)
        return x


def tied() -> nn.Module:
    """Return an embedding and an output layer that share a weight."""
    model: Any = Made(
        lambda m, tokens: m.head(torch.tanh(m.mix(m.embed(tokens)))),
        embed=nn.Embedding(11, WIDTH), mix=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, 11, bias=False),
    )  # fmt: skip
    model.head.weight = model.embed.weight
    return model


def frozen(name: str) -> nn.Module:
    model = three_blocks()
    for own_name, parameter in model.named_parameters():
        parameter.requires_grad_(not own_name.endswith(name) or "norm" in own_name)
    return model


def shard_linears(model: nn.Module) -> None:
    """Make a unit of every linear layer alone."""
    for module in list(model.modules()):
        if type(module) is nn.Linear:
            fully_shard(module)
    fully_shard(model)


# ---------------------------------------------------------------- ways to use a linear layer


def twice(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.linear(torch.tanh(layer.linear(x)))


def transposed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Give the layer a three-dimensional input that is not contiguous."""
    pairs = torch.stack([x, x.sin()]).transpose(0, 1)
    return torch.tanh(layer.linear(pairs)).transpose(0, 1).sum(0)


def hooked(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Double the gradient of the weight in a hook."""
    if not layer.linear.weight._backward_hooks:
        layer.linear.weight.register_hook(lambda gradient: 2 * gradient)
    return usual(layer, x)


def recomputing_inside(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Recompute within the unit, and also use the layer outside of the recomputed part."""
    return checkpoint(lambda y: torch.tanh(layer.linear(y)), x, use_reentrant=False) + layer.linear(x)


def skipped_at_times(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Skip the layer on demand."""
    return x if getattr(layer, "is_skipped", False) else usual(layer, x)


# ---------------------------------------------------------------- losses


def gradient_of_inputs(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = inputs(rank, step).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x)
    return (model(x) * slope.tanh()).square().mean()


def of_tokens(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def with_no_rows_on_rank_zero(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step) if rank else torch.empty(0, WIDTH)).square().sum()


def of_one_graph(model: nn.Module, rank: int, step: int) -> tuple[torch.Tensor, ...]:
    output = model(inputs(rank, step))
    return output.square().mean(), output.sum() / 9


def with_autocast(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(inputs(rank, step))
    return output.float().square().mean()


def skip_on_rank_zero(model: Any, rank: int, step: int) -> torch.Tensor:
    for index, layer in enumerate(model.layers):
        layer.is_skipped = rank == 0 and index == 1 + step % 2
    return squared(model, rank, step)


@dataclass(frozen=True)
class Use:
    """A way to use linear layers, and the number of products in each of three steps on the last rank."""

    case: Case
    products: int


# Keep the outputs of matrix products, and recompute the rest.
SELECTIVELY = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
USES = {
    "one unit per block": Use(Case(three_blocks, squared), 6),
    "one unit for all": Use(Case(three_blocks, squared, shard=fully_shard), 6),
    "units of one layer": Use(Case(three_blocks, squared, shard=shard_linears), 6),
    "a layer used twice": Use(Case(stack_of(twice, twice), squared), 4),
    "a weight alone in its unit, used twice": Use(Case(stack_of(twice, twice, bias=False), squared), 4),
    "a weight used elsewhere too": Use(
        Case(stack_of(lambda m, x: m.linear(x) * functional.linear(x, m.linear.weight), usual), squared), 2
    ),
    "a weight in the loss": Use(
        Case(stack_of(lambda m, x: m.linear(x) + m.linear.weight.square().sum(), usual), squared), 2
    ),
    "inputs of three dimensions": Use(Case(stack_of(transposed, usual), squared), 2),
    "inputs of one dimension": Use(
        Case(stack_of(lambda m, x: torch.stack([torch.tanh(m.linear(row)) for row in x]), usual), squared), 4
    ),
    "inputs without gradients": Use(Case(stack_of(*[lambda m, x: x * m.linear(x.detach())] * 2), squared), 2),
    "inputs without rows": Use(Case(three_blocks, with_no_rows_on_rank_zero), 6),
    "two forwards, one backward": Use(Case(three_blocks, lambda m, r, s: squared(m, r, s) + squared(m, r, s + 50)), 12),
    "two backwards of one graph": Use(Case(three_blocks, of_one_graph), 12),
    "recomputed units": Use(Case(partial(Recomputing, use_reentrant=False), squared), 4),
    "units recomputed by reentering": Use(
        Case(
            partial(Recomputing, use_reentrant=True), lambda m, r, s: m(inputs(r, s).requires_grad_()).square().mean()
        ), 4,
    ),
    "units recomputed but for products": Use(
        Case(partial(Recomputing, use_reentrant=False, context_fn=SELECTIVELY), squared), 4
    ),
    "recomputed within a unit": Use(Case(stack_of(recomputing_inside, usual), squared), 3),
    "frozen weights, trained biases": Use(Case(partial(frozen, "weight"), squared), 0),
    "frozen biases, trained weights": Use(Case(partial(frozen, "bias"), squared), 6),
    "a weight tied to an embedding": Use(Case(tied, of_tokens, shard=fully_shard), 2),
    "gradients of inputs before": Use(Case(three_blocks, gradient_of_inputs), 6),
    "a layer that a rank leaves out": Use(Case(stack_of(*[skipped_at_times] * 3), skip_on_rank_zero), 3),
    "autocast to another dtype": Use(Case(three_blocks, with_autocast), 0),
    "a hook on a gathered weight": Use(Case(stack_of(hooked, usual), squared), 1),
    "a forward of its own": Use(Case(lambda: Stack(Own(WIDTH, WIDTH), *stack_of(usual)().layers), squared), 1),
    "a class of its own": Use(Case(lambda: Stack(Named(WIDTH, WIDTH), *stack_of(usual)().layers), squared), 2),
}  # fmt: skip
