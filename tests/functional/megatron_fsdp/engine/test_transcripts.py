"""The order of operations, compared with the files in ``golden/``.

``python -m tests.functional.megatron_fsdp.engine.transcripts`` writes the files again; read the
difference before committing it.
"""

import pytest

from tests.functional.megatron_fsdp.engine.transcripts import NUM_RANKS, SCENARIOS, golden_path, record
from tests.harness import on_ranks


@pytest.mark.parametrize("name", SCENARIOS)
@on_ranks(NUM_RANKS)
def test_the_order_of_operations_is_the_golden_one_on_every_rank_in(name: str) -> None:
    found = record(name)
    assert found == golden_path(name).read_text(encoding="utf-8")


def test_every_golden_file_belongs_to_a_scenario() -> None:
    assert {path.stem for path in golden_path("any").parent.glob("*.txt")} == set(SCENARIOS)
