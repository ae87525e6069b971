"""A save changes only its own files, wherever it is killed and whatever else is in the folder."""

import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megatron_fsdp import CheckpointError, load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint import api as checkpoint
from megatron_fsdp.checkpoint import scratch as checkpoint_scratch
from megatron_fsdp.checkpoint.model_state import match_model
from megatron_fsdp.checkpoint.scratch import make_scratch, sweep
from megatron_fsdp.checkpoint.series import CheckpointSeries


def module(value: float) -> nn.Linear:
    made = nn.Linear(3, 2)
    nn.init.constant_(made.weight, value)
    return made


def save(path: Path, value: float) -> None:
    save_checkpoint(module(value), None, path, extra={"value": value})


def loaded(path: Path) -> float:
    """Return the value of all weights of a checkpoint, after checking that its extra has it too."""
    model = module(-1.0)
    extra = load_checkpoint(model, None, path)
    assert model.weight.unique().tolist() == [extra["value"]]
    return float(extra["value"])


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


FOREIGN = ("step.old", "step.tmp-mine", "step.tmp-12345678", "step.tmp-deleted", "step.replaced")


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Path]:
    """A folder with foreign folders under names that this library used or could use."""
    for name in FOREIGN:
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("years of work")
    # A mark in another place, and a file that is not a mark.
    (tmp_path / "step.tmp-mine" / "owner.json").write_text('{"kind": "mine", "of": "step", "host": "h"}')
    yield tmp_path
    for name in FOREIGN:
        assert (tmp_path / name / "thesis.txt").read_text() == "years of work"


def test_foreign_folders_stay_through_saves_and_loads(foreign: Path) -> None:
    path = foreign / "step"
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        loaded(path)
    assert names(foreign) == sorted(FOREIGN)
    save(path, 1.0)
    save(path, 2.0)
    assert loaded(path) == 2.0
    assert names(foreign) == sorted(["step", *FOREIGN])


def test_a_series_deletes_no_folder_but_its_own(tmp_path: Path) -> None:
    series = CheckpointSeries(tmp_path)
    mine = ("step_0000001.tmp-mine", "step_0000002.tmp-deleted", "step_notes.tmp-deleted", "latest.tmp")
    for name in mine:
        (tmp_path / name).mkdir()
    for step in (1, 2, 3):
        series.save(module(step), None, step, keep_last=1)
    assert names(tmp_path) == sorted(["latest", "step_0000003", *mine])


def test_a_checkpoint_with_foreign_files_in_it_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "step"
    save(path, 1.0)
    (path / "notes.txt").write_text("a good one")
    with pytest.raises(
        CheckpointError, match=r"holds what is no part of a checkpoint \(notes\.txt\); it would be replaced"
    ):
        save(path, 2.0)
    assert (path / "notes.txt").read_text() == "a good one"
    assert loaded(path) == 1.0
    assert names(tmp_path) == ["step"]


def test_a_checkpoint_of_pytorchs_own_is_not_replaced(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp_save({"model": module(1.0).state_dict()}, checkpoint_id=tmp_path / "theirs")
    before = names(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="was not written by save_checkpoint; it would be replaced"):
        save(tmp_path / "theirs", 2.0)
    assert names(tmp_path / "theirs") == before


def test_a_checkpoint_whose_manifest_was_lost_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "step"
    save(path, 1.0)
    (path / "manifest.json").unlink()
    save(path, 2.0)
    assert loaded(path) == 2.0


# ---------------------------------------------------------------------- paths


@pytest.mark.parametrize("is_there", [True, False], ids=["a folder", "nothing yet"])
def test_a_link_stays_a_link_and_its_target_is_replaced_each_time(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "disk").mkdir()
    if is_there:
        (tmp_path / "disk" / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    for value in (1.0, 2.0, 3.0):
        save(tmp_path / "link", value)
        assert loaded(tmp_path / "link") == loaded(tmp_path / "disk" / "run") == value
    assert (tmp_path / "link").is_symlink()
    assert (names(tmp_path), names(tmp_path / "disk")) == (["disk", "link"], ["run"])


def test_a_relative_path_means_where_the_process_was_when_the_save_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    handle = CheckpointSeries("runs/one").save(module(1.0), None, 1, keep_last=1, asynchronous=True)
    monkeypatch.chdir(tmp_path / "there")
    assert handle.wait() == tmp_path / "here" / "runs" / "one" / "step_0000001"
    assert names(tmp_path / "here" / "runs" / "one") == ["latest", "step_0000001"]
    assert names(tmp_path / "there") == []


@pytest.mark.parametrize("spelling", ["step/", "./step", "other/../step"])
def test_a_path_may_be_spelled_in_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "step").mkdir()
    monkeypatch.chdir(tmp_path)
    model = module(1.0)
    save_checkpoint(model, None, spelling, extra={"value": 1.0})
    assert loaded(tmp_path / "step") == 1.0


def test_a_file_in_the_place_of_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step").write_text("years of work")
    with pytest.raises(CheckpointError, match="exists and is no checkpoint"):
        save(tmp_path / "step", 1.0)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        loaded(tmp_path / "step")
    assert (tmp_path / "step").read_text() == "years of work"
    assert names(tmp_path) == ["step"]


# ---------------------------------------------------------------------- two jobs


def test_a_save_that_another_process_is_at_is_not_swept_away(tmp_path: Path) -> None:
    path = tmp_path / "step"
    other = make_scratch(path)
    other.new.mkdir()
    (other.new / "part").write_text("half written")
    save(path, 1.0)
    assert (other.new / "part").read_text() == "half written"
    # The end of the process that made it opens the lock, however the process ended.
    other.lock.close()
    save(path, 2.0)
    assert names(tmp_path) == ["step"]


@pytest.mark.parametrize("is_quiet", [True, False])
def test_a_save_of_another_host_counts_as_dead_after_an_hour_without_changes(
    tmp_path: Path, is_quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step"
    other = make_scratch(path)
    (other.folder / "owner.json").write_text(
        (other.folder / "owner.json").read_text().replace(socket.gethostname(), "elsewhere")
    )
    other.lock.close()
    if is_quiet:
        hours_ago = time.time() - 7200
        for entry in (other.folder / "owner.json", other.folder):
            os.utime(entry, (hours_ago, hours_ago))
    save(path, 1.0)
    assert other.folder.exists() is not is_quiet


def test_without_locks_only_an_hours_silence_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    save(tmp_path / "step", 1.0)
    other = make_scratch(tmp_path / "step")
    save(tmp_path / "step", 2.0)
    assert names(tmp_path) == ["step", other.folder.name]
    monkeypatch.setattr(checkpoint_scratch, "_QUIET_SECONDS", -1.0)
    save(tmp_path / "step", 3.0)
    assert names(tmp_path) == ["step"]
    other.lock.close()


def test_a_folder_that_its_maker_could_not_lock_is_not_swept_by_a_job_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(37, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        other = make_scratch(tmp_path / "step")
    save(tmp_path / "step", 1.0)
    assert names(tmp_path) == ["step", other.folder.name]
    monkeypatch.setattr(checkpoint_scratch, "_QUIET_SECONDS", -1.0)
    save(tmp_path / "step", 2.0)
    assert names(tmp_path) == ["step"]
    other.lock.close()


def test_the_lock_of_another_host_with_this_ones_name_means_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("of the other host")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_scratch, "_BOOT_ID", boot)
        other = make_scratch(tmp_path / "step")
    # The lock is taken on its own host; here it is free.
    other.lock.close()
    save(tmp_path / "step", 1.0)
    assert other.folder.exists()


def test_the_old_checkpoint_is_back_when_another_job_takes_the_name_in_between(tmp_path: Path) -> None:
    path = tmp_path / "step"
    save(path, 1.0)
    scratch = make_scratch(path)
    with pytest.raises(OSError):
        # There is no complete save to publish.
        scratch.publish()
    scratch.remove()
    assert loaded(path) == 1.0
    assert names(tmp_path) == ["step"]


def test_a_checkpoint_moved_away_by_a_killed_save_loads_and_gets_its_name_back(tmp_path: Path) -> None:
    path = tmp_path / "step"
    save(path, 1.0)
    scratch = make_scratch(path)
    path.rename(scratch.folder / "replaced")
    scratch.lock.close()
    assert loaded(path) == 1.0
    sweep(path)
    assert loaded(path) == 1.0
    assert names(tmp_path) == ["step"]


def test_a_checkpoint_replaced_during_a_load_is_never_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step"
    save(path, 1.0)
    read = match_model

    def replace_and_match(*args: Any) -> Any:
        save(path, 2.0)
        return read(*args)

    monkeypatch.setattr(checkpoint, "match_model", replace_and_match)
    with pytest.raises(CheckpointError, match="was replaced while it was loaded"):
        load_checkpoint(module(-1.0), None, path)


class Interruption:
    """Call ``other`` once, just before this process reaches one of its moments on the disk.

    A moment is each audit event of the interpreter about a path: a listing, an opened file, a lock, a new name.
    """

    active: "Interruption | None" = None
    is_hooked = False

    def __init__(self, moment: int, other: Callable[[], object]) -> None:
        self.moment, self.other, self.num_moments = moment, other, 0

    def __enter__(self) -> "Interruption":
        # An audit hook cannot be removed.
        if not Interruption.is_hooked:
            sys.addaudithook(Interruption.hear)
        Interruption.is_hooked, Interruption.active = True, self
        return self

    def __exit__(self, *_: object) -> None:
        Interruption.active = None

    @staticmethod
    def hear(event: str, _: object) -> None:
        running = Interruption.active
        if running is not None and (event in ("open", "fcntl.flock", "shutil.rmtree") or event.startswith("os.")):
            running.num_moments += 1
            if running.num_moments == running.moment + 1:
                Interruption.active = None
                running.other()
                Interruption.active = running


def interrupted(folder: Path, begin: Callable[[Path], Callable[[], object]]) -> Iterator[Path]:
    """Save over a checkpoint once for each moment of a save; call the result of ``begin`` at that moment."""
    save(folder / "before", 1.0)
    moment = num_moments = 0
    while moment <= num_moments:
        path = folder / str(moment) / "step_0000002"
        for step in (1, 2):
            shutil.copytree(folder / "before", path.with_name(f"step_000000{step}"))
        other = begin(path)
        with Interruption(moment, other) as running:
            save(path, 2.0)
            CheckpointSeries(path.parent).mark_latest(2)
            CheckpointSeries(path.parent).prune(1)
        if running.num_moments <= moment:
            other()
        num_moments = max(num_moments, running.num_moments)
        yield path
        assert names(path.parent) == ["latest", path.name]
        shutil.rmtree(path.parent)
        moment += 1
    assert num_moments > 50


def test_a_whole_save_of_another_job_fits_into_every_moment_of_a_save(tmp_path: Path) -> None:
    def begin(path: Path) -> Callable[[], object]:
        def other() -> None:
            save(path, 3.0)
            CheckpointSeries(path.parent).mark_latest(2)
            CheckpointSeries(path.parent).prune(1)

        return other

    for path in interrupted(tmp_path, begin):
        assert loaded(path) in (2.0, 3.0)


@pytest.mark.parametrize("is_published", [True, False])
def test_another_job_may_end_its_save_at_every_moment_of_a_save(
    tmp_path: Path, is_published: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def begin(path: Path) -> Callable[[], object]:
        others = [make_scratch(path.parent / name) for name in (path.name, "step_0000001", "latest")]
        shutil.copytree(path, others[0].new)

        def end() -> None:
            if is_published:
                others[0].publish()
            for other in others:
                other.remove()

        return end

    for path in interrupted(tmp_path, begin):
        assert loaded(path) in (1.0, 2.0)
    assert caplog.messages == []


def test_a_scratch_folder_without_a_lock_or_an_owner_yet_is_not_swept_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / "step", fcntl.flock

    def stop_before_the_lock(*args: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        save(path, 1.0)
        lock(*args)

    monkeypatch.setattr(fcntl, "flock", stop_before_the_lock)
    save(path, 2.0)
    assert loaded(path) == 2.0
    assert names(tmp_path) == ["step"]


def save_often(path: Path, values: range) -> int:
    child = os.fork()
    if not child:
        status = 1
        try:
            for value in values:
                save(path, float(value))
                CheckpointSeries(path.parent / "series").save(module(value), None, value, keep_last=1)
            status = 0
        finally:
            os._exit(status)
    return child


def test_two_jobs_saving_to_one_path_both_finish_and_leave_one_whole_checkpoint(tmp_path: Path) -> None:
    children = [save_often(tmp_path / "step", values) for values in (range(8), range(8, 16))]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert loaded(tmp_path / "step") in (7.0, 15.0)
    assert names(tmp_path) == ["series", "step"]
    assert "step_0000015" in names(tmp_path / "series")
