"""Writing a checkpoint folder beside its place, checking it, and giving it its name in one step.

path.tmp-3f2a91c0/   everything is written, read back for its checksums, and brought to the disk here
path/                the same folder, renamed: it is whole from the moment that it exists
path.old/            for a moment, the folder that had the name before
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
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

from megatron_fsdp.checkpoint_manifest import MANIFEST, FileEntry, hash_file, sync_folder, write_manifest
from megatron_fsdp.checkpoint_metadata import METADATA
from megatron_fsdp.checkpoint_ranks import CheckpointRanks
from megatron_fsdp.errors import CheckpointError

__all__ = ["STATE_FILE", "Draft", "bring_back", "plan_save", "write_draft"]

STATE_FILE = "state.pt"
_OLD = ".old"
_UNFINISHED = ".tmp-"


@dataclass(slots=True)
class Draft:
    """A save that is planned: which rank writes what, and where.

    Attributes:
        path: the name that the folder gets. folder: where it is written.
        metadata: what the checkpoint holds; None on every rank but 0.
        state: bytes of the state file; rank 0's count.
    """

    path: Path
    folder: Path
    plan: SavePlan
    planner: HoldingPlanner
    metadata: Metadata | None
    state: bytes


class HoldingPlanner(DefaultSavePlanner):
    """PyTorch's planner, which can also take copies of what this rank is to write."""

    def hold(self) -> None:
        """Copy this rank's part of the plan to host memory and let go of everything else."""
        self._held = {item.index: self._copied(item) for item in self.plan.items}
        self.state_dict = {}

    def _copied(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(item)
        if isinstance(data, torch.Tensor):
            return data.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return data

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return what to write; a copy is handed out once, so that its memory is free when it is on the disk."""
        held: dict[MetadataIndex, torch.Tensor | io.BytesIO] | None = getattr(self, "_held", None)
        return super().resolve_data(write_item) if held is None else held.pop(write_item.index)


def plan_save(
    path: Path,
    collect: Callable[[], tuple[Mapping[str, Any], bytes]],
    ranks: CheckpointRanks,
    planner: HoldingPlanner | None = None,
) -> Draft:
    """Agree with all ranks on who writes what, and make the folder to write into.

    Args:
        path: the name that the folder will have, the same on all ranks.
        collect: returns the nested entries to save and the bytes of the state file.
        planner: where the values come from; None takes them from the entries.
    Raises:
        CheckpointError: ``collect`` failed on some rank, or the folder cannot be made.
    """
    source = HoldingPlanner() if planner is None else planner
    collected: list[bytes] = []
    made: list[Metadata] = []

    def mine() -> tuple[str, SavePlan]:
        entries, state = collect()
        collected.append(state)
        source.set_up_planner(dict(entries), is_coordinator=ranks.rank == 0)
        return str(path), source.create_local_plan()

    def together(proposals: list[tuple[str, SavePlan]]) -> list[tuple[str, SavePlan]]:
        paths = sorted({proposed for proposed, _ in proposals})
        if len(paths) > 1:
            raise CheckpointError(f"ranks save to different paths: {', '.join(paths)}; give all of them the same")
        plans, metadata = source.create_global_plan([plan for _, plan in proposals])
        made.append(metadata)
        folder = _make_folder(path)
        return [(str(folder), plan) for plan in FileSystemWriter(folder).prepare_global_plan(plans)]

    folder, plan = ranks.divide(f"planning to save {path}", mine, together)
    plan = source.finish_plan(plan)
    return Draft(path, Path(folder), plan, source, made[0] if made else None, collected[0])


def write_draft(draft: Draft, ranks: CheckpointRanks, afterwards: Callable[[], None] | None = None) -> None:
    """Write, check and name the folder; every rank calls it. After a failure the old checkpoint is as it was.

    Args:
        afterwards: called on rank 0 when the folder has its name; its failure is one of the save.
    Raises:
        CheckpointError: on every rank, when writing failed on any.
    """

    def together(parts: list[_Written]) -> None:
        assert draft.metadata is not None
        _finish(draft, draft.metadata, parts)
        _publish(draft.folder, draft.path)
        if afterwards is not None:
            afterwards()

    try:
        ranks.agree(f"saving {draft.path}", lambda: _write_mine(draft), together)
    except CheckpointError:
        # The other ranks have stopped writing: agreeing on the failure took all of them.
        if ranks.rank == 0:
            shutil.rmtree(draft.folder, ignore_errors=True)
        raise


@dataclass(frozen=True, slots=True)
class _Written:
    results: Sequence[WriteResult]
    files: Mapping[str, FileEntry]


def _write_mine(draft: Draft) -> _Written:
    if not draft.folder.is_dir():
        raise CheckpointError(
            f"{draft.folder}, which rank 0 made, cannot be seen from another rank; save to a file system that all share"
        )
    results = FileSystemWriter(draft.folder, sync_files=True).write_data(draft.plan, draft.planner).value()
    names = sorted({result.storage_data.relative_path for result in results})
    return _Written(results, {name: hash_file(draft.folder / name) for name in names})


def _finish(draft: Draft, metadata: Metadata, parts: Sequence[_Written]) -> None:
    """Write what rank 0 writes for all: the index, the state file, and last the manifest."""
    folder = draft.folder
    FileSystemWriter(folder, sync_files=True).finish(metadata, [list(part.results) for part in parts])
    with (folder / STATE_FILE).open("wb") as file:
        file.write(draft.state)
        file.flush()
        os.fsync(file.fileno())
    files = {name: entry for part in parts for name, entry in part.files.items()}
    files |= {name: hash_file(folder / name) for name in (METADATA, STATE_FILE)}
    write_manifest(folder, files)
    sync_folder(folder)


def _publish(folder: Path, path: Path) -> None:
    """Give a complete folder its name. A kill between the two renames leaves the old one, for ``bring_back``."""
    old = path.with_name(path.name + _OLD)
    if path.exists():
        _refuse_foreign(path)
        path.rename(old)
    folder.rename(path)
    sync_folder(path.parent)
    if old.exists():
        shutil.rmtree(old)


def bring_back(path: Path) -> None:
    """Undo a replacement that was cut off in its middle: the folder that had the name gets it back."""
    old = path.with_name(path.name + _OLD)
    if old.exists() and not path.exists():
        old.rename(path)
        sync_folder(path.parent)


def _make_folder(path: Path) -> Path:
    """Make a folder beside ``path``, without what earlier saves to it left when they were killed."""
    bring_back(path)
    _refuse_foreign(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for entry in list(path.parent.iterdir()):
        if entry.name.startswith(path.name + _UNFINISHED) or entry.name == path.name + _OLD:
            shutil.rmtree(entry)
    folder = path.with_name(f"{path.name}{_UNFINISHED}{secrets.token_hex(4)}")
    folder.mkdir()
    return folder


def _refuse_foreign(path: Path) -> None:
    """A checkpoint replaces a checkpoint or an empty folder, never other work of the user's."""
    is_replaceable = path.is_dir() and (
        (path / METADATA).exists() or (path / MANIFEST).exists() or not any(path.iterdir())
    )
    if path.exists() and not is_replaceable:
        raise CheckpointError(f"{path} exists and is no checkpoint; it would be replaced. Name another path")
