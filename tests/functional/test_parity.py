"""Sharded training equals replicated training of the global batch, on any number of ranks and under every strategy."""

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import MixedPrecisionPolicy, clip_grad_norm_, fully_shard_optimizer, microbatch, no_sync
from tests.harness import run_ranks
from tests.harness.grids import covering, nightly_but
from tests.harness.models import draw_tokens, loss_of, make_model
from tests.harness.oracle import STRATEGIES, ZERO, sharded, whole_state

# A value between the smallest and the largest norm of these runs: some steps are clipped, others are not.
MAX_NORM = 0.45


@dataclass(frozen=True)
class Recipe:
    """A training run.

    Attributes:
        strategy: a key of ``STRATEGIES``. mesh: its shape. clip: "ours" or "torch".
        announced: how the last microbatch of a step is marked: by "microbatch", "no_sync" or "nothing".
        zeroes: gradients, after a step: to "none", to "zero", or "never".
        optimizer: class in ``torch.optim``, and its options. own_dtype: of the parameters before sharding.
    """

    strategy: str = "optim_grads_params"
    mesh: tuple[int, ...] = (2,)
    steps: int = 3
    microbatches: int = 2
    clip: str = "ours"
    announced: str = "microbatch"
    zeroes: str = "none"
    optimizer: str = "AdamW"
    options: tuple[tuple[str, float], ...] = (("lr", 0.01), ("weight_decay", 0.1))
    is_adapted: bool = True
    policy: MixedPrecisionPolicy | None = None
    own_dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Run:
    """Losses of microbatches and of one more forward at the end, norms before clipping, whole weights by name."""

    losses: torch.Tensor
    norms: torch.Tensor
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tolerance:
    """Largest absolute differences."""

    weight: float = 1e-5
    norm: float = 1e-5
    loss: float = 1e-5


def trained(recipe: Recipe, ranks: Sequence[int] = ()) -> Run:
    """Train sharded on this rank's data; or whole on the data of ``ranks``, with FP32 weights cast for compute."""
    model = make_model().to(recipe.own_dtype)
    forward: Any = model
    if ranks:
        dtype = recipe.policy and recipe.policy.param_dtype
        forward = partial(_computed_in, model.float(), dtype or recipe.own_dtype)
    else:
        sharded(model, recipe.strategy, mesh=recipe.mesh, mp_policy=recipe.policy)
    optimizer = getattr(torch.optim, recipe.optimizer)(model.parameters(), **dict(recipe.options))
    if recipe.is_adapted and not ranks:
        fully_shard_optimizer(optimizer)

    def mean_loss(step: int, index: int = 0) -> torch.Tensor:
        batches = [draw_tokens(rank, step, index) for rank in ranks or [dist.get_rank()]]
        return torch.stack([loss_of(forward(tokens), tokens) for tokens in batches]).mean()

    losses, norms = [], []
    for step in range(recipe.steps):
        for index in range(recipe.microbatches):
            with nullcontext() if ranks else _announced(recipe, model, index == recipe.microbatches - 1):
                loss = mean_loss(step, index)
                (loss / recipe.microbatches).backward()
            losses.append(loss.item())
        is_ours = recipe.clip == "ours" and not ranks
        norm = clip_grad_norm_(model, MAX_NORM) if is_ours else nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        if recipe.zeroes != "never":
            optimizer.zero_grad(set_to_none=recipe.zeroes == "none")
    losses.append(mean_loss(recipe.steps).item())
    return Run(torch.tensor(losses), torch.tensor(norms), whole_state(model))


def _computed_in(model: nn.Module, dtype: torch.dtype, tokens: torch.Tensor) -> Any:
    compute = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, compute, (tokens,))


def _announced(recipe: Recipe, model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    if recipe.announced == "microbatch":
        return microbatch(model, is_last)
    return no_sync(model) if recipe.announced == "no_sync" and not is_last else nullcontext()


@functools.cache
def replicated(recipe: Recipe, num_ranks: int) -> Run:
    return trained(recipe, range(num_ranks))


def trained_each(recipes: Sequence[Recipe]) -> list[Run]:
    return [trained(recipe) for recipe in recipes]


def compare(recipes: Mapping[str, Recipe], tolerance: Tolerance | None = None) -> dict[str, list[str]]:
    """Run recipes on the same ranks, and in this process; return the differences by recipe, without empty ones."""
    (num_ranks,) = {torch.Size(recipe.mesh).numel() for recipe in recipes.values()}
    by_rank = run_ranks(num_ranks, trained_each, list(recipes.values()))
    # A single process has no strategy and no way to mark microbatches.
    same = {"strategy": "", "mesh": (), "announced": "", "clip": "", "is_adapted": False}
    differences = {
        name: apart(runs, replicated(replace(recipe, **same), num_ranks), tolerance or Tolerance())
        for (name, recipe), *runs in zip(recipes.items(), *by_rank, strict=True)
    }
    return {name: lines for name, lines in differences.items() if lines}


def apart(ranks: Sequence[Run], oracle: Run, tolerance: Tolerance) -> list[str]:
    """Return the values that differ by more than the tolerance, or are not numbers."""
    mean_losses = torch.stack([run.losses for run in ranks]).mean(0)
    pairs = [("losses", mean_losses, oracle.losses, tolerance.loss)]
    for rank, run in enumerate(ranks):
        assert run.weights.keys() == oracle.weights.keys()
        pairs.append((f"norms of rank {rank}", run.norms, oracle.norms, tolerance.norm))
        for name, weight in oracle.weights.items():
            pairs.append((f"{name} on rank {rank}", run.weights[name], weight, tolerance.weight))
    worst = {what: float((mine.float() - wanted.float()).abs().max()) for what, mine, wanted, _ in pairs}
    return [f"{what}: off by {worst[what]:.3g}" for what, *_, limit in pairs if not worst[what] <= limit]


# A rounding to bf16 is off by 2**-9 of the value at most: losses here are near 3.4 and norms near 0.45. In 20 steps of
# 0.001 weights move by 0.02, and leaving out the rounding altogether moves them by another 0.002.
BF16 = Tolerance(weight=2.5e-4, norm=2**-10, loss=2**-8)
SLOW_ADAMW = (("lr", 0.001), ("weight_decay", 0.1))
POLICIES = {
    "fp32 reduction": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 reduction": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "bf16 gradients at rest": MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_grads_dtype=torch.bfloat16),
}
MESHES = ((1,), (2,), (4,), (1, 2), (2, 1), (2, 2))
TABLE = [
    case
    for case in product(MESHES, STRATEGIES, [None, "fp32 reduction", "bf16 reduction"], (1, 3))
    if len(STRATEGIES[case[1]].dp_axes) == len(case[0])
]
# With the usual epsilon, a gradient near zero moves its weight by a full step, and rounding decides the sign.
STEADY_ADAMW = (*SLOW_ADAMW, ("eps", 0.001))


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


SHORT, KEPT = Recipe(), Recipe(zeroes="never")
WAYS = ("nothing", "no_sync")
FP32_REDUCTION = Recipe(steps=5, options=SLOW_ADAMW, policy=POLICIES["fp32 reduction"])
TWO_AXES = ("hsdp", "hfsdp")
IN_FP32: dict[str, tuple[Recipe, tuple[str, ...]]] = {
    # Twenty steps show drift; a mistake within a step shows in six.
    "six steps on three ranks": (Recipe(mesh=(3,), steps=6), ZERO),
    "a stock optimizer, clipped by torch": (Recipe(mesh=(4,), steps=6, clip="torch", is_adapted=False), ZERO[-1:]),
    "clipped by torch": (replace(SHORT, clip="torch"), ZERO),
    "clipped by torch on two axes": (Recipe(mesh=(2, 2), steps=4, clip="torch"), TWO_AXES),
    "clipped on two axes": (Recipe(mesh=(2, 2), steps=4), TWO_AXES),
    "gradients set to zero": (replace(SHORT, zeroes="zero"), ZERO),
    "gradients that nobody zeroes": (KEPT, ZERO),
    **{f"microbatches by {way}": (replace(SHORT, announced=way), ZERO) for way in WAYS},
    **{f"microbatches by {way} that nobody zeroes": (replace(KEPT, announced=way), ZERO) for way in WAYS},
    **{f"{way}, that nobody zeroes on two axes": (replace(KEPT, mesh=(2, 2), announced=way), TWO_AXES) for way in WAYS},
    **{f"{number} steps on {ranks} ranks": (Recipe(mesh=(ranks,), steps=number), ZERO)
       for ranks, number in product([1, 2, 3, 4], [6, 20])},
    **{f"{number} steps of a stock optimizer on {ranks} ranks": (
        Recipe(mesh=(ranks,), steps=number, clip="torch", is_adapted=False), ZERO[-1:]
       ) for ranks, number in product([1, 2, 3, 4], [6, 20])},
    **{f"clipped by {clip} on {mesh}": (Recipe(mesh=mesh, steps=4, clip=clip), TWO_AXES)
       for mesh, clip in product([(1, 2), (2, 1)], ["ours", "torch"])},
}  # fmt: skip
BY_DAY = list(IN_FP32)[:10]
IN_BF16 = {
    "bf16 compute over fp32 weights": (FP32_REDUCTION, ZERO),
    "it on two axes": (replace(FP32_REDUCTION, mesh=(2, 2)), TWO_AXES),
    "bf16 reduction": (replace(FP32_REDUCTION, policy=POLICIES["bf16 reduction"]), ZERO[-1:]),
    "bf16 gradients at rest": (replace(FP32_REDUCTION, policy=POLICIES["bf16 gradients at rest"]), ZERO[-1:]),
    "fp32 main weights of a bf16 model": (
        replace(
            FP32_REDUCTION, own_dtype=torch.bfloat16,
            policy=MixedPrecisionPolicy(main_params_dtype=torch.float32, reduce_dtype=torch.float32),
        ),
        ZERO,
    ),
    **{f"twenty steps, {name}": (replace(FP32_REDUCTION, steps=20, policy=policy), ZERO[-1:])
       for name, policy in POLICIES.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", nightly_but(BY_DAY, IN_FP32))
def test_every_strategy_steps_as_the_replicated_run_with(name: str) -> None:
    recipe, strategies = IN_FP32[name]
    assert compare({strategy: replace(recipe, strategy=strategy) for strategy in strategies}) == {}


@pytest.mark.parametrize("name", nightly_but(list(IN_BF16)[:5], IN_BF16))
def test_training_stays_near_the_replicated_run_in(name: str) -> None:
    recipe, strategies = IN_BF16[name]
    assert compare({strategy: replace(recipe, strategy=strategy) for strategy in strategies}, BF16) == {}


def test_fp32_main_weights_keep_steps_that_bf16_weights_would_round_away() -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    recipe = Recipe(steps=1, optimizer="SGD", options=(("lr", 1e-5),), policy=policy, own_dtype=torch.bfloat16)
    before = make_model().bfloat16().head.weight
    after = run_ranks(2, trained, recipe)[0].weights["head.weight"]
    assert torch.equal(before, after.bfloat16())
    assert not torch.equal(before.float(), after)
