"""The pages of results show the measured rows: tables, pictures, and the error bar of ``plan``."""

import json
from pathlib import Path

import pytest

from benchmarks.harness import Row, Samples, write_rows
from benchmarks.performance_charts import CHARTS, Chart, svg
from benchmarks.performance_page import (
    ERROR_BAR,
    PAGES,
    TABLES,
    TABLES_PAGE,
    Claim,
    error_bar,
    page,
    picture_of,
    table_of,
)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_tables_of_a_page_are_those_of_the_results(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert page(text) == text, "run: python -m benchmarks.performance_page"


def test_the_page_of_tables_has_all_of_them() -> None:
    text = TABLES_PAGE.read_text(encoding="utf-8")
    assert [name for name in TABLES if f"<!-- table: {name} -->\n| ratio" not in text] == []


@pytest.mark.parametrize("name", CHARTS)
def test_a_picture_is_drawn_from_the_results(name: str) -> None:
    drawn = picture_of(name).read_text(encoding="utf-8")
    assert drawn == svg(CHARTS[name]()), "run: python -m benchmarks.performance_page"
    assert len(drawn) < 20_000
    assert f"]({name}.svg)" in PAGES[0].read_text(encoding="utf-8")


def heights(chart: Chart) -> list[float]:
    """Return the heights of a chart's bars."""
    bars = [line for line in svg([chart]).splitlines() if line.startswith("<rect x=") and 'height="11"' not in line]
    return [float(line.partition('height="')[2].partition('"')[0]) for line in bars]


def test_bars_are_as_high_as_their_values() -> None:
    one, two, three = heights(Chart("time", ["a", "b", "c"], {"ours": [1.0, 2.0, 3.0]}))
    assert (two / one, three / one) == pytest.approx((2, 3), rel=0.01)


def test_bars_of_a_logarithmic_chart_are_as_high_as_the_logarithms() -> None:
    low, middle, high = heights(Chart("padding", ["a", "b", "c"], {"ours": [0.02, 0.2, 2.0]}, is_log=True))
    assert high - middle == pytest.approx(middle - low, abs=0.2)


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


def test_plan_prints_the_error_bar_of_the_tables() -> None:
    found = error_bar()
    assert json.loads(ERROR_BAR.read_text(encoding="utf-8")) == found
    text = TABLES_PAGE.read_text(encoding="utf-8")
    summary = f"median error of {found['settings']} that were not fitted: {found['median']:.0f} %; worst error of"
    assert summary in text
    assert f"By the {found['clock']} clock" in " ".join(text.split())


def test_the_page_of_results_states_the_error_bar_of_the_tables() -> None:
    found = error_bar()
    words = f"the median error is {found['median']:.0f} % and the worst {found['worst']:.0f} %"
    assert words in " ".join(PAGES[0].read_text(encoding="utf-8").split())
