"""The losses of several runs are drawn into one chart and their last validation printed."""

import json
from pathlib import Path

import pytest

import compare_runs


def write_log(folder: Path, losses: list[float], validation: float) -> str:
    rows = [{"iteration": number, "lm_loss": loss} for number, loss in enumerate(losses, start=1)]
    rows.append({"iteration": len(losses), "validation_loss": validation})
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder)


def test_the_chart_is_a_png_and_the_last_validations_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [f"one={write_log(tmp_path / 'a', [3.0, 2.0], 2.25)}", f"two={write_log(tmp_path / 'b', [3.0, 1.0], 1.5)}"]
    assert compare_runs.main(["--output", str(tmp_path / "losses.png"), *runs]) == 0
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines() == [
        "one: validation loss 2.2500 at iteration 2",
        "two: validation loss 1.5000 at iteration 2",
    ]


def test_a_folder_without_a_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_runs.main(["--output", str(tmp_path / "losses.png"), f"one={tmp_path}"])
    assert "wanted NAME=FOLDER with a log.jsonl" in capsys.readouterr().err
