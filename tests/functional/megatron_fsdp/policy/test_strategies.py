"""The table of strategies: each one trains like the replicated model on every mesh shape, dtype policy and number of
microbatches, takes the memory and the traffic that explain() predicts, and less memory than the one before it."""

import functools
from itertools import pairwise, product

import pytest

from tests.functional.strategy_table import (
    MESHES,
    POLICIES,
    SETTINGS,
    TOLERANCES,
    ZERO,
    Outcome,
    Setting,
    replicated,
    run_all,
)
from tests.harness import run_ranks
from tests.harness.grids import covering, nightly_but
from tests.harness.oracle import disagreements

# Two ranks in bf16 under every strategy of one axis, so that these can be compared with each other.
QUICK = {
    *(Setting(*case) for case in covering((s.strategy, s.mesh, s.policy, s.num_microbatches) for s in SETTINGS)),
    *(Setting(strategy, (2,), "bf16 compute", number) for strategy, number in product(ZERO, (1, 3))),
}


def outcome_of(setting: Setting) -> list[Outcome]:
    """Return what every rank saw of a setting; those of a mesh shape run on the same ranks."""
    return _outcomes_on(setting.mesh, setting in QUICK)[setting]


@functools.cache
def _outcomes_on(mesh: tuple[int, ...], is_quick: bool) -> dict[Setting, list[Outcome]]:
    chosen = tuple(setting for setting in SETTINGS if setting.mesh == mesh and (setting in QUICK) is is_quick)
    ranks = run_ranks(chosen[0].num_ranks, run_all, chosen, timeout=120.0)
    return {setting: [rank[position] for rank in ranks] for position, setting in enumerate(chosen)}


@pytest.mark.parametrize("setting", nightly_but(QUICK, SETTINGS), ids=str)
def test_training_equals_the_replicated_run_under(setting: Setting) -> None:
    ranks = [outcome.history for outcome in outcome_of(setting)]
    wanted = replicated(setting.num_ranks, setting.policy, setting.num_microbatches)
    differences = disagreements(ranks, wanted, TOLERANCES[setting.policy])
    assert not differences, f"{setting!r}: {differences}"


@pytest.mark.parametrize("setting", nightly_but(QUICK, SETTINGS), ids=str)
def test_memory_at_rest_and_traffic_are_predicted_to_the_byte_under(setting: Setting) -> None:
    for rank, seen in enumerate(outcome_of(setting)):
        assert seen.predicted_bytes == seen.resting_bytes, f"rank {rank} of {setting!r}"
        assert seen.predicted_optimizer_bytes == seen.optimizer_bytes, f"rank {rank} of {setting!r}"
        assert seen.predicted_gradient_bytes == seen.gradient_bytes > 0, f"rank {rank} of {setting!r}"
        assert seen.predicted_traffic == seen.traffic, f"rank {rank} of {setting!r}"


SHARDED_MESHES = [mesh for mesh in MESHES if len(mesh) == 1 and mesh[0] > 1]
COMPARED = nightly_but([((2,), "bf16 compute")], product(SHARDED_MESHES, POLICIES))


@pytest.mark.parametrize(("mesh", "policy"), COMPARED, ids=str)
def test_each_zero_stage_keeps_less_than_the_one_before(mesh: tuple[int, ...], policy: str) -> None:
    by_strategy = [outcome_of(Setting(strategy, mesh, policy, 1)) for strategy in ZERO]
    for rank in range(mesh[0]):
        kept = [
            outcome.resting_bytes + outcome.optimizer_bytes + outcome.gradient_bytes
            for outcome in (outcomes[rank] for outcomes in by_strategy)
        ]
        assert all(earlier > later for earlier, later in pairwise(kept)), (
            f"rank {rank}: {dict(zip(ZERO, kept, strict=True))}"
        )


@pytest.mark.parametrize(("mesh", "policy"), COMPARED, ids=str)
def test_no_zero_stage_peaks_above_the_one_before(mesh: tuple[int, ...], policy: str) -> None:
    by_strategy = [outcome_of(Setting(strategy, mesh, policy, 3)) for strategy in ZERO[:3]]
    for rank in range(mesh[0]):
        peaks = [outcomes[rank].peak_bytes for outcomes in by_strategy]
        assert all(earlier >= later for earlier, later in pairwise(peaks)), f"rank {rank}: {peaks}"
