"""Optimizer state by parameter name, so that it fits any order, grouping and layout of the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Adamax, NAdam, Optimizer

from megatron_fsdp.checkpoint.foreign import Saved, SavedOptimizer, insert, read_optimizer
from megatron_fsdp.checkpoint.manifest import EntryPath
from megatron_fsdp.checkpoint.model_state import ModelView, refuse_differences, siblings
from megatron_fsdp.checkpoint.reader import OpenCheckpoint
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.optim.adamw.int8_moments import CODED_KEYS, decoded_state
from megatron_fsdp.optim.loaded_state import parameters_by_index, state_dtype, without_fresh_state

__all__ = ["OptimizerMatch", "describe_optimizer", "match_optimizer"]


def describe_optimizer(optimizer: Optimizer, view: ModelView) -> dict[str, Any]:
    """Return ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}``, with the live tensors.

    ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` returns the same, except for an optimizer that
    has not taken a step: it has no state here, while PyTorch's function takes a step with zero gradients.

    Raises:
        CheckpointError: the optimizer has a parameter that is not the model's, or state that belongs to no parameter.
    """
    document = without_fresh_state(optimizer, optimizer.state_dict())
    names = _names_by_index(optimizer, document, view)
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in document["param_groups"]]
    foreign = [key for key in document["state"] if key not in names]
    if foreign:
        raise CheckpointError(
            f"{type(optimizer).__name__} has state under {foreign[0]!r}, which is none of its parameters; a "
            "checkpoint holds state of parameters. fix: save it with save_checkpoint(..., extra={...})"
        )
    return {"state": {names[index]: values for index, values in document["state"].items()}, "param_groups": groups}


@dataclass(frozen=True, slots=True)
class _Place:
    """The target of one value of a parameter's state.

    Attributes:
        index, path: position of the parameter in the optimizer, and path of the value in its state.
        round, entry: the round and the entry whose target becomes the value. entry None: ``value`` becomes the value;
            parts of it are read.
    """

    index: int
    path: EntryPath
    round: int
    entry: str | None
    value: Any = None


@dataclass(frozen=True, slots=True)
class OptimizerMatch:
    """Saved optimizer state, and the targets to load it into.

    Attributes:
        rounds: targets by entry name: tensors in the layout of their parameters, or placeholders. If a saved parameter
            is two parameters here (it was tied), a second round reads it for the second one.
        places: where each value goes.
        groups: hyperparameters of each of the optimizer's groups, with ``params`` as indices.
    """

    rounds: Sequence[dict[str, Any]]
    places: Sequence[_Place]
    groups: Sequence[Mapping[str, Any]]

    def apply(self, optimizer: Optimizer) -> None:
        """Load the targets of all rounds into the optimizer, after they were read."""
        state: dict[int, dict[str, Any]] = {}
        for place in self.places:
            value = place.value if place.entry is None else self.rounds[place.round][place.entry]
            insert(state.setdefault(place.index, {}), place.path, value)
        if getattr(optimizer, "moments", None) != "int8":
            by_index = parameters_by_index(optimizer, optimizer.state_dict())
            for index, values in state.items():
                state[index] = decoded_state(by_index[index], values, state_dtype(optimizer, by_index[index]))
        optimizer.load_state_dict({"state": state, "param_groups": [dict(group) for group in self.groups]})


def match_optimizer(opened: OpenCheckpoint, optimizer: Optimizer, view: ModelView) -> OptimizerMatch:
    """Find the target of every saved value. Only hyperparameters are read, and the optimizer does not change.

    Raises:
        CheckpointError: the checkpoint has no optimizer, or one of another kind or over other parameters.
    """
    document = without_fresh_state(optimizer, optimizer.state_dict())
    names = _names_by_index(optimizer, document, view)
    here = [*view.names.values(), *(other for name in view.names.values() for other in siblings(view.ties, name))]
    saved = read_optimizer(opened, [names[index] for index in sorted(names)], here)
    aliases = _Aliases(saved.groups, [*view.ties, *opened.state.get("ties", ())])
    saved_names = {index: aliases.saved_name(name) for index, name in names.items()}
    differences = list(_other_kind(opened, type(optimizer).__name__, document, saved, names))
    differences += _other_state(optimizer, saved)
    differences += [f"{names[index]}: not in the checkpoint" for index, name in saved_names.items() if name is None]
    covered = {name for name in saved_names.values() if name is not None}
    covered |= {other for name in covered for other in siblings(view.ties, name)}
    differences += [f"{name}: only in the checkpoint" for name in aliases.group_of if name not in covered]
    by_index = parameters_by_index(optimizer, document)
    shapes = {names[index]: tuple(parameter.shape) for index, parameter in by_index.items()}
    # State by position may belong to other parameters, so shapes are compared too.
    differences += [
        f"{name}.{'.'.join(map(str, path))}: {value.shape} in the checkpoint, {shapes[name]} here"
        for (name, path), value in (saved.state.items() if saved.is_foreign else ())
        if name in shapes and value.shape not in (None, (), shapes[name])
    ]
    refuse_differences(opened.folder, "optimizer", differences)
    groups = [_with_hyperparameters(group, saved.groups, aliases, names) for group in document["param_groups"]]
    rounds: list[dict[str, Any]] = [{}]
    places: list[_Place] = []
    for (name, path), value in saved.state.items():
        takers = [index for index, other in saved_names.items() if other == name]
        rounds += [{} for _ in range(len(takers) - len(rounds))]
        for number, index in enumerate(takers):
            current = document["state"].get(index, {})
            for key in path:
                current = current.get(key) if isinstance(current, Mapping) else None
            target = _target(opened, value, by_index[index], current, state_dtype(optimizer, by_index[index]))
            rounds[number] |= value.targets(target)
            entry = value.entries[0] if len(value.entries) == 1 else None
            places.append(_Place(index, path, number, entry, target))
    places += _steps_of_groups(saved, saved_names, aliases)
    return OptimizerMatch(rounds, places, groups)


def _steps_of_groups(
    saved: SavedOptimizer, saved_names: Mapping[int, str | None], aliases: _Aliases
) -> Iterator[_Place]:
    """Yield step counts of parameters without one: Adam in TransformerEngine and Apex counts steps per group."""
    with_state = {name for name, _ in saved.state}
    for index, name in saved_names.items():
        if saved.is_foreign and name in with_state and (name, ("step",)) not in saved.state:
            step = saved.groups[aliases.group_of[name]].get("step")
            if step is not None:
                yield _Place(index, ("step",), 0, None, torch.tensor(float(step)))


def _names_by_index(optimizer: Optimizer, document: Mapping[str, Any], view: ModelView) -> dict[int, str]:
    names: dict[int, str] = {}
    for position, (live, group) in enumerate(zip(optimizer.param_groups, document["param_groups"], strict=True)):
        for parameter, index in zip(live["params"], group["params"], strict=True):
            name = view.names.get(id(parameter))
            if name is None:
                raise CheckpointError(
                    f"group {position} of the optimizer has a parameter of shape {tuple(parameter.shape)} that is not "
                    "one of the model's. fix: build the optimizer from model.parameters(), after fully_shard"
                )
            names[index] = name
    return names


class _Aliases:
    """Maps a parameter of this model to its saved name: its own, or one that it is or was tied to."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], ties: Sequence[Sequence[str]]) -> None:
        self.group_of: dict[str, int] = {
            name: position for position, group in enumerate(groups) for name in group["params"]
        }
        self._ties = ties

    def saved_name(self, name: str) -> str | None:
        return next((other for other in (name, *siblings(self._ties, name)) if other in self.group_of), None)


def _with_hyperparameters(
    group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]], aliases: _Aliases, names: Mapping[int, str]
) -> dict[str, Any]:
    """Return one of the optimizer's groups with the saved hyperparameters of its parameters."""
    found: dict[int, str] = {}
    for index in group["params"]:
        name = aliases.saved_name(names[index])
        if name is not None:
            found.setdefault(aliases.group_of[name], names[index])
    positions = sorted(found)
    for other in positions[1:]:
        one, first = saved[other], saved[positions[0]]
        # Compared as text, because == on tensors returns a tensor.
        differing = [key for key in one.keys() - _NAMED if key not in first or repr(one[key]) != repr(first[key])]
        if differing:
            raise CheckpointError(
                f"{found[positions[0]]!r} and {found[other]!r} are in one group of this optimizer and were saved in "
                f"two, with another {', '.join(sorted(differing))}; nothing was loaded. fix: group them as they were"
            )
    hyperparameters = {key: value for key, value in saved[positions[0]].items() if key not in _NAMED} if found else {}
    return {**group, **hyperparameters}


_NAMED = frozenset({"params", "param_names"})


def _other_kind(
    opened: OpenCheckpoint, kind: str, document: Mapping[str, Any], saved: SavedOptimizer, names: Mapping[int, str]
) -> Iterator[str]:
    """Yield differences if the checkpoint is of another kind of optimizer; nothing if it may be the same kind."""
    saved_kind = opened.state.get("optimizer")
    here = set().union(*document["param_groups"]) - _NAMED
    there = set().union(*saved.groups) - _NAMED
    # Other software's Adam has different options, so only the betas are compared.
    is_akin = saved.is_foreign and ("betas" in here) == ("betas" in there)
    if saved_kind == kind or here <= there or there <= here or is_akin:
        return
    only_there = ", ".join(sorted(there - here))
    yield f"hyperparameters: {only_there} of {saved_kind or 'another optimizer'}, which {kind} has not"
    for index, values in document["state"].items():
        for key in values:
            if (names[index], (key,)) not in saved.state:
                yield f"{names[index]}.{key}: not in the checkpoint"


_OWN_STATE: Mapping[type[Optimizer], str] = {Adamax: "exp_inf", NAdam: "mu_product"}
"""Optimizers with options like Adam's, and the state that they have and Adam has not."""


def _other_state(optimizer: Optimizer, saved: SavedOptimizer) -> Iterator[str]:
    """Yield differences if the saved state is of another optimizer with options like Adam's."""
    found = {path[0] for _, path in saved.state}
    for kind, key in _OWN_STATE.items() if found else ():
        if isinstance(optimizer, kind) is not (key in found):
            where = "only in the checkpoint" if key in found else "not in the checkpoint"
            yield f"state {key!r}, which {kind.__name__} has: {where}"


def _target(opened: OpenCheckpoint, saved: Saved, parameter: torch.Tensor, current: Any, dtype: torch.dtype) -> Any:
    """Return the tensor to read a saved value into, in the layout of its parameter."""
    found = opened.metadata.state_dict_metadata[saved.entries[0]]
    if saved.shape is None or not isinstance(found, TensorStorageMetadata):
        return None
    shape, saved_dtype = saved.shape, found.properties.dtype
    if isinstance(current, torch.Tensor) and tuple(current.shape) == shape:
        return current
    if shape == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype if saved_dtype.is_floating_point else saved_dtype)
    # Scales of 8-bit moments are read whole, because the layout determines which of them a rank needs.
    is_scales = saved.entries[0].endswith(tuple(key for key in CODED_KEYS if key.endswith("_scales")))
    if shape == () or is_scales or not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=saved_dtype, device="cpu" if shape == () else parameter.device)
    raise CheckpointError(
        f"{opened.folder}: {saved.entries[0]} has shape {shape}, its parameter {tuple(parameter.shape)}, and this "
        "optimizer has not made such state yet, so its layout is unknown. fix: take one step before loading"
    )
