"""The command line of the benchmarks."""

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as commands


def test_every_bench_of_the_project_says_what_it_measures() -> None:
    assert all(summary.endswith(".") or "," in summary for summary in commands.benches().values())
    assert "planner" in commands.benches()


def test_a_bench_prints_its_rows_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, document = tmp_path / "rows.json", tmp_path / "padding.md"
    assert commands.main(["planner", "--no-times", "--document", str(document), "--out", str(results)]) == 0
    assert "planner: padding, rows (model=gpt2, shards=1024)" in capsys.readouterr().out
    content = json.loads(results.read_text())
    assert content["arguments"]["no_times"] is True
    assert len(content["rows"]) > 100
