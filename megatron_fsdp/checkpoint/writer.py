"""Writer: write a checkpoint folder next to its target, check it, and rename it in one step.

path.tmp-3f2a91c0/new/       all files are written here, read back for their checksums, and synced to disk
path/                        the same folder, renamed: it is complete from the moment that it exists
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
    """A planned save: which rank writes what, and where.

    Attributes:
        path: the name that the folder gets. folder: the folder that ranks write to.
        state: bytes of the state file; rank 0's are written.
        metadata: the checkpoint's index on rank 0; None on other ranks.
        scratch: the scratch folder around ``folder``, made by rank 0; None on other ranks.
    """

    path: Path
    folder: Path
    plan: SavePlan
    planner: HoldingPlanner
    state: bytes
    metadata: Metadata | None
    scratch: Scratch | None

    def discard(self) -> None:
        """Delete the written files after a failure on any rank. Every rank may call this; rank 0 deletes."""
        if self.scratch is not None:
            with contextlib.suppress(OSError):
                self.scratch.discard()


class HoldingPlanner(DefaultSavePlanner):
    """PyTorch's save planner, which can also copy this rank's data to host memory first."""

    _read: Callable[[MetadataIndex], torch.Tensor | io.BytesIO] | None = None
    _copied_from: Sequence[Callable[[], None]] = ()

    def hold(self) -> None:
        """Copy this rank's part of the plan to host memory, and drop all references to the originals."""
        found = {item.index: self.resolve_data(item) for item in self.plan.items}
        self.held = {index: _copied(data) if isinstance(data, torch.Tensor) else data for index, data in found.items()}
        devices = {data.device for data in found.values() if isinstance(data, torch.Tensor)}
        self._copied_from = [end_of_compute(device) for device in devices]
        # Each copy is returned once, so that its memory is freed when it is on disk.
        self._read, self.state_dict = self.held.pop, {}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data to write."""
        if self._read is None:
            return super().resolve_data(write_item)
        for wait in self._copied_from:
            wait()
        self._copied_from = ()
        return self._read(write_item.index)


def _copied(data: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory; from a GPU the copy is queued on the current stream.

    The memory is then pinned, so that neither the host nor the next step waits for the copy. PyTorch keeps pinned
    memory for the next save.
    """
    copy = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=data.is_cuda)
    return copy.copy_(data.detach(), non_blocking=data.is_cuda)


def plan_save(
    path: Path,
    collect: Callable[[], tuple[Mapping[str, Any], bytes]],
    ranks: CheckpointRanks,
) -> Draft:
    """Agree with all ranks on which rank writes what, and make the folder to write to.

    Args:
        path: the final name of the folder, the same on all ranks; see ``place_of``.
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
            raise CheckpointError(
                f"ranks save to different paths: {', '.join(paths)}. fix: give all ranks the same path"
            )
        plans, metadata = source.create_global_plan([plan for _, plan in proposals])
        scratch = _make_folder(path)
        return [(str(scratch.new), plan) for plan in FileSystemWriter(scratch.new).prepare_global_plan(plans)]

    folder, plan = ranks.divide(f"planning to save {path}", mine, together)
    return Draft(path, Path(folder), source.finish_plan(plan), source, state, metadata, scratch)


def place_of(path: Path) -> Path:
    """Return the absolute path with links resolved, so that a later chdir does not matter."""
    found = Path.cwd() / path
    return found.resolve() if found.is_symlink() or found.name in ("", "..") else found


_Written = tuple[Sequence[WriteResult], Mapping[str, FileEntry]]


def write_draft(draft: Draft, ranks: CheckpointRanks, afterwards: Callable[[], None] | None = None) -> None:
    """Write, check and rename the folder. Every rank must call this. After a failure the old checkpoint is unchanged.

    Args:
        afterwards: rank 0 calls it when the folder has its name; if it fails, the save fails.
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
        # All ranks took part in agreeing on the failure, so no rank still writes.
        draft.discard()
        raise


def _write_mine(draft: Draft) -> _Written:
    if not draft.folder.is_dir():
        raise CheckpointError(
            f"{draft.folder}, which rank 0 made, cannot be seen from another rank. fix: save to a file system that all "
            "ranks share"
        )
    results = FileSystemWriter(draft.folder, sync_files=True).write_data(draft.plan, draft.planner).value()
    names = sorted({result.storage_data.relative_path for result in results})
    return results, {name: hash_file(draft.folder / name) for name in names}


def _finish(draft: Draft, parts: Sequence[_Written]) -> None:
    """Write rank 0's files: the index, the state file, and last the manifest."""
    assert draft.metadata is not None
    folder = draft.folder
    FileSystemWriter(folder, sync_files=True).finish(draft.metadata, [list(results) for results, _ in parts])
    write_synced(folder / STATE_FILE, draft.state)
    files = {name: entry for _, entries in parts for name, entry in entries.items()}
    write_manifest(folder, files | {name: hash_file(folder / name) for name in (METADATA, STATE_FILE)})
    sync(folder)


def _publish(scratch: Scratch) -> None:
    """Rename a complete folder to its name, and delete the folder that had the name."""
    # Checked again, because the user may have put files there, or another job may be saving to the same path.
    with contextlib.suppress(FileNotFoundError):
        _refuse_foreign(scratch.path)
    scratch.publish()
    scratch.remove()


def _make_folder(path: Path) -> Scratch:
    """Make a scratch folder next to ``path``, after removing leftovers of killed saves to it."""
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
    """Raise if the save would replace the folder that this process works in, or a folder around it."""
    own = Path.cwd()
    if path in (own, *own.parents):
        what = "the working directory" if path == own else f"a folder around the working directory {own}"
        raise CheckpointError(
            f"{path} is {what}, and a save replaces the whole folder, under the feet of this process. fix: name one in "
            f"it: {path / 'step_0000100'}"
        )


def _refuse_foreign(path: Path) -> None:
    """Raise if the save would replace anything but an empty folder or a checkpoint of this library."""
    found_folder = None
    try:
        found_folder = path.stat().st_ino
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        # There is nothing here, or another job that saves to the same path is replacing it.
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
    # If another job replaced the folder meanwhile, the list of names may be of a half-deleted folder.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if path.stat().st_ino != found_folder:
            return _refuse_foreign(path)
        raise CheckpointError(
            f"{path} exists and {found}; it would be replaced. fix: name another path, or move it away"
        )
