"""Reader: find a checkpoint folder, check it against its manifest on all ranks, and read its entries."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from megatron_fsdp.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    RANK_VALUES,
    DamagedCheckpointError,
    EntryPath,
    FileEntry,
    damage_of,
    find_damage,
    paths_of,
    read_manifest,
    read_metadata,
    tensors_by_file,
)
from megatron_fsdp.checkpoint.ranks import CheckpointRanks
from megatron_fsdp.checkpoint.scratch import resting_place
from megatron_fsdp.checkpoint.writer import STATE_FILE, place_of
from megatron_fsdp.errors import CheckpointError

__all__ = ["OpenCheckpoint", "listed", "open_checkpoint", "read_entries", "refuse_replaced", "verify_folder"]

_log = logging.getLogger(__name__)
_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint folder that was found and checked.

    Attributes:
        folder: its path. metadata: its index.
        state: values that belong to no parameter: ``extra``, ties, number of ranks; empty for a folder that PyTorch's
            own tools wrote.
        rank: this rank, if as many ranks saved; it gets its own value where ranks saved different ones. None: another
            number of ranks saved, and all ranks get the first rank's values.
        identity: hash that differs if another checkpoint replaces this one in the folder.
        storage: PyTorch's reader class for this folder.
    """

    folder: Path
    metadata: Metadata
    state: Mapping[str, Any]
    rank: int | None
    identity: str
    storage: type[FileSystemReader] = FileSystemReader

    def names_below(self, *start: str) -> dict[EntryPath, str]:
        """Return the entries whose path starts with ``start``, keyed by the rest of their path."""
        paths = paths_of(self.metadata)
        found: dict[EntryPath, str] = {}
        for begin in (start, (RANK_VALUES, f"rank_{self.rank}", *start)):
            found |= {path[len(begin) :]: name for name, path in paths.items() if path[: len(begin)] == begin}
        return found


def open_checkpoint(folder: Path, ranks: CheckpointRanks, *, verify: bool) -> OpenCheckpoint:
    """Find a checkpoint and check it, without changing the disk. Every rank must call this.

    Args:
        verify: hash all files, each rank a share of them; False: compare sizes only.
    Raises:
        CheckpointError: there is no checkpoint.
        DamagedCheckpointError: a file is missing or changed; the message names it and the parameters in it.
    """
    step = f"opening {folder}"

    def look_for(_: list[None]) -> str:
        # A save that was killed while replacing the checkpoint may have moved it to its scratch folder.
        return str(folder if folder.exists() else resting_place(place_of(folder)))

    found = Path(ranks.agree(step, lambda: None, look_for))
    folder = folder if found == place_of(folder) else found
    files, identity = ranks.check(step, lambda: (_expected_files(folder), _identity(folder)))
    _verify(folder, files, ranks, verify)
    return ranks.check(step, lambda: _read_frame(folder, ranks, identity, has_state=STATE_FILE in files))


def refuse_replaced(opened: OpenCheckpoint, ranks: CheckpointRanks) -> None:
    """Raise if the checkpoint was replaced while it was read. Every rank must call this after reading."""

    def compare(found: list[tuple[str, str]]) -> None:
        if len({identity for pair in found for identity in pair}) > 1:
            raise CheckpointError(
                f"{opened.folder} was replaced while it was loaded, and what was read is of two checkpoints. fix: load "
                "again"
            )

    ranks.agree(f"loading {opened.folder}", lambda: (opened.identity, _identity(opened.folder)), compare)


def _identity(folder: Path) -> str:
    name = MANIFEST if (folder / MANIFEST).exists() else METADATA
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()


def verify_folder(folder: Path, ranks: CheckpointRanks) -> int:
    """Check every byte of a checkpoint against its manifest, without a model. Every rank must call this.

    Raises:
        CheckpointError: as ``open_checkpoint``; also for a folder without a manifest.
    """
    files = read_manifest(folder)
    _verify(folder, files, ranks, is_thorough=True)
    read_metadata(folder)
    return sum(entry.num_bytes for entry in files.values())


def read_entries(opened: OpenCheckpoint, targets: MutableMapping[str, Any]) -> None:
    """Fill ``targets`` from the checkpoint. Tensors are read in place, DTensors only this rank's shards.

    Args:
        targets: keyed by entry name; values that are not tensors are placeholders and are replaced.
    Raises:
        DamagedCheckpointError: a value cannot be decoded; the message names it and its file.
    """
    reader = opened.storage(str(opened.folder))
    reader.set_up_storage_reader(opened.metadata, is_coordinator=True)
    wanted = dict(targets)
    planner = _TensorsOnlyPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(wanted, opened.metadata, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    try:
        reader.read_data(plan, planner).wait()
    except Exception as error:
        # Read the entries again one by one, to find the damaged one.
        for item in plan.items:
            try:
                reader.read_data(LoadPlan([item]), planner).wait()
            except Exception as found:
                raise DamagedCheckpointError(_damage_at(opened, item, found)) from None
        raise CheckpointError(f"{opened.folder}: {type(error).__name__}: {error}") from error
    targets.update(wanted)


def _damage_at(opened: OpenCheckpoint, item: ReadItem, error: Exception) -> str:
    stored = opened.metadata.storage_data.get(item.storage_index)
    if stored is None:
        return f"{opened.folder / METADATA} is damaged: it does not say where {item.storage_index.fqn} lies"
    return f"{damage_of(opened.folder / stored.relative_path, error)}, where {item.storage_index.fqn} lies"


class _TensorsOnlyPlanner(DefaultLoadPlanner):
    """A load planner that refuses pickled code. PyTorch's own would run code that a non-tensor entry names."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def _expected_files(folder: Path) -> dict[str, FileEntry]:
    if not (folder / METADATA).exists() and not (folder / MANIFEST).exists():
        # An empty path stands for the working directory; the message names it in full.
        where = folder if folder.name else place_of(folder)
        raise CheckpointError(
            f"{where} holds no complete checkpoint (looked for {METADATA} and {MANIFEST}). fix: give the path of one "
            "checkpoint, such as runs/step_0000100; CheckpointSeries(folder).load(...) finds the newest of several"
        )
    if (folder / MANIFEST).exists() or (folder / STATE_FILE).exists():
        return read_manifest(folder)
    return {}


def _verify(folder: Path, files: Mapping[str, FileEntry], ranks: CheckpointRanks, is_thorough: bool) -> None:
    largest_first = sorted(files, key=lambda name: (-files[name].num_bytes, name))

    def problems_of_mine() -> dict[str, str]:
        names = largest_first[ranks.rank :: ranks.size]
        found = {name: find_damage(folder, name, files[name], is_thorough=is_thorough) for name in names}
        return {name: problem for name, problem in found.items() if problem is not None}

    def refuse(problems: list[dict[str, str]]) -> None:
        by_file = {name: problem for part in problems for name, problem in part.items()}
        if by_file:
            raise DamagedCheckpointError(_damage_message(folder, by_file))

    ranks.agree(f"verifying {folder}", problems_of_mine, refuse)


def _damage_message(folder: Path, problems: Mapping[str, str]) -> str:
    contents = {} if METADATA in problems else tensors_by_file(read_metadata(folder))
    lines = [
        f"\n  {problem}. It holds {listed(contents.get(name, [])) or _WITHOUT_PARAMETERS.get(name, 'no parameters')}"
        for name, problem in sorted(problems.items())
    ]
    return (
        f"{folder} is damaged; nothing was loaded. fix: load an older checkpoint, or a copy of this "
        f"one:{''.join(lines)}"
    )


_WITHOUT_PARAMETERS = {
    METADATA: "the index of all parameters",
    STATE_FILE: "extra and other values that belong to no parameter",
}


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first names, joined, and the number of the others."""
    more = [f"and {len(names) - _MAX_LISTED} more"] if len(names) > _MAX_LISTED else []
    shown = separator.join(names[:_MAX_LISTED])
    return (" " if separator == ", " else separator).join([shown, *more])


def _read_frame(folder: Path, ranks: CheckpointRanks, identity: str, *, has_state: bool) -> OpenCheckpoint:
    metadata = read_metadata(folder)
    state: Mapping[str, Any] = {}
    if has_state:
        try:
            state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
        except Exception as error:
            raise DamagedCheckpointError(damage_of(folder / STATE_FILE, error)) from None
        if not isinstance(state, dict):
            raise DamagedCheckpointError(f"{folder / STATE_FILE} is damaged: it holds a {type(state).__name__}")
    is_as_saved = state.get("num_ranks") == ranks.size
    paths = paths_of(metadata).values()
    names = sorted({str(path[3]) for path in paths if path[0] == RANK_VALUES and path[2] == "model"})
    if names and not is_as_saved and ranks.rank == 0:
        _log.warning(
            "%s was saved by another number of ranks, which had different values of %s: the first rank's values are "
            "taken on all ranks",
            folder,
            listed(names),
        )
    return OpenCheckpoint(folder, metadata, state, ranks.rank if is_as_saved else None, identity)
