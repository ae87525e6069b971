"""``megatron-fsdp bisect``: the first step and the units in which two logs differ."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.__main__ import main


def log(folder: Path, *checksums: str, units: list[dict[str, str]] | None = None) -> Path:
    folder.mkdir()
    rows: list[dict[str, Any]] = [{"iteration": 5, "lm_loss": 1.0}]
    for index, number in enumerate(checksums):
        row: dict[str, Any] = {"iteration": 10 * (index + 1), "checksum": number}
        rows.append(row if units is None else {**row, "unit_checksums": units[index]})
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_runs_that_agree_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = log(tmp_path / "a", "aa", "bb"), log(tmp_path / "b", "aa", "bb", "cc")
    assert main(["bisect", str(one), str(two / "log.jsonl")]) == 0
    assert "equal at all 2 steps that both logged, 10 to 20" in capsys.readouterr().out


def test_the_first_step_and_its_units_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = {"": "1", "layers.0": "2", "layers.1": "3"}
    one = log(tmp_path / "a", "aa", "bb", "cc", units=[same, same, same])
    two = log(tmp_path / "b", "aa", "xx", "yy", units=[same, {**same, "": "4", "layers.1": "5"}, same])
    assert main(["bisect", str(one), str(two)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["step 20 differs; step 10 is the last that agrees", "  the root: 1 and 4", "  layers.1: 3 and 5"]


def test_without_units_the_flag_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", str(log(tmp_path / "a", "aa")), str(log(tmp_path / "b", "ab"))]) == 1
    out = capsys.readouterr().out
    assert "step 10 differs; no step before it was logged" in out
    assert "--log-checksum-per-unit" in out


@pytest.mark.parametrize(
    ("text", "words"), [("{}\n", "has no checksums"), ("x\n{}\n", "line 1: no JSON"), (None, "cannot read")]
)
def test_a_log_that_says_nothing_is_an_error(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    if text is not None:
        bad.write_text(text)
    assert main(["bisect", str(log(tmp_path / "a", "aa")), str(bad)]) == 2
    assert words in capsys.readouterr().err


def test_logs_without_a_common_step_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"iteration": 7, "checksum": "aa"}\n')
    assert main(["bisect", str(log(tmp_path / "a", "aa")), str(other)]) == 2
    assert "no step in common" in capsys.readouterr().err
