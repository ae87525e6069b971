"""State of a sharded model as whole tensors, gathered one at a time, and matching of saved values with a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dbuffer import DBuffer
from megatron_fsdp.checkpoint.foreign import Saved, read_model, read_values
from megatron_fsdp.checkpoint.ranks import checkpoint_ranks
from megatron_fsdp.checkpoint.reader import OpenCheckpoint, listed, read_entries
from megatron_fsdp.engine.param_group import ParameterGroup, announce_step, group_of_parameter
from megatron_fsdp.engine.unit import units_below
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.optim.local_parts import local_of

__all__ = [
    "ModelMatch", "ModelView", "announce_change", "canonical", "check_ties", "full_state_dict",
    "match_model", "match_partly", "refuse_differences", "restore_extra_state", "siblings", "unwrapped", "view_model",
    "whole",
]  # fmt: skip

_EXTRA_STATE = "_extra_state"

# Path components that PyTorch's wrappers insert into a parameter's name.
_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"})


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model's state as a checkpoint sees it.

    Attributes:
        tensors: parameters and persistent buffers by name; a tied parameter is under each of its names. They share the
            model's memory, except split main weights, which are FP32 copies.
        names: the first name of each parameter, by the parameter's ``id``.
        ties: groups of names that share one parameter.
        extra_state: results of modules' ``get_extra_state``, by name.
        copies: the groups with split main weights, and the buffers of their copies.
    """

    tensors: dict[str, torch.Tensor]
    names: dict[int, str]
    ties: tuple[tuple[str, ...], ...]
    extra_state: dict[str, Any]
    copies: tuple[tuple[ParameterGroup, DBuffer], ...] = ()


def view_model(model: nn.Module) -> ModelView:
    """Return a view of a model's state. Its units are resharded; nothing else changes.

    Split main weights take 4 more bytes per element for as long as the view lives.

    Raises:
        CheckpointError: the state dict has an entry that is neither a tensor nor a module's extra state; a tensor is on
            the meta device; or ranks hold different parts of the model under one name (Megatron's model parallelism).
        StateError: a parameter of a unit was replaced by another object.
    """
    for module in model.modules():
        if isinstance(refusal := vars(module).get("checkpoint_refusal"), str):
            raise CheckpointError(refusal)
    for unit in units_below(unwrapped(model)):
        unit.check_replaced_params()
    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in get_model_state_dict(model).items():
        if name.rpartition(".")[2] == _EXTRA_STATE:
            extra[name] = value
        elif isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            raise CheckpointError(
                f"entry {name!r} of the model's state dict is a {type(value).__name__}; a checkpoint holds tensors, "
                "and other values of modules that return them from get_extra_state. fix: return it from get_extra_state"
            )
    _refuse_meta(tensors)
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in unwrapped(model).named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), []).append(canonical(name))
    names = {key: found[0] for key, found in by_parameter.items()}
    ties = tuple(tuple(found) for found in by_parameter.values() if len(found) > 1)
    groups = {id(group): group for p in model.parameters() if (group := group_of_parameter(p)) is not None}
    split = (group for group in groups.values() if group.weights.remainder is not None and not group.spec.is_meta)
    copies = tuple((group, group.weights.values()) for group in split)
    for group, values in copies:
        for index, param in enumerate(group.parameters.values()):
            whole = group.fsdp_params.wrap(index, values.get_dtensor(index))
            tensors.update({name: whole for name in by_parameter.get(id(param), ()) if name in tensors})
    return ModelView(tensors, names, ties, extra, copies)


def _refuse_meta(tensors: Mapping[str, torch.Tensor]) -> None:
    name = next((name for name, tensor in tensors.items() if local_of(tensor).is_meta), None)
    if name is not None:
        raise CheckpointError(
            f"{name!r} is on the meta device, so there is no memory to save or to load into. fix: materialize(model); "
            "or model.to_empty(device=...) before a load, which fills it"
        )


def siblings(ties: Sequence[Sequence[str]], name: str) -> tuple[str, ...]:
    """Return the other names of the parameter that is called ``name``."""
    return tuple(other for group in ties if name in group for other in group if other != name)


@dataclass(frozen=True, slots=True)
class ModelMatch:
    """Saved values, and the tensors to load them into.

    Attributes:
        view: the model's view. targets: the tensor to read each entry into. names: tensors that will be loaded.
        saved: saved values by the model's names. extra_state: modules' saved extra state by name.
        differences: one line per differing name or shape.
    """

    view: ModelView
    targets: dict[str, torch.Tensor]
    names: tuple[str, ...]
    saved: Mapping[str, Saved]
    extra_state: Mapping[str, Any]
    differences: list[str]


def match_model(opened: OpenCheckpoint, view: ModelView) -> ModelMatch:
    """Find the target of every saved value. Reads only extra state, and values of names that are tied only here.

    Raises:
        CheckpointError: names or shapes differ, and are listed; or tied names have different saved values.
    """
    found = match_partly(opened, view)
    refuse_differences(opened.folder, "model", found.differences)
    check_ties(opened, found)
    return found


def match_partly(opened: OpenCheckpoint, view: ModelView) -> ModelMatch:
    """Find the target of every saved value that matches the model.

    If the checkpoint lacks a name, another name of the same tied parameter may replace it.
    """
    found = read_model(opened, [*view.tensors, *view.extra_state])
    differences: list[str] = []
    targets: dict[str, torch.Tensor] = {}
    names: list[str] = []
    for name, tensor in view.tensors.items():
        saved = found.tensors.get(name)
        if saved is not None and saved.shape == tuple(tensor.shape):
            targets |= saved.targets(tensor)
            names.append(name)
        elif saved is not None:
            shape = "no tensor" if saved.shape is None else saved.shape
            differences.append(f"{name}: {shape} in the checkpoint, {tuple(tensor.shape)} here")
        elif not any(other in found.tensors for other in siblings(view.ties, name)):
            differences.append(f"{name}: not in the checkpoint")
    differences += [f"{name}: only in the checkpoint" for name in found.tensors if name not in view.tensors]
    extra = dict(opened.state.get("extra_state", {}))
    extra |= dict(zip(found.extra_state, read_values(opened, found.extra_state.values()), strict=True))
    differences += [
        f"{name}: only in the checkpoint"
        for name, value in extra.items()
        if name not in view.extra_state and (value is not None or name not in found.extra_state)
    ]
    if "extra_state" in opened.state:
        # Other software's checkpoints may leave it out.
        lacking = (name for name, value in view.extra_state.items() if name not in extra and value is not None)
        differences += [f"{name}: not in the checkpoint" for name in lacking]
    return ModelMatch(view, targets, tuple(names), found.tensors, extra, differences)


def check_ties(opened: OpenCheckpoint, match: ModelMatch) -> None:
    """Raise if names that share one parameter here have different saved values; this rank's part is compared."""
    view, saved, saved_ties = match.view, match.saved, opened.state.get("ties", ())
    for group in view.ties:
        loaded = [name for name in group if name in match.names]
        for first, other in ((loaded[0], name) for name in loaded[1:]):
            if other in siblings(saved_ties, first):
                continue
            one, two = (torch.empty_like(view.tensors[name]) for name in (first, other))
            read_entries(opened, saved[first].targets(one))
            read_entries(opened, saved[other].targets(two))
            if not torch.equal(local_of(one), local_of(two)):
                raise CheckpointError(
                    f"{opened.folder} has different values for {first!r} and {other!r}, which are one parameter in "
                    "this model; nothing was loaded. fix: untie them in the model, or make them equal before saving"
                )


_MADE_LIKE = {
    "model": "a model of the configuration that was saved, or load another checkpoint",
    "optimizer": "an optimizer of the saved class and parameters, or give optimizer=None to load the weights alone",
}


def refuse_differences(folder: Path, kind: str, differences: Sequence[str]) -> None:
    """Raise an error that lists the differences; do nothing if there are none."""
    if differences:
        lines = listed(differences, "\n  ")
        raise CheckpointError(
            f"{folder} is of another {kind}; nothing was loaded. {len(differences)} entries differ:\n  {lines}\n"
            f"fix: load it into {_MADE_LIKE[kind]}"
        )


def restore_extra_state(model: nn.Module, extra_state: Mapping[str, Any]) -> None:
    """Call ``set_extra_state`` of the modules that have saved extra state."""
    for name, module in unwrapped(model).named_modules():
        key = canonical(f"{name}.{_EXTRA_STATE}" if name else _EXTRA_STATE)
        if key in extra_state:
            module.set_extra_state(extra_state[key])


def announce_change(model: nn.Module, view: ModelView | None = None) -> None:
    """Tell a sharded model's units that main weights, or the copies in a view, were written to."""
    for group, values in () if view is None else view.copies:
        group.weights.store(values)
    announce_step(group for unit in units_below(model) for group in unit.groups)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside a DistributedDataParallel; return any other model unchanged."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def canonical(name: str) -> str:
    """Return a parameter's name without the components that PyTorch's wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def full_state_dict(model: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
    """Return the full state dict on the CPU on rank 0, and an empty dict on other ranks. Every rank must call this.

    Rank 0 holds all of it in host memory. Other ranks, and rank 0's GPU, hold one whole tensor at a time.

    Args:
        process_group: as in ``save_checkpoint``; the first of its ranks gets the state dict.

    Example:
        state = full_state_dict(model)
        if dist.get_rank() == 0:
            torch.save(state, "model.pt")
    """
    ranks = checkpoint_ranks("calls full_state_dict", process_group)
    # The gathers cannot name ranks that do not call this function, but this check can.
    ranks.check("full_state_dict", lambda: None)
    is_main = ranks.rank == 0
    values = ((name, whole(tensor)) for name, tensor in view_model(model).tensors.items())
    return {name: value.to("cpu", copy=True) for name, value in values if is_main}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole value of a tensor; for a DTensor, every rank of its mesh must call this."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
