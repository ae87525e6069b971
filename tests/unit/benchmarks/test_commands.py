"""The command line of the benchmarks."""

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as commands


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that takes the place of the one with the benches."""
    monkeypatch.setattr(commands, "FOLDER", tmp_path)
    return tmp_path


def test_help_lists_every_bench_with_the_first_line_of_its_docstring(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bench_gather.py").write_text('"""Bytes per second of a gather.\n\nMore."""\nimport what_is_not_there\n')
    with pytest.raises(SystemExit) as stopped:
        commands.main(["--help"])
    assert stopped.value.code == 0
    words = capsys.readouterr().out.split()
    assert words[words.index("gather") :][:6] == ["gather", "Bytes", "per", "second", "of", "a"]
    assert "More." not in words


def test_every_bench_of_the_project_says_what_it_measures() -> None:
    assert all(summary.endswith(".") or "," in summary for summary in commands.benches().values())
    assert "planner" in commands.benches()


def test_an_unknown_bench_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        commands.main(["nothing"])
    assert stopped.value.code == 2
    assert "'nothing' is none of" in capsys.readouterr().err


def test_a_bench_prints_its_rows_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, document = tmp_path / "rows.json", tmp_path / "padding.md"
    assert commands.main(["planner", "--no-times", "--document", str(document), "--out", str(results)]) == 0
    assert "planner: padding, rows (model=gpt2, shards=1024)" in capsys.readouterr().out
    content = json.loads(results.read_text())
    assert content["arguments"]["no_times"] is True
    assert len(content["rows"]) > 100
