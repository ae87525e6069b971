"""The order of operations, compared with the files in ``golden/``.

``python -m tests.functional.transcripts`` writes the files anew; read the difference before committing it.
"""

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
def test_the_order_of_operations_is_the_golden_one_on_every_rank_in(recorded: dict[str, list[str]], name: str) -> None:
    assert set(recorded[name]) == {golden_path(name).read_text(encoding="utf-8")}


def test_every_golden_file_belongs_to_a_scenario() -> None:
    assert {path.stem for path in golden_path("any").parent.glob("*.txt")} == set(SCENARIOS)
