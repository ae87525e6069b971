"""Charts of ratios."""

from pathlib import Path

from benchmarks.chart import draw
from benchmarks.harness import Row, Samples

SECONDS = Row("step", {"engine": "ours"}, "wall time", "s", Samples((1.0, 2.0)))
RATIO = Row("step", {"peer": "theirs"}, "wall time over peer's", "", Samples((0.5, 0.7, 0.4)))


def test_ratios_are_drawn_and_seconds_are_not(tmp_path: Path) -> None:
    path = tmp_path / "charts" / "step.png"
    assert draw([SECONDS, RATIO, RATIO], path) == 2
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_is_written_where_there_is_no_ratio(tmp_path: Path) -> None:
    assert draw([SECONDS], tmp_path / "step.png") == 0
    assert not (tmp_path / "step.png").exists()
