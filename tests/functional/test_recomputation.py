"""What activation checkpointing gathers; that gradients stay right is among the uses of ``random_use_cases``."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dbuffer import observe_collectives
from tests.harness import on_ranks
from tests.harness.models import Block, Stack, inputs
from tests.harness.oracle import shard_each


class Checkpointed(Stack):
    """Runs its blocks in checkpointed regions of ``span`` blocks."""

    def __init__(self, span: int, use_reentrant: bool) -> None:
        super().__init__(*(Block(hidden=5 + 4 * index) for index in range(4)))
        self.span, self.use_reentrant = span, use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for start in range(0, len(self.layers), self.span):
            region = nn.Sequential(*self.layers[start : start + self.span])
            x = checkpoint(region, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("span", [1, 2])
@on_ranks(2)
def test_recomputation_shares_the_gather_of_backward_in_regions_of(span: int, use_reentrant: bool) -> None:
    model = Checkpointed(span, use_reentrant)
    shard_each(model)
    for step in range(2):
        kinds: Counter[str] = Counter()
        with observe_collectives(lambda call, kinds=kinds: kinds.update([call.kind])):
            # Reentrant checkpointing computes no gradient at all unless an input asks for one.
            model(inputs(0, step).requires_grad_()).square().mean().backward()
        # Reentrant regions run without a graph, so nothing says that a backward of the last unit will follow.
        assert kinds == {"all_gather": 8 if use_reentrant else 7, "reduce_scatter": 4}
