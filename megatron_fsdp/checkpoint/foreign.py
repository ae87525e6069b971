"""Match the entries of a checkpoint with this model's names, including checkpoints of other software.

Megatron-FSDP's ``fsdp_dtensor`` checkpoints prefix each name with a ``module.`` for every wrapper around the model, and
store the two halves of a gated weight as ``weight_w`` and ``weight_v``. They store hyperparameters by parameter name
(``param_to_group_meta``). Other checkpoints key optimizer state by position, like ``optimizer.state_dict()``
(docs/design/checkpoint.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_fsdp.checkpoint.manifest import EntryPath, tensors_of
from megatron_fsdp.checkpoint.parts import RowPart
from megatron_fsdp.checkpoint.reader import OpenCheckpoint, read_entries
from megatron_fsdp.errors import CheckpointError

__all__ = [
    "HALVES", "Saved", "SavedModel", "SavedOptimizer", "common_wrappers", "insert", "read_groups", "read_model",
    "read_optimizer", "read_values",
]  # fmt: skip

WRAPPER = "module."
# Suffixes of the upper and the lower half of the rows of a gated weight (SwiGLU), in their order in the weight.
HALVES = ("_w", "_v")
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class Saved:
    """One saved value: its entry, or the two entries of its halves.

    Attributes:
        shape: None for a value that is not a tensor.
    """

    entries: tuple[str, ...]
    shape: tuple[int, ...] | None

    def targets(self, tensor: Any) -> dict[str, Any]:
        """Return the targets of the entries, such that reading them fills ``tensor``."""
        if len(self.entries) == 1:
            return {self.entries[0]: tensor}
        half = tensor.shape[0] // 2
        return {
            entry: RowPart(tensor, position * half, (position + 1) * half)
            for position, entry in enumerate(self.entries)
        }


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A model's entries in a checkpoint.

    Attributes:
        tensors: by this model's names. extra_state: entries of modules' extra state, by name.
    """

    tensors: Mapping[str, Saved]
    extra_state: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """An optimizer's entries in a checkpoint.

    Attributes:
        state: keyed by this model's parameter name and the path of the value in the parameter's state.
        groups: hyperparameters, with ``params`` as this model's names.
        is_foreign: whether the checkpoint has the layout of other software.
    """

    state: Mapping[tuple[str, EntryPath], Saved]
    groups: Sequence[Mapping[str, Any]]
    is_foreign: bool


def read_model(opened: OpenCheckpoint, here: Collection[str]) -> SavedModel:
    """Find a model's entries in a checkpoint, without reading values. ``here``: the model's names."""
    found = {str(path[0]): name for path, name in opened.names_below("model").items() if len(path) == 1}
    if not found:
        kinds = sorted({str(path[0]) for path in opened.names_below() if path})
        raise CheckpointError(
            f"{opened.folder} holds no entries under 'model'; it has {', '.join(kinds) or 'none'}. fix: load a folder "
            'of save_checkpoint, or of dcp.save({"model": ..., "optimizer": ...})'
        )
    names = _translated(found, here)
    saved = tensors_of(opened.metadata)
    extra = {
        names[name]: entry
        for name, entry in found.items()
        if entry not in saved and name.split(".")[-1] == _EXTRA_STATE
    }
    tensors = {names[name]: _saved(opened, entry) for name, entry in found.items() if names[name] not in extra}
    return SavedModel(_joined(tensors, here), extra)


def read_optimizer(opened: OpenCheckpoint, parameters: Sequence[str], here: Collection[str]) -> SavedOptimizer:
    """Find an optimizer's entries in a checkpoint, and read its hyperparameters.

    Args:
        parameters: names of this optimizer's parameters, in its order. here: names of all parameters of the model.
    """
    groups = read_groups(opened)
    found = opened.names_below("optimizer", "state")
    saved_names = [name for group in groups for name in group["params"]]
    is_by_position = bool(saved_names) and all(isinstance(name, int) for name in saved_names)
    is_by_name = bool(opened.names_below("optimizer", "param_to_group_meta"))
    if is_by_position:
        if len(saved_names) != len(parameters):
            raise CheckpointError(
                f"{opened.folder} is of another optimizer; nothing was loaded. It has state by position, of "
                f"{len(saved_names)} parameters; this optimizer has {len(parameters)}. fix: build it from as many "
                "parameters, in the same order, or give optimizer=None for the weights alone"
            )
        names = {str(position): parameters[position] for position in saved_names}
    else:
        names = _translated([*map(str, saved_names), *(str(path[0]) for path in found)], here)
    state: dict[EntryPath, dict[str, Saved]] = {}
    for path, entry in found.items():
        state.setdefault(path[1:], {})[names.get(str(path[0]), str(path[0]))] = _saved(opened, entry)
    by_name = {(name, path): value for path, values in state.items() for name, value in _joined(values, here).items()}
    joined = [
        {**group, "params": list(dict.fromkeys(_whole_name(names[str(name)], here) for name in group["params"]))}
        for group in groups
    ]
    return SavedOptimizer(by_name, joined, is_by_position or is_by_name)


def read_groups(opened: OpenCheckpoint) -> list[dict[str, Any]]:
    """Read the hyperparameters of all groups, with ``params`` as they were saved: names or positions."""
    by_name = opened.names_below("optimizer", "param_to_group_meta")
    entries = by_name or opened.names_below("optimizer", "param_groups")
    if not entries:
        raise CheckpointError(f"{opened.folder} was saved without an optimizer. fix: load it with optimizer=None")
    groups: dict[str | int, Any] = {}
    for path, value in zip(entries, read_values(opened, entries.values()), strict=True):
        insert(groups, path, value)
    if not by_name:
        return [groups[position] for position in sorted(groups)]
    # Parameters with equal hyperparameters are put into one group.
    joined: dict[str, dict[str, Any]] = {}
    for name, values in groups.items():
        joined.setdefault(repr(sorted(values.items(), key=repr)), {**values, "params": []})["params"].append(str(name))
    return list(joined.values())


def read_values(opened: OpenCheckpoint, entries: Iterable[str]) -> list[Any]:
    """Read entries one by one; tensors are read whole."""
    targets: dict[str, Any] = {}
    for entry in entries:
        saved = opened.metadata.state_dict_metadata[entry]
        targets[entry] = None
        if isinstance(saved, TensorStorageMetadata):
            targets[entry] = torch.zeros(saved.size, dtype=saved.properties.dtype)
    read_entries(opened, targets)
    return list(targets.values())


def common_wrappers(names: Iterable[str]) -> str:
    """Return the longest ``module.module...`` prefix that all names share."""
    rest = list(names)
    prefix = ""
    while rest and all(name.startswith(WRAPPER) for name in rest):
        prefix, rest = prefix + WRAPPER, [name[len(WRAPPER) :] for name in rest]
    return prefix


def _translated(saved: Iterable[str], here: Collection[str]) -> dict[str, str]:
    """Return saved names mapped to this model's names. If none is equal, their ``module.`` prefixes are exchanged."""
    names = list(saved)
    if not set(names).isdisjoint(here):
        return {name: name for name in names}
    prefix, own = common_wrappers(names), common_wrappers(here)
    return {name: own + name[len(prefix) :] for name in names}


def _joined(values: Mapping[str, Saved], here: Collection[str]) -> dict[str, Saved]:
    """Join saved halves of a weight if this model has the whole weight and the checkpoint has not."""
    joined: dict[str, Saved] = {}
    for name, value in values.items():
        whole = _whole_name(name, here)
        if whole == name:
            joined[name] = value
        elif name.endswith(HALVES[0]):
            other = values.get(whole + HALVES[1])
            if other is None or other.shape != value.shape:
                joined[name] = value
            elif value.shape:
                joined[whole] = Saved(value.entries + other.entries, (2 * value.shape[0], *value.shape[1:]))
            else:
                joined[whole] = value
        elif whole + HALVES[0] not in values:
            joined[name] = value
    return joined


def _whole_name(name: str, here: Collection[str]) -> str:
    if name not in here and name.endswith(HALVES):
        whole = name[: -len(HALVES[0])]
        return whole if whole in here else name
    return name


def _saved(opened: OpenCheckpoint, entry: str) -> Saved:
    found = opened.metadata.state_dict_metadata[entry]
    return Saved((entry,), tuple(found.size) if isinstance(found, TensorStorageMetadata) else None)


def insert(values: dict[Any, Any], path: EntryPath, value: Any) -> None:
    """Set the value at a path in nested dictionaries."""
    for key in path[:-1]:
        values = values.setdefault(key, {})
    values[path[-1]] = value
