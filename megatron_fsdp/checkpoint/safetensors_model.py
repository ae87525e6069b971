"""Convert a model's or a checkpoint's weights to and from safetensors files, with Hugging Face's names or its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.foreign import read_model, read_values
from megatron_fsdp.checkpoint.manifest import tensors_of
from megatron_fsdp.checkpoint.model_state import announce_change, match_model, view_model, whole
from megatron_fsdp.checkpoint.ranks import CheckpointRanks, checkpoint_ranks
from megatron_fsdp.checkpoint.reader import open_checkpoint, read_entries
from megatron_fsdp.checkpoint.safetensors_files import DEFAULT_FILE_BYTES, open_folder, write_folder
from megatron_fsdp.errors import ConfigError

__all__ = ["NameMap", "export_checkpoint", "export_safetensors", "import_safetensors"]


def export_safetensors(
    model: nn.Module,
    folder: str | Path,
    *,
    name_map: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a (sharded) model's weights in Hugging Face's layout. Every rank must call this; rank 0 writes.

    Rank 0 holds the content of one file in memory at a time, the other ranks one whole tensor. A tied parameter is
    written once, under its first name.

    Args:
        folder: may contain other files; weight files of the same names are replaced.
        name_map: patterns of the model's names and the names in the files; see ``NameMap``.
        dtype: dtype of floating-point tensors in the files; None: unchanged.
        max_file_bytes: most bytes of tensors per file; a larger tensor gets a file of its own.
        process_group: as in ``save_checkpoint``; the first of its ranks writes.
    Raises:
        CheckpointError: writing failed; raised on all ranks.
        ConfigError: ``name_map`` gives two parameters one name, or the package ``safetensors`` is not installed.

    Example:
        export_safetensors(model, "out", dtype=torch.bfloat16)
        import_safetensors(model, "out")
    """
    ranks = checkpoint_ranks("calls export_safetensors", process_group)
    # The gathers cannot name ranks that do not call this function, but this check can.
    view = ranks.check(f"exporting to {folder}", lambda: view_model(model))
    names = NameMap(name_map or {}).translate(_names_once(list(view.tensors), view.ties))
    tensors = {there: view.tensors[here] for here, there in names.items()}
    pending = list(tensors)

    def gather(name: str) -> torch.Tensor:
        pending.remove(name)
        return whole(tensors[name])

    def write() -> None:
        try:
            if ranks.rank == 0:
                likes = {name: _like(tensor.shape, tensor.dtype, dtype) for name, tensor in tensors.items()}
                write_folder(Path(folder), likes, gather, max_file_bytes)
        finally:
            # Other ranks wait in these gathers, so this rank must join them even after an error.
            for name in list(pending):
                gather(name)

    ranks.check(f"exporting to {folder}", write)


def import_safetensors(
    model: nn.Module,
    folder: str | Path,
    *,
    name_map: Mapping[str, str] | None = None,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load weights from a folder of safetensors files, or from one file, into a (sharded) model.

    Every rank must call this. Each rank reads only the ranges of the files that hold its shards.

    Args:
        name_map: patterns of the model's names and the names in the files; see ``NameMap``.
        strict: raise if the files hold more tensors than the model; False: ignore those.
        process_group: as in ``save_checkpoint``.
    Raises:
        CheckpointError: files are damaged, or names or shapes differ, and are listed. The model is then unchanged.
        ConfigError: the package ``safetensors`` is not installed, or ``name_map`` is ambiguous.

    Example:
        export_safetensors(model, "out", name_map={"blocks.*.linear.weight": "model.layers.*.mlp.weight"})
        import_safetensors(model, "out", name_map={"blocks.*.linear.weight": "model.layers.*.mlp.weight"})
    """
    ranks = checkpoint_ranks("calls import_safetensors", process_group)
    view = ranks.check(f"opening {folder}", lambda: view_model(model))
    names = NameMap(name_map or {}).translate(view.tensors)

    opened = ranks.check(f"opening {folder}", lambda: open_folder(Path(folder), names, strict=strict))
    found = ranks.check(f"opening {folder}", lambda: match_model(opened, view))
    ranks.check(f"reading {folder}", lambda: read_entries(opened, found.targets))
    announce_change(model, view)


def export_checkpoint(
    path: Path,
    folder: Path,
    *,
    name_map: NameMap | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    progress: Callable[[str], None] = lambda _: None,
) -> int:
    """Write a checkpoint's weights to a folder of safetensors files, in one process and without the model.

    Memory holds the content of one file at a time. Names are those of the model, without the ``module.`` prefixes of
    wrappers. ``progress`` is called with a line before each tensor is read. Returns the number of tensors.
    """
    opened = open_checkpoint(path, CheckpointRanks(None), verify=True)
    saved = tensors_of(opened.metadata)
    # Modules' extra state, which Megatron's layers have, is not exported.
    entries = {
        name: value.entries[0] for name, value in read_model(opened, ()).tensors.items() if value.shape is not None
    }
    names = (name_map or NameMap({})).translate(_names_once(list(entries), opened.state.get("ties", ())))
    by_name = {there: entries[here] for here, there in names.items()}
    likes = {name: _like(saved[entry].size, saved[entry].properties.dtype, dtype) for name, entry in by_name.items()}
    number_of = {name: number for number, name in enumerate(likes, 1)}

    def read(name: str) -> torch.Tensor:
        progress(f"tensor {number_of[name]} of {len(likes)}: {name}")
        value: torch.Tensor = read_values(opened, [by_name[name]])[0]
        return value

    write_folder(folder, likes, read, max_file_bytes)
    return len(likes)


@dataclass(frozen=True, slots=True)
class NameMap:
    """Patterns that translate the model's names to the names in files.

    Attributes:
        patterns: maps a model name to a file name. Each "*" stands for characters other than a dot, the same on both
            sides, in order: ``{"blocks.*.query.weight": "model.layers.*.self_attn.q_proj.weight"}``. The first matching
            pattern is used; a name that no pattern matches is unchanged.
    """

    patterns: Mapping[str, str]

    def __post_init__(self) -> None:
        for here, there in self.patterns.items():
            if here.count("*") != there.count("*"):
                raise ConfigError(
                    f"name map: {here!r} and {there!r} have different numbers of *. fix: write as many in both"
                )

    @classmethod
    def from_json(cls, path: Path) -> NameMap:
        """Read the patterns from a JSON file with one object of strings."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"name map {path} cannot be read: {error}. fix: give a JSON file") from None
        if not isinstance(content, dict) or not all(isinstance(there, str) for there in content.values()):
            raise ConfigError(f'name map {path} holds no object of strings. fix: write {{"name here": "name there"}}')
        return cls(content)

    def translate(self, names: Iterable[str]) -> dict[str, str]:
        """Return the file's name of each of the model's names."""
        rules = [
            (re.compile(re.escape(here).replace(r"\*", "([^.]*)")), there) for here, there in self.patterns.items()
        ]
        found: dict[str, str] = {}
        taken: dict[str, str] = {}
        for name in names:
            matches = ((pattern.fullmatch(name), there) for pattern, there in rules)
            match, there = next((pair for pair in matches if pair[0]), (None, name))
            parts = iter((*match.groups(), "") if match else ())
            found[name] = "".join(literal + next(parts, "") for literal in there.split("*")) if match else name
            other = taken.setdefault(found[name], name)
            if other != name:
                raise ConfigError(
                    f"name map: {other!r} and {name!r} both become {found[name]!r}. fix: make them distinct"
                )
        return found


def _names_once(names: Sequence[str], ties: Sequence[Sequence[str]]) -> list[str]:
    """Return the names, with only the first name of each tied parameter."""
    first = {name: min(group, key=names.index) for group in ties for name in group if name in names}
    return [name for name in names if first.get(name, name) == name]


def _like(shape: Sequence[int], current: torch.dtype, wanted: torch.dtype | None = None) -> torch.Tensor:
    """Return a meta tensor of this shape; floating-point dtypes are replaced by ``wanted``."""
    dtype = wanted if wanted is not None and current.is_floating_point else current
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
