"""Damage is found before it does harm, and a failed or killed save leaves the previous checkpoint whole."""

import os
import pickle
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import CheckpointError, load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint import manifest as checkpoint_manifest
from megatron_fsdp.checkpoint import writer as checkpoint_writer
from megatron_fsdp.checkpoint.manifest import MANIFEST, METADATA, read_metadata, tensors_by_file
from tests.functional.checkpoint_cases import Layout, State, full_optimizer_state, message_of, train_alone
from tests.harness import RankError, run_ranks
from tests.harness.grids import nightly_but
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


# ---------------------------------------------------------------------- damage


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


def overwrite(file: Path) -> None:
    file.write_bytes(b"\xff" * file.stat().st_size)


class Exploit:
    """Pickles as a call of a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("made-by-a-pickle",))


def index_that_names_code(path: Path, entry: str = "") -> None:
    """Write an index that names code, or, in one entry, a file that does."""
    metadata: Any = read_metadata(path)
    torch.save(Exploit(), path / "exploit.pt")
    size = (path / "exploit.pt").stat().st_size
    for index, stored in metadata.storage_data.items():
        if index.fqn == entry:
            stored.relative_path, stored.offset, stored.length = "exploit.pt", 0, size
    metadata.planner_data = metadata.planner_data if entry else Exploit()
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    for name in (MANIFEST, "state.pt"):
        (path / name).unlink()


def state_file_that_names_code(path: Path) -> None:
    torch.save({"num_ranks": 2, "extra": Exploit()}, path / "state.pt")
    files = {name: checkpoint_manifest.hash_file(path / name) for name in checkpoint_manifest.read_manifest(path)}
    checkpoint_manifest.write_manifest(path, files)


def of_the_file(name: str, do: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: do(path / name)


TO_ONE_FILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (truncate, "it was cut short or replaced"),
    "changed in one bit": (flip_a_bit, "some of its bytes changed"),
    "missing": (Path.unlink, "is missing"),
}
UNSAFE = r"is damaged \(UnpicklingError: Weights only load failed"
# The damage to a folder, whether checksums are compared, and the message.
DAMAGES: dict[str, tuple[Callable[[Path], object], bool, str]] = {
    f"{name} {how}": (of_the_file(name, do), True, said if name != MANIFEST else MANIFEST)
    for name in ("__1_0.distcp", METADATA, "state.pt", MANIFEST)
    for how, (do, said) in TO_ONE_FILE.items()
}
DAMAGES |= {
    "unverified, cut short": (lambda path: truncate(path / "__0_0.distcp"), False, "cut short"),
    "unverified, state": (lambda path: overwrite(path / "state.pt"), False, r"state\.pt is damaged"),
    "unverified, index": (lambda path: overwrite(path / METADATA), False, r"\.metadata is damaged \("),
    "code, index": (index_that_names_code, True, r"names posix\.mkdir, which no checkpoint is made of"),
    "code, number": (
        lambda path: index_that_names_code(path, "optimizer.param_groups.0.lr"),
        True,
        r"exploit\.pt " + UNSAFE + r".*where optimizer\.param_groups\.0\.lr lies",
    ),
    "code, state": (state_file_that_names_code, True, r"state\.pt " + UNSAFE),
}
# Damage that the loader finds only while it reads tensors, after it has read some.
LATE: dict[str, tuple[Callable[[Path], object], bool, str]] = {
    "unverified, values": (
        lambda path: overwrite(path / "__0_0.distcp"),
        False,
        r"__0_0\.distcp is damaged \(.*\), where .* lies",
    ),
    "code, tensor": (
        lambda path: index_that_names_code(path, "model.norm.weight"),
        True,
        r"exploit\.pt " + UNSAFE + r".*where model\.norm\.weight lies",
    ),
}


def refuse_each(root: str) -> dict[str, tuple[str, list[str]]]:
    """Load damaged folders into a model in use. Return by name the message, and the changes in the model."""
    model, optimizer = LAYOUT.build(seed=1)
    train_alone(model, optimizer, range(1))
    found = {}
    for number, (name, (_, verify, _)) in enumerate((DAMAGES | LATE).items()):
        before = whole_state(model), full_optimizer_state(model, optimizer), torch.get_rng_state()
        path = f"{root}/{number}"
        message = message_of_any(partial(load_checkpoint, model, optimizer, path, verify=verify))
        changed = differing(whole_state(model), before[0])
        changed += differing(full_optimizer_state(model, optimizer), before[1])
        found[name] = message, changed + ([] if torch.equal(torch.get_rng_state(), before[2]) else ["random state"])
    return found


def message_of_any(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    return str(caught.value)


@pytest.fixture(scope="module")
def refused(
    saved_once: tuple[Path, State], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, tuple[str, list[str]]]]]:
    root = tmp_path_factory.mktemp("damaged")
    for number, (do, _, _) in enumerate((DAMAGES | LATE).values()):
        do(shutil.copytree(saved_once[0], root / str(number)))
    return root, run_ranks(2, refuse_each, str(root))


@pytest.mark.parametrize("name", DAMAGES | LATE)
def test_damage_is_named_and_the_model_is_unchanged(
    name: str, refused: tuple[Path, list[dict[str, tuple[str, list[str]]]]], saved_once: tuple[Path, State]
) -> None:
    root, ranks = refused
    file, wanted = name.split()[0], (DAMAGES | LATE)[name][2]
    parameters = tensors_by_file(read_metadata(saved_once[0])).get(file, [])
    for message, changed in (found[name] for found in ranks):
        assert re.search(wanted, message, re.DOTALL), message
        assert [parameter for parameter in parameters if parameter not in message] == []
        assert name in LATE or changed == []
        if file in ("__1_0.distcp", METADATA, "state.pt"):
            assert f"{root / str(list(DAMAGES).index(name)) / file} " in message
            assert "nothing was loaded" in message
    assert not Path("made-by-a-pickle").exists()


# ---------------------------------------------------------------------- failing saves


@contextmanager
def small_files_only(rank: int) -> Iterator[None]:
    """On one rank, limit files to 4 KiB, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_on_a_full_disk(path: str, rank: int) -> tuple[str, State]:
    """Save over a checkpoint, which must fail. Return the message, and the state loaded afterwards."""
    model, optimizer = LAYOUT.build(seed=5)
    with small_files_only(rank):
        message = message_of(CheckpointError, lambda: save_checkpoint(model, optimizer, path))
    load_checkpoint(model, optimizer, path)
    return message, whole_state(model)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_keeps_the_old_one(
    rank: int, saved: tuple[Path, State]
) -> None:
    path, wanted = saved
    for message, loaded in run_ranks(2, save_on_a_full_disk, str(path), rank):
        assert f"saving {path} failed on rank {rank}" in message
        assert differing(loaded, wanted) == []
    assert [entry.name for entry in path.parent.iterdir()] == ["step"]


def save_where_one_cannot(root: str) -> list[str]:
    """Save where it cannot work: below a file, under different names on the ranks, over a foreign folder."""
    model, optimizer = LAYOUT.build(seed=0)
    paths = (f"{root}/file/step", f"{root}/step-{dist.get_rank()}", f"{root}/work")
    return [message_of(CheckpointError, partial(save_checkpoint, model, optimizer, path)) for path in paths]


def test_a_save_that_cannot_be_planned_is_an_error_on_all_ranks_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("years of work")
    for below, different, over in run_ranks(2, save_where_one_cannot, str(tmp_path)):
        assert "planning to save" in below
        assert "NotADirectoryError" in below or "FileExistsError" in below
        assert f"{tmp_path / 'step-0'}, {tmp_path / 'step-1'}" in different
        assert "exists and is no checkpoint" in over
    assert (tmp_path / "work" / "thesis.txt").read_text() == "years of work"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "work"]


# ---------------------------------------------------------------------- killed saves


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(path: str, rank: int, name: str) -> None:
    """Save over a checkpoint; kill one rank when it calls a function of the library."""
    model, optimizer = LAYOUT.build(seed=5)
    if dist.get_rank() == rank:
        mock.patch.object(checkpoint_writer, name, die).start()
    save_checkpoint(model, optimizer, path, extra={"step": 2})


def load_what_is_left(path: str) -> tuple[Any, State]:
    model, optimizer = LAYOUT.build(seed=1)
    return load_checkpoint(model, optimizer, path), whole_state(model)


# Each test starts new ranks, because they are killed. test_protocols.py kills at every effect on the disk.
@pytest.mark.parametrize(
    ("rank", "name"), nightly_but([(0, "write_manifest")], [(0, "write_manifest"), (1, "_write_mine")])
)
def test_the_previous_checkpoint_survives_a_killed_rank(rank: int, name: str, saved: tuple[Path, State]) -> None:
    path, wanted = saved
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(2, save_and_die, str(path), rank, name, fresh=True)
    for extra, loaded in run_ranks(2, load_what_is_left, str(path)):
        assert extra == {"step": 1}
        assert differing(loaded, wanted) == []
    run_ranks(2, save_one, str(path))
    assert [entry.name for entry in path.parent.iterdir()] == ["step"]
