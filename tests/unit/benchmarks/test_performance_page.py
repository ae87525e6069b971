"""The performance page shows what was measured."""

import json
from pathlib import Path

import pytest

from benchmarks.harness import Row, Samples, write_rows
from benchmarks.performance_page import DOCUMENT, ERROR_BAR, TABLES, Claim, error_bar, page, table_of


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert page(text) == text


def test_the_page_has_all_tables() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [name for name in TABLES if f"<!-- table: {name} -->\n| ratio" not in text] == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        Row("step", {"model": "a", "peer": "p"}, "wall time over peer's", "", Samples((0.5, 0.7, 0.6))),
        Row("step", {"model": "b", "peer": "p"}, "wall time over peer's", "", Samples((1.5,))),
    ]
    write_rows(tmp_path / "step.json", rows)
    return tmp_path


def test_a_miss_is_marked_and_a_hit_is_not(folder: Path) -> None:
    claims = [Claim(model, "step", "wall time over peer's", {"model": model}, 1.0) for model in ("a", "b")]
    lines = table_of(claims, folder).splitlines()
    assert lines[2] == "| a | <= 1 | 0.60 | 33% | 3 |"
    assert lines[3] == "| b | <= 1 | 1.50 (missed) | exact |  |"


def test_plan_prints_the_error_bar_of_the_page() -> None:
    found = error_bar()
    assert json.loads(ERROR_BAR.read_text(encoding="utf-8")) == found
    summary = f"median error of {found['settings']} that were not fitted: {found['median']:.0f} %; worst error of"
    assert summary in DOCUMENT.read_text(encoding="utf-8")
    assert f"By the {found['clock']}" in DOCUMENT.read_text(encoding="utf-8")
