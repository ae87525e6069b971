"""Damage is found before it does harm, and a save that fails or is killed leaves the checkpoint before it whole."""

import os
import pickle
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import CheckpointError, load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint import manifest as checkpoint_manifest
from megatron_fsdp.checkpoint import writer as checkpoint_writer
from megatron_fsdp.checkpoint.manifest import MANIFEST, METADATA, DamagedCheckpointError, read_metadata, tensors_by_file
from tests.functional.checkpoint_cases import Layout, State, full_optimizer_state, message_of, train_alone
from tests.harness import RankError, run_ranks
from tests.harness.oracle import differing, whole_state

LAYOUT = Layout((2,))


def save_one(path: str) -> State:
    model, optimizer = LAYOUT.build(seed=0)
    train_alone(model, optimizer, range(1))
    save_checkpoint(model, optimizer, path, extra={"step": 1})
    return whole_state(model)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    path = tmp_path_factory.mktemp("whole") / "step"
    return path, run_ranks(2, save_one, str(path))[0]


@pytest.fixture
def saved(tmp_path: Path, saved_once: tuple[Path, State]) -> tuple[Path, State]:
    """A checkpoint to damage, and the weights in it."""
    path, weights = saved_once
    return shutil.copytree(path, tmp_path / "step"), weights


def refuse(path: str, verify: bool) -> tuple[str, list[str]]:
    """Load into a model in use, which must be refused; return the message, and what has changed in the model."""
    model, optimizer = LAYOUT.build(seed=1)
    train_alone(model, optimizer, range(1))
    before = whole_state(model), full_optimizer_state(model, optimizer), torch.get_rng_state()
    message = message_of(DamagedCheckpointError, lambda: load_checkpoint(model, optimizer, path, verify=verify))
    changed = differing(whole_state(model), before[0]) + differing(full_optimizer_state(model, optimizer), before[1])
    return message, changed + ([] if torch.equal(torch.get_rng_state(), before[2]) else ["random state"])


# ---------------------------------------------------------------------- damage


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (truncate, "it was cut short or replaced"),
    "changed in one bit": (flip_a_bit, "some of its bytes changed"),
    "missing": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["__1_0.distcp", METADATA, "state.pt"])
def test_a_file_is_named_with_its_parameters_and_the_model_stays_as_it_was_when_it_is(
    damage: str, name: str, saved: tuple[Path, State]
) -> None:
    path, _ = saved
    parameters = tensors_by_file(read_metadata(path)).get(name, [])
    do, wanted = DAMAGES[damage]
    do(path / name)
    for message, changed in run_ranks(2, refuse, str(path), True):
        assert f"{path / name} " in message
        assert wanted in message
        assert [parameter for parameter in parameters if parameter not in message] == []
        assert "nothing was loaded" in message
        assert changed == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_manifest_is_of_no_use_when_it_is(damage: str, saved: tuple[Path, State]) -> None:
    path, _ = saved
    DAMAGES[damage][0](path / MANIFEST)
    for message, changed in run_ranks(2, refuse, str(path), True):
        assert MANIFEST in message
        assert changed == []


def test_without_verification_sizes_are_compared_all_the_same(saved: tuple[Path, State]) -> None:
    path, _ = saved
    truncate(path / "__0_0.distcp")
    for message, changed in run_ranks(2, refuse, str(path), False):
        assert "cut short" in message
        assert changed == []


class Exploit:
    """Pickles as a call of a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("made-by-a-pickle",))


def load_exploit(path: str) -> str:
    model, optimizer = LAYOUT.build(seed=1)
    return message_of(CheckpointError, lambda: load_checkpoint(model, optimizer, path))


def test_an_index_that_names_code_is_not_run(tmp_path: Path, saved: tuple[Path, State]) -> None:
    path, _ = saved
    metadata = read_metadata(path)
    metadata.planner_data = Exploit()
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    for name in (MANIFEST, "state.pt"):
        (path / name).unlink()
    for message in run_ranks(2, load_exploit, str(path)):
        assert "names posix.mkdir, which no checkpoint is made of" in message
    assert not Path("made-by-a-pickle").exists()


@pytest.mark.parametrize("entry", ["optimizer.param_groups.0.lr", "model.norm.weight"], ids=["a number", "a tensor"])
def test_a_value_that_names_code_is_not_run(entry: str, tmp_path: Path, saved: tuple[Path, State]) -> None:
    path, _ = saved
    metadata = read_metadata(path)
    torch.save(Exploit(), path / "exploit.pt")
    for index, stored in metadata.storage_data.items():
        if index.fqn == entry:
            stored.relative_path, stored.offset, stored.length = "exploit.pt", 0, (path / "exploit.pt").stat().st_size
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    for name in (MANIFEST, "state.pt"):
        (path / name).unlink()
    for message in run_ranks(2, load_exploit, str(path)):
        assert f"{path / 'exploit.pt'} is damaged at byte 0 (UnpicklingError: Weights only load failed" in message
        assert f"where {entry} lies" in message
    assert not Path("made-by-a-pickle").exists()


def test_a_state_file_that_names_code_is_not_run(saved: tuple[Path, State]) -> None:
    path, _ = saved
    torch.save({"num_ranks": 2, "extra": Exploit()}, path / "state.pt")
    files = {name: checkpoint_manifest.hash_file(path / name) for name in checkpoint_manifest.read_manifest(path)}
    checkpoint_manifest.write_manifest(path, files)
    for message in run_ranks(2, load_exploit, str(path)):
        assert f"{path / 'state.pt'} is damaged (UnpicklingError: Weights only load failed" in message
    assert not Path("made-by-a-pickle").exists()


def refuse_without_verification(path: str) -> str:
    model, optimizer = LAYOUT.build(seed=1)
    return message_of(DamagedCheckpointError, lambda: load_checkpoint(model, optimizer, path, verify=False))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("state.pt", r"state\.pt is damaged"),
        (METADATA, r"\.metadata is damaged at byte \d"),
        ("__0_0.distcp", r"__0_0\.distcp is damaged at byte [\d,]+ \(.*\), where .* lies"),
    ],
)
def test_without_verification_the_file_and_the_place_are_named_all_the_same(
    name: str, wanted: str, saved: tuple[Path, State]
) -> None:
    path, _ = saved
    (path / name).write_bytes(b"\xff" * (path / name).stat().st_size)
    for message in run_ranks(2, refuse_without_verification, str(path)):
        assert re.search(wanted, message), message


# ---------------------------------------------------------------------- failing saves


@contextmanager
def small_files_only(rank: int) -> Iterator[None]:
    """Let one rank write no file beyond 4 KiB, as a full disk would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_on_a_full_disk(path: str, rank: int) -> tuple[str, State]:
    """Save over a checkpoint, which must fail; return what is said, and what is loaded then."""
    model, optimizer = LAYOUT.build(seed=5)
    with small_files_only(rank):
        message = message_of(CheckpointError, lambda: save_checkpoint(model, optimizer, path))
    load_checkpoint(model, optimizer, path)
    return message, whole_state(model)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_keeps_the_checkpoint_before(
    rank: int, saved: tuple[Path, State]
) -> None:
    path, wanted = saved
    for message, loaded in run_ranks(2, save_on_a_full_disk, str(path), rank):
        assert f"saving {path} failed on rank {rank}" in message
        assert differing(loaded, wanted) == []
    assert [entry.name for entry in path.parent.iterdir()] == ["step"]


def save_without_a_parent(path: str) -> str:
    model, optimizer = LAYOUT.build(seed=0)
    return message_of(CheckpointError, lambda: save_checkpoint(model, optimizer, path))


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for message in run_ranks(2, save_without_a_parent, str(tmp_path / "file" / "step")):
        assert "planning to save" in message
        assert "NotADirectoryError" in message or "FileExistsError" in message


def save_to_different_paths(path: str) -> str:
    model, optimizer = LAYOUT.build(seed=0)
    return message_of(CheckpointError, lambda: save_checkpoint(model, optimizer, f"{path}-{dist.get_rank()}"))


def test_ranks_that_name_different_paths_are_told_so(tmp_path: Path) -> None:
    for message in run_ranks(2, save_to_different_paths, str(tmp_path / "step")):
        assert f"{tmp_path / 'step-0'}, {tmp_path / 'step-1'}" in message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_other_things_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for message in run_ranks(2, save_without_a_parent, str(tmp_path)):
        assert "exists and is no checkpoint" in message
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


# ---------------------------------------------------------------------- killed saves


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(path: str, rank: int, name: str, is_after: bool) -> None:
    """Save over a checkpoint; one rank dies just before or just after it calls a function of the library."""
    model, optimizer = LAYOUT.build(seed=5)
    function = getattr(checkpoint_writer, name)

    def call_and_die(*args: Any, **options: Any) -> None:
        function(*args, **options)
        die()

    if dist.get_rank() == rank:
        mock.patch.object(checkpoint_writer, name, call_and_die if is_after else die).start()
    save_checkpoint(model, optimizer, path, extra={"step": 2})


def save_and_die_between_the_renames(path: str) -> None:
    model, optimizer = LAYOUT.build(seed=5)
    rename = Path.rename

    def rename_and_die(old: Path, new: Path) -> None:
        rename(old, new)
        if new.name == "replaced":
            die()

    mock.patch.object(Path, "rename", rename_and_die).start()
    save_checkpoint(model, optimizer, path, extra={"step": 2})


def load_what_is_left(path: str) -> tuple[Any, State, State]:
    model, optimizer = LAYOUT.build(seed=1)
    extra = load_checkpoint(model, optimizer, path)
    wanted, _ = LAYOUT.build(seed=5)
    return extra, whole_state(model), whole_state(wanted)


# Which rank dies at which function, and which of the two checkpoints is there afterwards.
KILLS: dict[str, tuple[int, str, bool, int]] = {
    "when the folder is made": (0, "_make_folder", True, 1),
    "before it writes": (1, "_write_mine", False, 1),
    "when it has written": (1, "hash_file", False, 1),
    "with the index unwritten": (0, "_finish", False, 1),
    "with the manifest unwritten": (0, "write_manifest", False, 1),
    "with the new one complete but unnamed": (0, "_publish", False, 1),
    "with the new one named": (0, "_publish", True, 2),
}


# Each starts ranks of its own, for they are killed.
KILLS_EVERY_TIME = ("with the manifest unwritten",)


@pytest.mark.parametrize(
    "moment",
    [
        *(pytest.param(moment, marks=() if moment in KILLS_EVERY_TIME else pytest.mark.slow) for moment in KILLS),
        "between the two renames",
    ],
)
def test_one_whole_checkpoint_is_there_after_a_rank_was_killed(moment: str, saved: tuple[Path, State]) -> None:
    path, wanted = saved
    step = 1
    call: tuple[Any, ...] = (save_and_die_between_the_renames, str(path))
    if moment in KILLS:
        rank, name, is_after, step = KILLS[moment]
        call = (save_and_die, str(path), rank, name, is_after)
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(2, *call, fresh=True)
    for extra, loaded, newer in run_ranks(2, load_what_is_left, str(path)):
        assert extra == {"step": step}
        assert differing(loaded, wanted if step == 1 else newer) == []
    run_ranks(2, save_one, str(path))
    assert [entry.name for entry in path.parent.iterdir()] == ["step"]


def test_the_manifest_is_the_last_file_to_be_written(saved: tuple[Path, State]) -> None:
    path, _ = saved
    manifest = (path / MANIFEST).stat().st_mtime_ns
    assert max(file.stat().st_mtime_ns for file in path.iterdir()) == manifest
    listed = checkpoint_manifest.read_manifest(path).keys()
    assert sorted(file.name for file in path.iterdir()) == sorted([*listed, MANIFEST])
