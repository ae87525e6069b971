"""Writing a checkpoint folder beside its place, checking it, and giving it its name in one step.

path.tmp-3f2a91c0/new/       everything is written, read back for its checksums, and brought to the disk here
path/                        the same folder, renamed: it is whole from the moment that it exists
path.tmp-3f2a91c0/replaced/  for a moment, the folder that had the name before
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_fsdp.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    FileEntry,
    hash_file,
    read_manifest,
    sync,
    write_manifest,
    write_synced,
)
from megatron_fsdp.checkpoint.ranks import CheckpointRanks
from megatron_fsdp.checkpoint.scratch import Scratch, make_scratch, sweep
from megatron_fsdp.engine.streams import end_of_compute
from megatron_fsdp.errors import CheckpointError

__all__ = ["STATE_FILE", "Draft", "HoldingPlanner", "place_of", "plan_save", "write_draft"]

STATE_FILE = "state.pt"
_DATA_SUFFIX = ".distcp"


@dataclass(slots=True)
class Draft:
    """A save that is planned: which rank writes what, and where.

    Attributes:
        path: the name that the folder gets. folder: where it is written.
        state: bytes of the state file; rank 0's count.
        metadata: what the checkpoint holds; None on every rank but 0.
        scratch: what ``folder`` lies in, made by rank 0; None elsewhere.
    """

    path: Path
    folder: Path
    plan: SavePlan
    planner: HoldingPlanner
    state: bytes
    metadata: Metadata | None
    scratch: Scratch | None

    def discard(self) -> None:
        """Delete what was written, after a failure on any rank; every rank calls it, rank 0 does it."""
        if self.scratch is not None:
            with contextlib.suppress(OSError):
                self.scratch.discard()


class HoldingPlanner(DefaultSavePlanner):
    """PyTorch's planner, which can also take copies of what this rank is to write."""

    _read: Callable[[MetadataIndex], torch.Tensor | io.BytesIO] | None = None
    _copied_from: Sequence[Callable[[], None]] = ()

    def hold(self) -> None:
        """Copy this rank's part of the plan to host memory and let go of everything else."""
        found = {item.index: self.resolve_data(item) for item in self.plan.items}
        self.held = {index: _copied(data) if isinstance(data, torch.Tensor) else data for index, data in found.items()}
        devices = {data.device for data in found.values() if isinstance(data, torch.Tensor)}
        self._copied_from = [end_of_compute(device) for device in devices]
        # A copy is handed out once, so that its memory is free when it is on the disk.
        self._read, self.state_dict = self.held.pop, {}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return what to write."""
        if self._read is None:
            return super().resolve_data(write_item)
        for wait in self._copied_from:
            wait()
        self._copied_from = ()
        return self._read(write_item.index)


def _copied(data: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory; of a GPU's tensor, a copy that is queued on the current stream.

    The memory is pinned then, so that neither the host nor the next step waits for the copy; PyTorch keeps it for the
    next save.
    """
    copy = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
    return copy.copy_(data.detach(), non_blocking=data.is_cuda)


def plan_save(
    path: Path,
    collect: Callable[[], tuple[Mapping[str, Any], bytes]],
    ranks: CheckpointRanks,
) -> Draft:
    """Agree with all ranks on who writes what, and make the folder to write into.

    Args:
        path: the name that the folder will have, the same on all ranks; see ``place_of``.
        collect: returns the nested entries to save and the bytes of the state file.
    """
    source = HoldingPlanner()
    state, metadata, scratch = b"", None, None

    def mine() -> tuple[str, SavePlan]:
        nonlocal state
        _refuse_surroundings(path)
        entries, state = collect()
        source.set_up_planner(dict(entries), is_coordinator=ranks.rank == 0)
        return str(path), source.create_local_plan()

    def together(proposals: list[tuple[str, SavePlan]]) -> list[tuple[str, SavePlan]]:
        nonlocal metadata, scratch
        paths = sorted({proposed for proposed, _ in proposals})
        if len(paths) > 1:
            raise CheckpointError(f"ranks save to different paths: {', '.join(paths)}; give all of them the same")
        plans, metadata = source.create_global_plan([plan for _, plan in proposals])
        scratch = _make_folder(path)
        return [(str(scratch.new), plan) for plan in FileSystemWriter(scratch.new).prepare_global_plan(plans)]

    folder, plan = ranks.divide(f"planning to save {path}", mine, together)
    return Draft(path, Path(folder), source.finish_plan(plan), source, state, metadata, scratch)


def place_of(path: Path) -> Path:
    """Return the place that a path stands for, wherever the process goes meanwhile: absolute, a link's target."""
    found = Path.cwd() / path
    return found.resolve() if found.is_symlink() or found.name in ("", "..") else found


_Written = tuple[Sequence[WriteResult], Mapping[str, FileEntry]]


def write_draft(draft: Draft, ranks: CheckpointRanks, afterwards: Callable[[], None] | None = None) -> None:
    """Write, check and name the folder; every rank calls it. After a failure the old checkpoint is as it was.

    Args:
        afterwards: called on rank 0 when the folder has its name; its failure is one of the save.
    """

    def together(parts: list[_Written]) -> None:
        assert draft.scratch is not None
        _finish(draft, parts)
        _publish(draft.scratch)
        if afterwards is not None:
            afterwards()

    try:
        ranks.agree(f"saving {draft.path}", lambda: _write_mine(draft), together)
    except CheckpointError:
        # The other ranks have stopped writing: agreeing on the failure took all of them.
        draft.discard()
        raise


def _write_mine(draft: Draft) -> _Written:
    if not draft.folder.is_dir():
        raise CheckpointError(
            f"{draft.folder}, which rank 0 made, cannot be seen from another rank; save to a file system that all share"
        )
    results = FileSystemWriter(draft.folder, sync_files=True).write_data(draft.plan, draft.planner).value()
    names = sorted({result.storage_data.relative_path for result in results})
    return results, {name: hash_file(draft.folder / name) for name in names}


def _finish(draft: Draft, parts: Sequence[_Written]) -> None:
    """Write what rank 0 writes for all: the index, the state file, and last the manifest."""
    assert draft.metadata is not None
    folder = draft.folder
    FileSystemWriter(folder, sync_files=True).finish(draft.metadata, [list(results) for results, _ in parts])
    write_synced(folder / STATE_FILE, draft.state)
    files = {name: entry for _, entries in parts for name, entry in entries.items()}
    write_manifest(folder, files | {name: hash_file(folder / name) for name in (METADATA, STATE_FILE)})
    sync(folder)


def _publish(scratch: Scratch) -> None:
    """Give a complete folder its name, and delete the one that had it."""
    # Somebody may have put something there since; another job that saves to the same path may be replacing it just now.
    with contextlib.suppress(FileNotFoundError):
        _refuse_foreign(scratch.path)
    scratch.publish()
    scratch.remove()


def _make_folder(path: Path) -> Scratch:
    """Make a folder beside ``path``, without what earlier saves to it left when they were killed."""
    if path.parent.is_dir():
        sweep(path)
    _refuse_foreign(path)
    scratch = make_scratch(path)
    try:
        scratch.new.mkdir()
    except BaseException:
        scratch.remove()
        raise
    return scratch


def _refuse_surroundings(path: Path) -> None:
    """A folder that is replaced is another one, and the old one, in which this process would still be, is gone."""
    own = Path.cwd()
    if path in (own, *own.parents):
        what = "the working directory" if path == own else f"a folder around the working directory {own}"
        raise CheckpointError(
            f"{path} is {what}, and a save replaces the whole folder, under the feet of this process. Name one in it: "
            f"{path / 'step_0000100'}"
        )


def _refuse_foreign(path: Path) -> None:
    """A checkpoint replaces a checkpoint of this library or an empty folder, never other work of the user's."""
    found_folder = None
    try:
        found_folder = path.stat().st_ino
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        # Or another job that saves to the same path replaces it just now.
        return
    except NotADirectoryError:
        names = {path.name}
    if not names:
        return
    others = sorted(name for name in names - {METADATA, STATE_FILE, MANIFEST} if not name.endswith(_DATA_SUFFIX))
    found = "is no checkpoint" if METADATA not in names else "was not written by save_checkpoint"
    is_own = METADATA in names and bool(names & {STATE_FILE, MANIFEST})
    with contextlib.suppress(CheckpointError):
        is_own = bool(read_manifest(path)) or is_own
    if is_own:
        if not others:
            return
        found = f"holds what is no part of a checkpoint ({', '.join(others)})"
    # A folder that another job replaced meanwhile may have been listed when half of it was deleted.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if path.stat().st_ino != found_folder:
            return _refuse_foreign(path)
        raise CheckpointError(f"{path} exists and {found}; it would be replaced. Name another path, or move it away")
