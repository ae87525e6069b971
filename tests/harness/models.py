"""Small models with ugly shapes, and data that differs on every rank."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 23
WIDTH = 7
LENGTH = 5
BATCH = 3
NUM_BLOCKS = 2


class Block(nn.Module):
    """A residual block whose sizes divide nothing."""

    def __init__(self, width: int = WIDTH, hidden: int = 13) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., width) for (..., width)."""
        result: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class Stack(nn.Module):
    """A sequence of layers of one width, without further parameters."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output."""
        for layer in self.layers:
            x = layer(x)
        return x


class Made(nn.Module):
    """Modules and parameters by name, and a function of it and its inputs for a forward."""

    def __init__(self, compute: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Return the function's result."""
        return self.compute(self, *args, **options)


class Headed(Stack):
    """Layers of one width, and a projection that the root owns: the weights that stay gathered until backward."""

    def __init__(self, *layers: nn.Module, outputs: int = WIDTH) -> None:
        """Put a projection to ``outputs`` numbers behind the layers."""
        super().__init__(*layers)
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., outputs) for (..., WIDTH)."""
        result: torch.Tensor = self.head(super().forward(x))
        return result


class CheckpointedStack(Stack):
    """Keeps the inputs of its layers only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class ShuffledStack(Stack):
    """Starts with another layer each time, so that what followed last time may have been used already."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output."""
        self.num_calls += 1
        for index in range(len(self.layers)):
            x = self.layers[self.num_calls * (index + 1) % 7 - 1](x)
        return x


class RaisesInBackward(torch.autograd.Function):
    """The identity, whose backward raises an ArithmeticError."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on purpose, in backward")


class Product(torch.autograd.Function):
    """A linear layer that saves its weight itself, as fused cross entropies and Transformer Engine's layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


def three_blocks() -> nn.Module:
    """Build three blocks of different sizes."""
    return Stack(Block(), Block(hidden=1), Block(hidden=17))


def inputs(rank: int, step: int, *shape: int) -> torch.Tensor:
    """Return the data of one rank and step; shape (3, WIDTH) unless given."""
    generator = torch.Generator().manual_seed(1 + 1000 * step + rank)
    return torch.randn(shape or (3, WIDTH), generator=generator)


def squared(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the mean square of the model's output on one rank's data."""
    output: torch.Tensor = model(inputs(rank, step))
    return output.square().mean()


def loss_of_rank(model: nn.Module, step: int) -> torch.Tensor:
    """Return the FP32 mean square of the model's output on this rank's data, which requires a gradient."""
    output: torch.Tensor = model(inputs(dist.get_rank(), step).requires_grad_())
    return output.float().square().mean()


class ExpertBlock(nn.Module):
    """A residual block: a norm, three small experts in one 3-D weight, a projection, a gain of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.Parameter(torch.randn(3, 5, WIDTH) / WIDTH**0.5)
        self.project = nn.Linear(15, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(functional.linear(self.norm(hidden), self.experts.flatten(0, 1)))
        output: torch.Tensor = hidden + self.gain * self.project(inner)
        return output


class Model(nn.Module):
    """A token model: embedding, blocks, norm and head; with a frozen parameter and a buffer."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("positions", torch.randn(LENGTH, WIDTH))
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.positions.to(hidden.dtype) + self.shift
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def make_model(seed: int = 0, num_blocks: int = NUM_BLOCKS) -> Model:
    """Make a model whose values the seed decides, alike on every rank."""
    torch.manual_seed(seed)
    return Model(num_blocks)


def draw_tokens(rank: int, step: int = 0, microbatch: int = 0) -> torch.Tensor:
    """Draw one rank's (BATCH, LENGTH) tokens of one microbatch: no two are alike."""
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + microbatch)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of predicting each next token of a row, and the first after the last; 0-d FP32."""
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1, dims=1).flatten())


def make_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """Make a mesh over all ranks with axes called ``axis0``, ``axis1``."""
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"axis{position}" for position in range(len(shape))))


def world_mesh() -> DeviceMesh:
    """Make the mesh of one axis over all ranks."""
    return make_mesh((dist.get_world_size(),))
