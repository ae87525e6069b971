"""Sharded training equals replicated training of the global batch, on any number of ranks and under every strategy."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from megatron_fsdp import MixedPrecisionPolicy
from tests.harness import run_ranks
from tests.harness.grids import covering, nightly_but
from tests.harness.oracle import (
    STRATEGIES,
    ZERO,
    Accumulation,
    Clip,
    History,
    Recipe,
    Tolerance,
    ZeroGrad,
    disagreements,
    train_replicated,
    train_sharded,
)

WAYS = (Accumulation.UNANNOUNCED, Accumulation.NO_SYNC)

# One rounding to bf16 is off by 2**-9 of the value at most: losses here are near 3.4 and norms near 0.45. In 20 steps
# of 0.001 weights move by 0.02, and leaving out the rounding altogether moves them by another 0.002.
BF16 = Tolerance(weight=2.5e-4, norm=2**-10, loss=2**-8)
SLOW_ADAMW = {"lr": 0.001, "weight_decay": 0.1}
POLICIES = {
    "fp32 reduction": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 reduction": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "bf16 gradients at rest": MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_grads_dtype=torch.bfloat16),
}


def train_each(recipes: Sequence[Recipe]) -> list[History]:
    return [train_sharded(recipe) for recipe in recipes]


def compare(recipes: Mapping[str, Recipe], tolerance: Tolerance | None = None) -> dict[str, list[str]]:
    """Run recipes on the same ranks, and in this process; return how they differ, for those that do."""
    (num_ranks,) = {recipe.num_ranks for recipe in recipes.values()}
    ranks = run_ranks(num_ranks, train_each, list(recipes.values()))
    differences = {
        name: disagreements([histories[position] for histories in ranks], train_replicated(recipe), tolerance)
        for position, (name, recipe) in enumerate(recipes.items())
    }
    return {name: lines for name, lines in differences.items() if lines}


MESHES = ((1,), (2,), (4,), (1, 2), (2, 1), (2, 2))
TABLE = [
    case
    for case in product(MESHES, STRATEGIES, [None, "fp32 reduction", "bf16 reduction"], (1, 3))
    if len(STRATEGIES[case[1]].dp_axes) == len(case[0])
]
# With the usual epsilon a gradient near zero whose sign is a matter of rounding would move its weight all the way.
STEADY_ADAMW = {"lr": 0.001, "eps": 0.001, "weight_decay": 0.1}


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize(
    ("mesh", "is_whole"), nightly_but(product(MESHES, [False]), product(MESHES, [False, True])), ids=str
)
def test_every_strategy_equals_the_replicated_run_on(mesh: tuple[int, ...], is_whole: bool, is_bf16: bool) -> None:
    chosen = TABLE if is_whole else covering(TABLE)
    recipes = {
        f"{strategy}, {policy}, {number}": Recipe(
            strategy, mesh, 2, number, options=STEADY_ADAMW, policy=POLICIES[policy] if policy else None
        )
        for shape, strategy, policy, number in chosen
        if shape == mesh and bool(policy) == is_bf16
    }
    assert recipes
    assert compare(recipes, Tolerance(weight=2.5e-4, norm=2**-9, loss=2**-8) if is_bf16 else None) == {}


# Twenty steps show drift; what goes wrong in a step shows in six.
@pytest.mark.parametrize(("num_ranks", "num_steps"), nightly_but([(3, 6)], product([1, 2, 3, 4], [6, 20])))
def test_some_steps_equal_the_replicated_run(num_ranks: int, num_steps: int) -> None:
    recipes = {strategy: Recipe(strategy, (num_ranks,), num_steps) for strategy in ZERO}
    assert compare(recipes) == {}


@pytest.mark.parametrize(("num_ranks", "num_steps"), nightly_but([(4, 6)], product([1, 2, 3, 4], [6, 20])))
def test_some_steps_of_a_stock_optimizer_clipped_by_torch_equal_the_replicated_run(
    num_ranks: int, num_steps: int
) -> None:
    recipe = Recipe(mesh_shape=(num_ranks,), num_steps=num_steps, clip=Clip.STOCK, is_adapted=False)
    assert compare({"optim_grads_params": recipe}) == {}


TWO_AXES = list(product(("hsdp", "hfsdp"), ((2, 2), (1, 2), (2, 1)), Clip))


@pytest.mark.parametrize(
    ("strategy", "mesh", "clip"), nightly_but([each for each in TWO_AXES if each[1] == (2, 2)], TWO_AXES), ids=str
)
def test_either_clip_works_on_two_axes(strategy: str, mesh: tuple[int, ...], clip: Clip) -> None:
    assert compare({strategy: Recipe(strategy, mesh, num_steps=4, clip=clip)}) == {}


SHORT = Recipe(num_steps=3)
KEPT = replace(SHORT, zero_grad=ZeroGrad.NEVER)
WAYS_TO_STEP = {
    "clipped by torch": replace(SHORT, clip=Clip.STOCK),
    "gradients set to zero": replace(SHORT, zero_grad=ZeroGrad.TO_ZERO),
    "gradients that nobody zeroes": KEPT,
    **{f"microbatches by {way.value}": replace(SHORT, accumulation=way) for way in WAYS},
    **{f"microbatches by {way.value} that nobody zeroes": replace(KEPT, accumulation=way) for way in WAYS},
}


@pytest.mark.parametrize("way", WAYS_TO_STEP)
def test_every_strategy_steps_as_the_replicated_run_with(way: str) -> None:
    assert compare({strategy: replace(WAYS_TO_STEP[way], strategy=strategy) for strategy in ZERO}) == {}


@pytest.mark.parametrize("accumulation", nightly_but(WAYS[:1], WAYS), ids=lambda choice: choice.name)
def test_gradients_that_nobody_zeroes_accumulate_on_two_axes(accumulation: Accumulation) -> None:
    recipe = replace(KEPT, mesh_shape=(2, 2), accumulation=accumulation)
    assert compare({strategy: replace(recipe, strategy=strategy) for strategy in ("hsdp", "hfsdp")}) == {}


@pytest.mark.parametrize("num_steps", nightly_but([5], [5, 20]))
def test_some_steps_in_bf16_stay_near_the_replicated_run(num_steps: int) -> None:
    recipes = {
        name: Recipe(num_steps=num_steps, options=SLOW_ADAMW, policy=policy) for name, policy in POLICIES.items()
    }
    assert compare(recipes, BF16) == {}


FP32_REDUCTION = Recipe(num_steps=5, options=SLOW_ADAMW, policy=POLICIES["fp32 reduction"])
NARROW = {
    "bf16 compute over fp32 weights": (FP32_REDUCTION, ZERO),
    "it on two axes": (replace(FP32_REDUCTION, mesh_shape=(2, 2)), ("hsdp", "hfsdp")),
    "fp32 main weights of a bf16 model": (
        replace(
            FP32_REDUCTION, own_dtype=torch.bfloat16,
            policy=MixedPrecisionPolicy(main_params_dtype=torch.float32, reduce_dtype=torch.float32),
        ),
        ZERO,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NARROW)
def test_training_stays_near_the_replicated_run_in(name: str) -> None:
    recipe, strategies = NARROW[name]
    assert compare({strategy: replace(recipe, strategy=strategy) for strategy in strategies}, BF16) == {}


def test_fp32_main_weights_keep_steps_that_bf16_weights_would_round_away() -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    recipe = Recipe(num_steps=1, optimizer="SGD", options={"lr": 1e-5}, policy=policy, own_dtype=torch.bfloat16)
    before = train_replicated(Recipe(num_steps=0, own_dtype=torch.bfloat16)).weights["head.weight"]
    after = run_ranks(2, train_sharded, recipe)[0].weights["head.weight"]
    assert torch.equal(before.bfloat16(), after.bfloat16())
    assert not torch.equal(before, after)
