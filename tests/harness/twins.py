"""A sharded model and its whole copy, which gets the data of all ranks, for tests that change a training step."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.harness.models import squared, three_blocks
from tests.harness.oracle import parts_of, sharded, whole

__all__ = ["Loss", "Twins", "parts_of", "sharded"]

Loss = Callable[[Any, int, int], torch.Tensor]


class Twins:
    """Two models with the same weights.

    Attributes:
        model: the sharded one. plain: the whole one.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module] = three_blocks,
        strategy: str | None = None,
        shard: Callable[..., object] = sharded,
        **options: Any,
    ) -> None:
        """Build a model, from a fixed seed, and shard a copy of it: by ``sharded``, or as ``shard(model)`` does."""
        torch.manual_seed(0)
        self.plain: Any = build()
        self.model: Any = copy.deepcopy(self.plain)
        shard(self.model, *(() if strategy is None else (strategy,)), **options)

    def __iter__(self) -> Iterator[Any]:
        """Yield the sharded model, then the whole one."""
        return iter((self.model, self.plain))

    def optimizers(self, make: Callable[..., torch.optim.Optimizer], **options: Any) -> list[torch.optim.Optimizer]:
        """Make an optimizer of what requires gradients in each."""
        return [make([p for p in model.parameters() if p.requires_grad], **options) for model in self]

    def step(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Step optimizers of both, and drop the gradients."""
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def backward(self, step: int = 0, loss: Loss = squared, scale: float = 1.0) -> None:
        """Run forward and backward of ``loss(model, rank, step)``: on this rank's data, and on those of all ranks."""
        (loss(self.model, dist.get_rank(), step) * scale).backward()
        self.plain_backward(step, loss, scale)

    def plain_backward(self, step: int = 0, loss: Loss = squared, scale: float = 1.0) -> None:
        """Run the whole one's forward and backward alone."""
        for rank in range(dist.get_world_size()):
            (loss(self.plain, rank, step) * scale / dist.get_world_size()).backward()

    def zero_grad(self) -> None:
        """Drop the gradients of both."""
        for model in self:
            model.zero_grad()

    def gradients_apart(self) -> float:
        """Return the largest difference of any gradient; infinite where only one of the two has one."""
        worst = 0.0
        for mine, wanted in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            if (mine.grad is None) != (wanted.grad is None):
                return math.inf
            if mine.grad is not None and wanted.numel():
                worst = max(worst, float((whole(mine.grad, wanted) - wanted.grad).abs().max()))
        return worst

    def weights_apart(self) -> float:
        """Return the largest difference of any weight."""
        pairs = zip(self.model.parameters(), self.plain.parameters(), strict=True)
        return max(float((whole(one, other) - other.detach()).abs().max()) for one, other in pairs if other.numel())
