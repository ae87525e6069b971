"""The GPU bench, run on the CPU: its targets, its failures and its time limit."""

import argparse
from pathlib import Path

import pytest

from benchmarks import __main__ as commands
from benchmarks import bench_gpu
from benchmarks.bench_gpu import SECTIONS, TARGETS, Setup
from benchmarks.harness import Row, Samples, read_rows

SMALL = "--device cpu --small --rounds 1 --worlds 8 --batches 1".split()


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_gpu.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.slow
def test_a_rehearsal_runs_all_sections_and_measures_the_metric_of_every_target(tmp_path: Path) -> None:
    assert commands.main(["gpu", *SMALL, "--results", str(tmp_path)]) == 0
    _, rows = read_rows(tmp_path / "gpu-rehearsal.json")
    assert [(row.case["section"], row.metric) for row in rows if row.bench == "gpu"] == [("all", "rehearsal")]
    assert {row.bench for row in rows} == {"gpu", *SECTIONS}
    unmeasured = [target for target in TARGETS if not any(target.is_about(row) for row in rows)]
    # Ranked steps take several ranks, and only a GPU's allocator reserves memory.
    assert {(target.bench, target.metric) for target in unmeasured if target.bench != "ranked step"} == {
        ("step", "reserved memory over peer's")
    }
    assert len({row.key for row in rows}) == len(rows)
    may_be_zero = ("time in hook", "values that differ after replays")
    assert all(row.samples.median > 0 for row in rows if row.metric not in may_be_zero and row.bench != "host")


def failing(setup: Setup) -> list[Row]:
    raise RuntimeError("no kernel image\nis available")


def working(setup: Setup) -> list[Row]:
    return [Row("step", {"peer": "FSDP2"}, "wall time over peer's", "", Samples((0.9,)))]


def test_a_failed_section_is_reported_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECTIONS, "kernels", failing)
    monkeypatch.setitem(SECTIONS, "step", working)
    rows = bench_gpu.run(options(*SMALL, "--sections", "kernels", "step"))
    lines = bench_gpu.rows_text(rows).splitlines()
    assert "kernels: RuntimeError: no kernel image is available" in lines[2]
    assert lines[2].endswith("FAILED")
    assert lines[3].split()[-4:] == ["0.95", "0.900", "-", "met"]
    assert lines[-1] == "1 rehearsal, 1 failed, 1 met"


@pytest.mark.parametrize(
    ("bench", "metric", "value", "verdict"),
    [
        ("kernels", "rate over that of a copy", 0.9, "met"),
        ("kernels", "rate over that of a copy", 0.89, "MISSED"),
        ("ranked step", "wall time over peer's", 1.01, "MISSED"),
        ("step", "wall time over peer's", 0.95, "met"),
        ("step", "reserved memory over peer's", 1.03, "MISSED"),
    ],
)
def test_a_verdict_compares_the_median_with_the_target(bench: str, metric: str, value: float, verdict: str) -> None:
    text = bench_gpu.rows_text([Row(bench, {"ranks": 8}, metric, "", Samples((0.0, value, 2.0)))])
    line = text.splitlines()[1]
    assert line.split()[-1] == verdict
    assert "ranks 8" in line
