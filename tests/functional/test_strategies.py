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
from tests.functional.training import disagreements
from tests.harness import run_ranks


@functools.cache
def outcomes_on(mesh: tuple[int, ...]) -> dict[Setting, list[Outcome]]:
    """Run all settings of a mesh shape on the same ranks and return what every rank saw."""
    chosen = tuple(setting for setting in SETTINGS if setting.mesh == mesh)
    ranks = run_ranks(chosen[0].num_ranks, run_all, chosen, timeout=120.0)
    return {setting: [rank[position] for rank in ranks] for position, setting in enumerate(chosen)}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_training_equals_the_replicated_run_under(setting: Setting) -> None:
    ranks = [outcome.history for outcome in outcomes_on(setting.mesh)[setting]]
    wanted = replicated(setting.num_ranks, setting.policy, setting.num_microbatches)
    differences = disagreements(ranks, wanted, TOLERANCES[setting.policy])
    assert not differences, f"{setting!r}: {differences}"


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_memory_at_rest_and_traffic_are_predicted_to_the_byte_under(setting: Setting) -> None:
    for rank, seen in enumerate(outcomes_on(setting.mesh)[setting]):
        assert seen.predicted_bytes == seen.resting_bytes, f"rank {rank} of {setting!r}"
        assert seen.predicted_optimizer_bytes == seen.optimizer_bytes, f"rank {rank} of {setting!r}"
        assert seen.predicted_traffic == seen.traffic, f"rank {rank} of {setting!r}"


SHARDED_MESHES = [mesh for mesh in MESHES if len(mesh) == 1 and mesh[0] > 1]


@pytest.mark.parametrize(("mesh", "policy"), list(product(SHARDED_MESHES, POLICIES)), ids=str)
def test_each_zero_stage_keeps_less_than_the_one_before(mesh: tuple[int, ...], policy: str) -> None:
    by_strategy = [outcomes_on(mesh)[Setting(strategy, mesh, policy, 1)] for strategy in ZERO]
    for rank in range(mesh[0]):
        kept = [outcomes[rank].resting_bytes + outcomes[rank].optimizer_bytes for outcomes in by_strategy]
        assert all(earlier > later for earlier, later in pairwise(kept)), (
            f"rank {rank}: {dict(zip(ZERO, kept, strict=True))}"
        )


@pytest.mark.parametrize(("mesh", "policy"), list(product(SHARDED_MESHES, POLICIES)), ids=str)
def test_no_zero_stage_peaks_above_the_one_before(mesh: tuple[int, ...], policy: str) -> None:
    by_strategy = [outcomes_on(mesh)[Setting(strategy, mesh, policy, 3)] for strategy in ZERO[:3]]
    for rank in range(mesh[0]):
        peaks = [outcomes[rank].peak_bytes for outcomes in by_strategy]
        assert all(earlier >= later for earlier, later in pairwise(peaks)), f"rank {rank}: {peaks}"
