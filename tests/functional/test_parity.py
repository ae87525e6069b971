"""Sharded training equals replicated training of the global batch, on any number of ranks and under every strategy."""

import pytest
import torch

from megatron_fsdp import MixedPrecisionPolicy
from tests.functional.training import (
    Accumulation,
    Clip,
    Recipe,
    Tolerance,
    ZeroGrad,
    disagreements,
    train_replicated,
    train_sharded,
)
from tests.harness import run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def compare(recipe: Recipe, tolerance: Tolerance | None = None) -> list[str]:
    return disagreements(run_ranks(recipe.num_ranks, train_sharded, recipe), train_replicated(recipe), tolerance)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_twenty_steps_equal_the_replicated_run(strategy: str, num_ranks: int) -> None:
    assert compare(Recipe(strategy, (num_ranks,))) == []


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_twenty_steps_clipped_by_torch_equal_the_replicated_run(num_ranks: int) -> None:
    assert compare(Recipe("optim_grads_params", (num_ranks,), clip=Clip.STOCK)) == []
