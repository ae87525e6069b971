"""Checkpoint folders to and from safetensors files, in one process and without the model."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import WriteItem

from megatron_fsdp.checkpoint.api import state_bytes
from megatron_fsdp.checkpoint.dcp_metadata import tensors_of
from megatron_fsdp.checkpoint.foreign import read_model
from megatron_fsdp.checkpoint.name_map import NameMap
from megatron_fsdp.checkpoint.ranks import CheckpointRanks
from megatron_fsdp.checkpoint.reader import open_checkpoint, read_entries
from megatron_fsdp.checkpoint.safetensors_folder import DEFAULT_FILE_BYTES, FolderReader, write_folder
from megatron_fsdp.checkpoint.safetensors_model import names_once, stored_info
from megatron_fsdp.checkpoint.writer import HoldingPlanner, place_of, plan_save, write_draft

__all__ = ["export_checkpoint", "import_checkpoint"]


def export_checkpoint(
    path: Path,
    folder: Path,
    *,
    name_map: NameMap | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> int:
    """Write the weights of a checkpoint into a folder of safetensors files; one tensor at a time is in memory.

    Names are those of the model, without the ``module.`` of wrappers around it.

    Args:
        name_map, dtype, max_file_bytes: as for ``export_safetensors``.
    Returns:
        The number of tensors.
    Raises:
        CheckpointError: there is no whole checkpoint at ``path``, or it holds no model.
    """
    opened = open_checkpoint(path, CheckpointRanks(None), verify=True)
    saved = tensors_of(opened.metadata)
    # Extra state of modules, which Megatron's layers have, is no weight.
    entries = {
        name: value.entries[0] for name, value in read_model(opened, ()).tensors.items() if value.shape is not None
    }
    names = (name_map or NameMap({})).translate(names_once(list(entries), opened.state.get("ties", ())))
    by_name = {there: entries[here] for here, there in names.items()}
    infos = {
        name: stored_info(saved[entry].size, saved[entry].properties.dtype, dtype) for name, entry in by_name.items()
    }

    def read(name: str) -> torch.Tensor:
        entry = by_name[name]
        tensor = torch.empty(saved[entry].size, dtype=saved[entry].properties.dtype)
        read_entries(opened, {entry: tensor})
        return tensor

    write_folder(folder, infos, read, max_file_bytes)
    return len(infos)


def import_checkpoint(folder: Path, path: Path, *, name_map: NameMap | None = None) -> int:
    """Write a checkpoint of a model alone from safetensors files; one tensor at a time is in memory.

    Args:
        name_map: names here to names there, as for ``import_safetensors``: it is applied backwards.
    Returns:
        The number of tensors.
    Raises:
        CheckpointError: the files are damaged, or ``path`` is taken by something else.
        ConfigError: the package ``safetensors`` is not installed.
    """
    ranks = CheckpointRanks(None)
    with FolderReader(folder) as reader:
        names = (name_map or NameMap({})).inverse().translate(reader.infos)
        model = {
            here: torch.empty(reader.infos[there].shape, dtype=reader.infos[there].dtype, device="meta")
            for there, here in names.items()
        }
        there_by_here = {here: there for there, here in names.items()}

        def read(name: str) -> torch.Tensor:
            there = there_by_here[name.removeprefix("model.")]
            shape = reader.infos[there].shape
            return reader.read(there, (0,) * len(shape), shape)

        draft = plan_save(
            place_of(path), lambda: ({"model": model}, state_bytes({"extra": {}})), ranks, _LatePlanner(read)
        )
        write_draft(draft, ranks)
    return len(names)


class _LatePlanner(HoldingPlanner):
    """Plans with tensors that have a shape only, and gets the values of each when it is written."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Read the values of one tensor."""
        return self._read(write_item.index.fqn)
