"""A verdict is given only where the measurements bear one."""

from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Row, Samples, write_rows
from benchmarks.harness_comparison import Verdict, compare, comparison_text

STEADY = (1.0, 1.01, 1.02, 1.03, 1.04)
FASTER = (0.8, 0.81, 0.82, 0.83, 0.84)
NOISY = (0.6, 0.8, 0.9, 1.1, 1.3)


def timing(
    values: tuple[float, ...], metric: str = "time", *, is_exact: bool = False, higher_is_better: bool = False
) -> Row:
    return Row("cast", {"size": 3}, metric, "s", Samples(values), is_exact, higher_is_better)


def word(before: Row, after: Row, **options: bool) -> str:
    (verdict,) = compare([before], [after], **options)
    return verdict.word


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (STEADY, FASTER, "better"),
        (FASTER, STEADY, "worse"),
        (STEADY, STEADY, "no verdict: within the spread"),
        (STEADY, NOISY, "no verdict: within the spread"),
        (STEADY, FASTER[:4], "no verdict: too few samples"),
    ],
)
def test_times_get_a_verdict_where_their_quartiles_do_not_overlap(
    before: tuple[float, ...], after: tuple[float, ...], expected: str
) -> None:
    assert word(timing(before), timing(after)) == expected


def test_more_throughput_is_better() -> None:
    assert word(timing(FASTER, higher_is_better=True), timing(STEADY, higher_is_better=True)) == "better"


def test_times_of_different_machines_get_no_verdict() -> None:
    assert word(timing(STEADY), timing(FASTER), is_same_machine=False) == "no verdict: other machine"


@pytest.mark.parametrize(("after", "expected"), [(0.5, "same"), (0.4999, "better"), (0.5001, "worse")])
def test_any_change_of_an_exact_quantity_is_a_change_on_any_machine(after: float, expected: str) -> None:
    assert word(timing((0.5,), is_exact=True), timing((after,), is_exact=True), is_same_machine=False) == expected


def test_only_quantities_that_both_have_are_compared() -> None:
    before = [timing(STEADY), timing(STEADY, "bytes")]
    assert [verdict.key for verdict in compare(before, [timing(FASTER, "bytes"), timing(FASTER, "launches")])] == [
        "cast: bytes (size=3)"
    ]


def test_the_ratio_is_after_over_before() -> None:
    assert Verdict("", 2.0, 1.0, "s", "better").ratio == 0.5
    assert Verdict("", 0.0, 0.0, "%", "same").ratio == 1.0
    assert Verdict("", 0.0, 1.0, "%", "worse").ratio == float("inf")


def test_files_are_compared_as_a_table(tmp_path: Path) -> None:
    write_rows(tmp_path / "before.json", [timing(STEADY)])
    write_rows(tmp_path / "after.json", [timing(FASTER)])
    text = comparison_text(tmp_path / "before.json", tmp_path / "after.json")
    assert text.splitlines()[-1].split() == ["cast:", "time", "(size=3)", "1.02", "0.82", "s", "0.804", "better"]


def test_files_of_different_machines_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "before.json", [timing(STEADY)])
    monkeypatch.setattr(harness, "_processor", lambda: "another processor")
    write_rows(tmp_path / "after.json", [timing(FASTER)])
    text = comparison_text(tmp_path / "before.json", tmp_path / "after.json")
    assert "measured on different machines" in text
    assert "no verdict: other machine" in text


def test_files_without_a_common_quantity_say_so(tmp_path: Path) -> None:
    write_rows(tmp_path / "before.json", [timing(STEADY)])
    write_rows(tmp_path / "after.json", [timing(STEADY, "bytes")])
    assert "no quantity is in both" in comparison_text(tmp_path / "before.json", tmp_path / "after.json")
