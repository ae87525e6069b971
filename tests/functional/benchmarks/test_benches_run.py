"""Every bench runs at a tiny size and gives rows that can be written, read and compared."""

import math
from pathlib import Path

import pytest

from benchmarks import __main__ as commands
from benchmarks.harness import Row, read_rows
from tests.harness.grids import nightly_but

TINY = {
    "host": "--models llama-like vectors-9 --layers 2 --rounds 2",
    "link": "--layers 3 --collective 4 --compute 2 --rounds 2",
    "memory": "--layers 2 --width 32 --vocabulary 64 --ranks 8 --precisions bf16",
    "step": "--models 2x64 --precisions fp32 --layers 1 --width 32 --vocabulary 32 --rounds 1",
    "resident": "--engines ours FSDP2 --ranks 1 --layers 1 --width 16 --batch 1 --length 8 --steps 4 --every 2",
    "virtual": "--models llama3-8b mixtral-8x7b --meshes 8 --tokens 1024 --reduce fp32 --layers 2",
    "error_bar": "--blocks 1 --rounds 1",
    "checkpoint": "--layers 1 --width 32 --vocabulary 64 --rounds 1",
    "weights": "--layers 2 --width 32 --vocabulary 64 --rounds 1 --bucket-bytes 20000",
}


# These benches start processes or take long. Other tests cover their subjects: test_resident_memory.py,
# test_bench_virtual.py, test_simulated_link.py.
NIGHTLY = ("resident", "error_bar", "link")


@pytest.fixture(params=nightly_but((name for name in TINY if name not in NIGHTLY), TINY))
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> list[Row]:
    name = request.param
    assert commands.main([name, *TINY[name].split(), "--results", str(tmp_path / "results")]) == 0
    _, found = read_rows(tmp_path / "results" / f"{name}.json")
    assert {row.bench for row in found} == {name}
    return found


def test_a_bench_measures_finite_numbers_under_unique_keys(rows: list[Row]) -> None:
    assert len({row.key for row in rows}) == len(rows) > 3
    assert all(math.isfinite(row.samples.median) and math.isfinite(row.samples.spread) for row in rows)
    assert any("over" in row.metric for row in rows)
