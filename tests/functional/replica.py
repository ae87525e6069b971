"""The oracle: the same model, whole and in one process, trained on the data of every rank.

A case says how to build a model, how to shard it, and the loss of one rank's data at one step. Each rank trains its
shard on its own data; beside it a plain copy is trained on the mean loss over all ranks.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import guard_released_storage
from megatron_fsdp import FsdpModule, fully_shard

__all__ = [
    "WIDTH",
    "Block",
    "Case",
    "Comparison",
    "Stack",
    "compare",
    "inputs",
    "shard_each",
    "shard_layers",
    "squared",
    "three_blocks",
    "units_of",
    "whole",
]

WIDTH = 7


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
    """Layers of one width, one after the other; without parameters of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the last layer returns."""
        for layer in self.layers:
            x = layer(x)
        return x


def shard_each(model: nn.Module) -> None:
    """Make a unit of every direct child (of every entry, for a ModuleList), and one of the model."""
    for child in model.children():
        for part in child if isinstance(child, nn.ModuleList) else (child,):
            fully_shard(part)
    fully_shard(model)


def three_blocks() -> nn.Module:
    """Build three blocks of different sizes."""
    return Stack(Block(), Block(hidden=1), Block(hidden=17))


def squared(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the mean square of the model's output on one rank's data."""
    output: torch.Tensor = model(inputs(rank, step))
    return output.square().mean()


def shard_layers(model: nn.Module, **options: Any) -> None:
    """Shard every layer of a ``Stack`` with the same options, and the stack with the mesh and placements among them."""
    assert isinstance(model, Stack)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, options.get("mesh"), options.get("placements"))


def units_of(model: nn.Module) -> list[FsdpModule]:
    """Return all sharded modules, outermost first."""
    return [module for module in model.modules() if isinstance(module, FsdpModule)]


def inputs(rank: int, step: int, *shape: int) -> torch.Tensor:
    """Return the data of one rank and step; shape (3, WIDTH) unless given."""
    generator = torch.Generator().manual_seed(1 + 1000 * step + rank)
    return torch.randn(shape or (3, WIDTH), generator=generator)


def whole(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return a full copy of a tensor that may be sharded; zeros where there is none."""
    if tensor is None:
        return torch.zeros(like.shape)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


Losses: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One model to train both ways.

    Attributes:
        build: makes the model.
        loss: of one rank's data at one step, ``loss(model, rank, step)``; it runs forward. Of several losses one
            backward each is run, in their order, on graphs that are kept.
        shard: applies ``fully_shard`` in place.
        prepare: called on each of the two models at the start of a step, before forward.
        optimizer: over the parameters that require gradients.
        steps: optimizer steps to train.
        is_guarded: whether use of released storage is an error; the guard keeps torch.compile from compiling.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], Losses]
    shard: Callable[[nn.Module], None] = shard_each
    prepare: Callable[[nn.Module, int], None] | None = None
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] | None = None
    steps: int = 3
    is_guarded: bool = True


@dataclass(frozen=True)
class Comparison:
    """How far a sharded run was from the oracle.

    Attributes:
        worst_gradient: largest |difference| of any gradient at any step; a missing one counts as zeros.
        worst_weight: largest |difference| of any weight after the last step.
        least_movement: the smallest change over training of any tensor that the oracle changed; shows that there was
            something to compare.
        disagreement: largest difference between this rank's own gradient and the oracle's: 0 would mean that a
            reduction left out could go unnoticed.
    """

    worst_gradient: float
    worst_weight: float
    least_movement: float
    disagreement: float

    @property
    def is_exact(self) -> bool:
        """Whether gradients and weights agree to fp32 rounding, and had something to agree on."""
        is_telling = self.least_movement > 1e-4 and self.disagreement > 1e-4
        return is_telling and self.worst_gradient < 2e-6 and self.worst_weight < 2e-6


def compare(case: Case) -> Comparison:
    """Train a case sharded and whole; call it on every rank of a process group."""
    torch.manual_seed(0)
    oracle = case.build()
    model = copy.deepcopy(oracle)
    initial = [parameter.detach().clone() for parameter in oracle.parameters()]
    case.shard(model)
    make = case.optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    optimizers = [make(p for p in m.parameters() if p.requires_grad) for m in (model, oracle)]
    worst_gradient = disagreement = 0.0
    for step in range(case.steps):
        for m in (model, oracle):
            if case.prepare is not None:
                case.prepare(m, step)
        alone = _lonely_gradients(case, oracle, step)
        with guard_released_storage() if case.is_guarded else nullcontext():
            _backward(case.loss(model, dist.get_rank(), step))
        for rank in range(dist.get_world_size()):
            _backward(case.loss(oracle, rank, step), 1 / dist.get_world_size())
        ours = [whole(p.grad, p) for p in model.parameters()]
        theirs = [whole(p.grad, p) for p in oracle.parameters()]
        worst_gradient = max(worst_gradient, _worst(ours, theirs))
        disagreement = max(disagreement, _worst(alone, theirs))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours = [whole(p, p) for p in model.parameters()]
    theirs = [whole(p, p) for p in oracle.parameters()]
    moved = [_worst([new], [old]) for new, old in zip(theirs, initial, strict=True)]
    return Comparison(worst_gradient, _worst(ours, theirs), min((m for m in moved if m), default=0.0), disagreement)


def _backward(losses: Losses, scale: float = 1.0) -> None:
    *earlier, last = losses if isinstance(losses, tuple) else (losses,)
    for loss in earlier:
        (loss * scale).backward(retain_graph=True)
    (last * scale).backward()


def _lonely_gradients(case: Case, oracle: nn.Module, step: int) -> list[torch.Tensor]:
    _backward(case.loss(oracle, dist.get_rank(), step))
    gradients = [whole(parameter.grad, parameter) for parameter in oracle.parameters()]
    oracle.zero_grad()
    return gradients


def _worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(ours, theirs, strict=True))
