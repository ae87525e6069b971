"""The order of operations, compared with the files in ``golden/``.

``python -m tests.functional.transcripts`` writes the files anew; read the difference before committing it.
"""

from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.functional.transcripts import NUM_RANKS, SCENARIOS, golden_path, record
from tests.harness import run_ranks


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[str]]:
    by_rank = run_ranks(NUM_RANKS, record_all)
    return {name: [transcripts[name] for transcripts in by_rank] for name in SCENARIOS}


def record_all() -> dict[str, str]:
    transcripts = {}
    for name in SCENARIOS:
        try:
            transcripts[name] = record(name)
        except Exception as error:
            # One broken scenario fails its own tests, not everyone's.
            transcripts[name] = f"{type(error).__name__}: {error}"
    return transcripts


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_order_of_operations_is_the_golden_one_in(recorded: dict[str, list[str]], name: str) -> None:
    assert recorded[name][0] == golden_path(name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_do_the_same_in_the_same_order_in(recorded: dict[str, list[str]], name: str) -> None:
    assert len(set(recorded[name])) == 1


def test_every_golden_file_belongs_to_a_scenario() -> None:
    assert {path.stem for path in golden_path("any").parent.glob("*.txt")} == set(SCENARIOS)


def phases(transcript: str) -> Iterator[tuple[str, list[str]]]:
    for part in transcript.split("# ")[1:]:
        heading, *lines = part.splitlines()
        yield heading, lines


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_unit_is_used_before_its_gather_or_after_its_reshard_in(name: str) -> None:
    state: dict[str, str] = {}
    allowed = {"gather": (None, "reshard"), "use": ("gather",), "reshard": ("use",)}
    for line in golden_path(name).read_text(encoding="utf-8").splitlines():
        action, _, unit = line.partition(" ")
        if action in allowed:
            assert state.get(unit) in allowed[action], line
            state[unit] = action


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_reduction_is_folded_before_its_gradients_are_final_in(name: str) -> None:
    for heading, lines in phases(golden_path(name).read_text(encoding="utf-8")):
        if "backward" not in heading:
            continue
        for unit in {line.split()[1] for line in lines if line.startswith("final")}:
            assert [
                line.split()[0] for line in lines if line in (f"reduce {unit}", f"fold {unit}", f"final {unit}")
            ] == [
                "reduce",
                "fold",
                "final",
            ]


@pytest.mark.parametrize("name", ["two_steps", "half_frozen", "checkpointed_blocks"])
def test_from_the_second_step_on_every_gather_but_the_first_of_a_forward_runs_ahead_in(name: str) -> None:
    lines = dict(phases(golden_path(name).read_text(encoding="utf-8")))["step 2, forward"]
    waited_for_at_once = [line for line, following in pairwise(lines) if line.replace("gather", "use") == following]
    assert waited_for_at_once == ["gather blocks.0"]


def test_in_the_first_step_every_gather_of_a_forward_is_waited_for_at_once() -> None:
    lines = dict(phases(golden_path("two_steps").read_text(encoding="utf-8")))["step 1, forward"]
    assert not any(a.startswith("gather") and not b.startswith("use") for a, b in pairwise(lines))
