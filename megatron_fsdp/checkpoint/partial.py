"""load_matching: of a checkpoint of another model, take what this one has under the same name and shape."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from megatron_fsdp.checkpoint.async_save import finish_pending_save
from megatron_fsdp.checkpoint.foreign import read_model
from megatron_fsdp.checkpoint.model_state import announce_change, view_model
from megatron_fsdp.checkpoint.ranks import checkpoint_ranks
from megatron_fsdp.checkpoint.reader import open_checkpoint, read_entries, refuse_replaced
from megatron_fsdp.errors import CheckpointError

__all__ = ["PartialLoad", "load_matching"]


@dataclass(frozen=True, slots=True)
class PartialLoad:
    """What ``load_matching`` did.

    Attributes:
        loaded: names of the model's tensors that were loaded.
        left: one line per difference: what the model has and the checkpoint lacks, the other way round, and shapes
            that differ.
        extra: what was saved with it.
    """

    loaded: tuple[str, ...]
    left: tuple[str, ...]
    extra: dict[str, Any]


def load_matching(model: nn.Module, path: str | Path, *, verify: bool = True) -> PartialLoad:
    """Load weights and buffers whose names and shapes agree, and leave the others as they are; every rank calls it.

    Optimizer and random state are not read: they would not belong to the model that results.

    Args:
        model: sharded or plain. path: of one checkpoint. verify: as in ``load_checkpoint``.
    Raises:
        CheckpointError: there is no checkpoint, nothing in it agrees, or it is damaged.
    """
    finish_pending_save()
    ranks = checkpoint_ranks()
    opened = open_checkpoint(Path(path), ranks, verify=verify)
    view = view_model(model)
    saved = read_model(opened, [*view.tensors, *view.extra_state]).tensors
    targets: dict[str, Any] = {}
    loaded, left = [], []
    for name, tensor in view.tensors.items():
        found = saved.get(name)
        if found is None or found.shape is None:
            if not any(other in saved for other in view.siblings(name)):
                left.append(f"{name}: not in the checkpoint")
        elif found.shape != tuple(tensor.shape):
            left.append(f"{name}: {found.shape} in the checkpoint, {tuple(tensor.shape)} here")
        else:
            targets |= found.targets(tensor)
            loaded.append(name)
    left += [f"{name}: only in the checkpoint" for name in saved if name not in view.tensors]
    if not loaded:
        raise CheckpointError(f"{path} has no tensor of this model's names and shapes; nothing was loaded")
    ranks.check(f"loading {path}", lambda: read_entries(opened, targets))
    refuse_replaced(opened, ranks)
    announce_change(model, view)
    return PartialLoad(tuple(loaded), tuple(left), dict(opened.state.get("extra", {})))
