"""The parity check is worth something: it fails when any one collective is left out, or wrong in one of many ways."""

import pytest

from tests.functional.faults import FAULTS, CallCounter
from tests.harness import run_ranks
from tests.harness.oracle import History, Recipe, disagreements, train_replicated, train_sharded

# They try the tests, not the library.
pytestmark = pytest.mark.slow

RECIPES = {
    **{name: Recipe(name, num_steps=1) for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")},
    **{name: Recipe(name, (2, 2), num_steps=1, num_blocks=1) for name in ("hsdp", "hfsdp")},
}
GATHER, SCATTER, REDUCE = "all_gather over ", "reduce_scatter over ", "all_reduce over "
# With the all-reduces of the norm, which run over every axis that cuts the gradients.
COLLECTIVES = {
    "no_shard": {REDUCE + "axis0"},
    "optim": {GATHER + "axis0", SCATTER + "axis0", REDUCE + "axis0"},
    "optim_grads": {GATHER + "axis0", SCATTER + "axis0", REDUCE + "axis0"},
    "optim_grads_params": {GATHER + "axis0", SCATTER + "axis0", REDUCE + "axis0"},
    "hsdp": {GATHER + "axis1", SCATTER + "axis1", REDUCE + "axis0", REDUCE + "axis1"},
    "hfsdp": {kind + axis for kind in (GATHER, SCATTER, REDUCE) for axis in ("axis0", "axis1")},
}
COMPLETE = "with all of them"


def train_without_each_call(recipe: Recipe) -> dict[str, History]:
    """Train once with all collectives, then once for each of them without that one."""
    counter = CallCounter()
    histories = {COMPLETE: train_sharded(recipe, counter.installed)}
    for position, call in enumerate(counter.calls):
        without = CallCounter(left_out=position)
        histories[f"{call}, call {position}"] = train_sharded(recipe, without.installed)
    return histories


def train_with_fault(name: str) -> dict[str, History]:
    """Train with every call wrong in the same way, under each strategy that meets the fault."""
    fault = FAULTS[name]
    return {strategy: train_sharded(Recipe(strategy, num_steps=2), fault.installed) for strategy in fault.strategies}


@pytest.mark.parametrize("strategy", RECIPES)
def test_parity_holds_with_all_collectives_and_fails_when_any_one_call_is_left_out(strategy: str) -> None:
    recipe = RECIPES[strategy]
    by_rank = run_ranks(recipe.num_ranks, train_without_each_call, recipe)
    oracle = train_replicated(recipe)
    names = list(by_rank[0])
    unnoticed = [name for name in names if not disagreements([histories[name] for histories in by_rank], oracle)]
    assert {name.partition(",")[0] for name in names} == {COMPLETE, *COLLECTIVES[strategy]}
    assert unnoticed == [COMPLETE]


@pytest.mark.parametrize("name", FAULTS)
def test_parity_fails_with(name: str) -> None:
    by_rank = run_ranks(2, train_with_fault, name)
    unnoticed = [
        strategy
        for strategy in FAULTS[name].strategies
        if not disagreements(
            [histories[strategy] for histories in by_rank], train_replicated(Recipe(strategy, num_steps=2))
        )
    ]
    assert unnoticed == []
