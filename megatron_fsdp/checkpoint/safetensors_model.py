"""A model's weights to and from a folder of safetensors files, under Hugging Face's names or its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from megatron_fsdp.checkpoint.async_save import finish_pending_save
from megatron_fsdp.checkpoint.model_state import ModelView, announce_change, refuse_differences, view_model, whole
from megatron_fsdp.checkpoint.name_map import NameMap
from megatron_fsdp.checkpoint.ranks import checkpoint_ranks
from megatron_fsdp.checkpoint.safetensors_file import TensorInfo
from megatron_fsdp.checkpoint.safetensors_folder import DEFAULT_FILE_BYTES, FolderReader, write_folder
from megatron_fsdp.errors import CheckpointError

__all__ = ["export_safetensors", "import_safetensors", "names_once", "stored_info"]


def export_safetensors(
    model: nn.Module,
    folder: str | Path,
    *,
    name_map: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> None:
    """Write a (sharded) model's weights as Hugging Face lays them out; every rank calls it, rank 0 writes.

    One whole tensor at a time is in memory. A tied parameter is written once, under its first name.

    Args:
        folder: may hold other files; weights of the same file names are replaced.
        name_map: patterns of names here and names there, see ``NameMap``.
        dtype: of floating-point tensors in the files; None leaves them as they are.
        max_file_bytes: a file ends before it would exceed this, unless one tensor alone does.
    Raises:
        CheckpointError: writing failed, on all ranks; or a dtype that the format has not.
        ConfigError: ``name_map`` gives two parameters one name.

    Example:
        export_safetensors(model, "out", dtype=torch.bfloat16)
        import_safetensors(model, "out")
    """
    ranks = checkpoint_ranks()
    view = view_model(model)
    names = NameMap(name_map or {}).translate(names_once(list(view.tensors), view.ties))
    tensors = {there: view.tensors[here] for here, there in names.items()}
    infos = {name: stored_info(tensor.shape, tensor.dtype, dtype) for name, tensor in tensors.items()}
    pending = list(infos)

    def gather(name: str) -> torch.Tensor:
        pending.remove(name)
        return whole(tensors[name])

    def write() -> None:
        try:
            if ranks.rank == 0:
                write_folder(Path(folder), infos, gather, max_file_bytes)
        finally:
            # Gathering takes all ranks: one that stopped early, after an error, would leave the others waiting.
            for name in list(pending):
                gather(name)

    ranks.check(f"exporting to {folder}", write)


def import_safetensors(
    model: nn.Module, folder: str | Path, *, name_map: Mapping[str, str] | None = None, strict: bool = True
) -> None:
    """Load weights from a folder of safetensors files, or from one file, into a (sharded) model; every rank calls it.

    Each rank reads the ranges of the files that hold its shards, and nothing else.

    Args:
        name_map: patterns of names here and names there, see ``NameMap``.
        strict: refuse files that hold more tensors than the model; False leaves those unread.
    Raises:
        CheckpointError: files are damaged, or names or shapes differ, which are listed. Nothing has changed then.
        ConfigError: the package ``safetensors`` is not installed, or ``name_map`` is ambiguous.

    Example:
        export_safetensors(model, "out", name_map={"blocks.*.linear.weight": "model.layers.*.mlp.weight"})
        import_safetensors(model, "out", name_map={"blocks.*.linear.weight": "model.layers.*.mlp.weight"})
    """
    finish_pending_save()
    ranks = checkpoint_ranks()
    view = view_model(model)
    names = NameMap(name_map or {}).translate(view.tensors)
    opened: list[FolderReader] = []

    def match() -> None:
        opened.append(FolderReader(Path(folder)))
        _match(opened[0], view, names, strict)

    try:
        ranks.check(f"opening {folder}", match)
        ranks.check(f"reading {folder}", lambda: _fill(opened[0], view, names))
    finally:
        for reader in opened:
            reader.__exit__(None, None, None)
    announce_change(model, view)


def names_once(names: Sequence[str], ties: Sequence[Sequence[str]]) -> list[str]:
    """Return the names without those of parameters that come under an earlier one."""
    first = {name: min(group, key=names.index) for group in ties for name in group if name in names}
    return [name for name in names if first.get(name, name) == name]


def stored_info(shape: Sequence[int], current: torch.dtype, wanted: torch.dtype | None) -> TensorInfo:
    """Return how a tensor is stored: floating-point ones in the wanted dtype, others as they are."""
    is_changed = wanted is not None and current.is_floating_point
    return TensorInfo(tuple(shape), wanted if wanted is not None and is_changed else current)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of a tensor that this rank holds, and the memory where."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: torch.Tensor


def _pieces(tensor: torch.Tensor) -> Iterator[_Piece]:
    if not isinstance(tensor, DTensor):
        yield _Piece((0,) * tensor.ndim, tuple(tensor.shape), tensor.detach())
        return
    # The interface by which PyTorch's own checkpoints ask any DTensor where its parts lie.
    for position, chunk in enumerate(tensor.__create_chunk_list__()):
        local = tensor.__get_tensor_shard__(MetadataIndex("", chunk.offsets, position))
        if local.numel():
            yield _Piece(tuple(chunk.offsets), tuple(chunk.sizes), local.detach())


def _match(reader: FolderReader, view: ModelView, names: Mapping[str, str], strict: bool) -> None:
    differences = []
    for name, tensor in view.tensors.items():
        info = reader.infos.get(names[name])
        if info is None:
            if not any(names[other] in reader.infos for other in view.siblings(name)):
                differences.append(f"{name}: no {names[name]} in the files")
        elif info.shape != tuple(tensor.shape):
            differences.append(f"{name}: {info.shape} in the files, {tuple(tensor.shape)} here")
    if strict:
        known = set(names.values())
        differences += [f"{name}: only in the files" for name in reader.infos if name not in known]
    refuse_differences(reader.path, "model", differences)
    for group in view.ties:
        first, *others = [name for name in group if names[name] in reader.infos]
        for other in others:
            for piece in _pieces(view.tensors[first]):
                one, two = (reader.read(names[name], piece.offsets, piece.sizes) for name in (first, other))
                if not torch.equal(one, two):
                    raise CheckpointError(
                        f"{reader.path} has different values for {names[first]!r} and {names[other]!r}, which are one "
                        "parameter in this model; nothing was loaded"
                    )


def _fill(reader: FolderReader, view: ModelView, names: Mapping[str, str]) -> None:
    for name, tensor in view.tensors.items():
        if names[name] in reader.infos:
            for piece in _pieces(tensor):
                piece.local.copy_(reader.read(names[name], piece.offsets, piece.sizes))
