"""A run's folder of checkpoints: which are complete, which is the latest, and which are kept; without ranks."""

import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp import CheckpointError, ConfigError
from megatron_fsdp.checkpoint import scratch as checkpoint_scratch
from megatron_fsdp.checkpoint.manifest import DamagedCheckpointError
from megatron_fsdp.checkpoint.series import CheckpointSeries


def module(value: float = 0.0) -> nn.Linear:
    linear = nn.Linear(2, 3)
    with torch.no_grad():
        linear.weight.fill_(value)
    return linear


def save_steps(series: CheckpointSeries, *steps: int, keep_last: int | None = None) -> None:
    for step in steps:
        series.save(module(step), None, step, extra={"step": step}, keep_last=keep_last)


def damage(path: Path) -> None:
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_the_latest_is_the_one_saved_last_and_the_pointer_says_so(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    save_steps(series, 100, 200)
    assert series.steps() == [100, 200]
    assert series.latest() == 200
    assert (tmp_path / "latest").read_text() == "step_0000200\n"


def test_a_bare_pointer_holds_the_number_as_megatrons_tracker_does(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path, "iter_", "latest_checkpointed_iteration.txt", is_pointer_bare=True)
    save_steps(series, 7)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "7\n"
    assert series.latest() == 7
    assert series.steps() == [7]


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_a_folder_without_checkpoints_has_no_latest_and_loads_nothing(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    series = CheckpointSeries(tmp_path / folder)
    assert series.latest() is None
    assert series.steps() == []
    assert series.load(module(), None) is None


def test_a_pointer_without_a_step_is_an_error(tmp_path: Path) -> None:
    for content, said in ((b"release\n", "release"), (b"\xff", re.escape(r"\\xff")), ("²".encode(), "²")):
        (tmp_path / "latest").write_bytes(content)
        with pytest.raises(ConfigError, match=f"holds '{said}'\\. fix: write the number of a step"):
            CheckpointSeries(tmp_path).latest()
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be read .*fix: make it a readable file with a step in it"):
        CheckpointSeries(tmp_path).latest()


@pytest.mark.parametrize("keep_last", [1, 2])
def test_only_the_newest_are_kept(tmp_path: Path, keep_last: int) -> None:
    series = CheckpointSeries(tmp_path)
    save_steps(series, 1, 2, 3, 4, keep_last=keep_last)
    assert series.steps() == [1, 2, 3, 4][-keep_last:]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "latest",
        *(f"step_000000{step}" for step in series.steps()),
    ]


def test_a_run_restarted_from_an_earlier_step_keeps_its_new_checkpoints(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    save_steps(series, 1, 9)
    save_steps(series, 2, 3, keep_last=1)
    assert series.steps() == [3, 9]
    assert series.latest() == 3


def test_damaged_and_foreign_folders_neither_count_nor_get_deleted(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    save_steps(series, 1, 2)
    (series.path(1) / "state.pt").unlink()
    (tmp_path / "step_notes").mkdir()
    save_steps(series, 3, keep_last=2)
    assert series.steps() == [2, 3]
    assert series.path(1).exists()
    assert (tmp_path / "step_notes").exists()


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keeping_none_is_refused_before_anything_is_written(tmp_path: Path, keep_last: int) -> None:
    with pytest.raises(ConfigError, match=f"keep_last={keep_last}. fix: give at least 1"):
        save_steps(CheckpointSeries(tmp_path), 1, keep_last=keep_last)
    assert list(tmp_path.iterdir()) == []


def test_the_newest_whole_checkpoint_is_loaded_and_damaged_ones_reported(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    save_steps(series, 1, 2, 3)
    damage(series.path(3))
    model = module(9.0)
    loaded = series.load(model, None)
    assert loaded is not None
    assert (loaded.step, loaded.path, loaded.extra) == (2, series.path(2), {"step": 2})
    assert len(loaded.damaged) == 1
    assert f"{series.path(3) / '__0_0.distcp'} has the right size but another SHA-256" in loaded.damaged[0]
    assert model.weight.unique().tolist() == [2.0]


def test_checkpoints_after_the_pointers_are_of_an_earlier_run_and_not_loaded(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    save_steps(series, 1, 9)
    save_steps(series, 2, 3)
    loaded = series.load(module(), None)
    assert loaded is not None
    assert (loaded.step, loaded.extra) == (3, {"step": 3})
    damage(series.path(3))
    loaded = series.load(module(), None)
    assert loaded is not None
    assert (loaded.step, len(loaded.damaged)) == (2, 1)
    (tmp_path / "latest").unlink()
    loaded = series.load(module(), None)
    assert loaded is not None
    assert loaded.step == 9, "without a pointer, the newest"


def test_a_pointer_before_all_checkpoints_is_an_error_and_no_new_start(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    save_steps(series, 8, 9)
    series.mark_latest(7)
    with pytest.raises(
        CheckpointError, match=r"latest names step 7, .* are of later steps: \[8, 9\]\. fix: write the step"
    ):
        series.load(module(), None)


def test_no_whole_checkpoint_among_several_is_an_error_that_names_them(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    save_steps(series, 1, 2)
    damage(series.path(1))
    damage(series.path(2))
    model = module(9.0)
    with pytest.raises(DamagedCheckpointError, match=r"no checkpoint in .* is whole:(.|\n)*step_0000002(.|\n)*0000001"):
        series.load(model, None)
    assert model.weight.unique().tolist() == [9.0]


def test_a_checkpoint_of_another_model_is_an_error_and_no_damage(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    save_steps(series, 1)
    with pytest.raises(CheckpointError, match=r"of another model(.|\n)*weight: \(3, 2\) in the checkpoint, \(2, 2\)"):
        series.load(nn.Linear(2, 2), None)


def test_a_failed_save_leaves_the_pointer_at_the_one_before(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    save_steps(series, 1)
    with (
        mock.patch(
            "megatron_fsdp.checkpoint.writer.write_manifest", side_effect=OSError(28, "No space left on device")
        ),
        pytest.raises(CheckpointError, match=r"saving .*step_0000002 failed: OSError: .*No space left on device"),
    ):
        save_steps(series, 2)
    assert series.latest() == 1
    assert series.steps() == [1]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_0000001"]


def test_an_interrupted_deletion_leaves_no_half_checkpoint_and_is_finished_later(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    save_steps(series, 1, 2)
    with (
        mock.patch.object(checkpoint_scratch, "shutil", mock.Mock(rmtree=mock.Mock(side_effect=OSError("cut off")))),
        pytest.raises(CheckpointError, match="cut off"),
    ):
        save_steps(series, 3, keep_last=1)
    assert series.steps() == [2, 3]
    save_steps(series, 4, keep_last=1)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_0000004"]
