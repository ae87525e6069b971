"""The layout of Megatron's ``fsdp_dtensor`` checkpoints, as Megatron-FSDP writes them; imports no Megatron.

Names of weights begin with ``module.``; names in the optimizer's part begin with one ``module.`` per wrapper.
Hyperparameters are saved under each parameter's name, because optimizer groups differ between ranks: Megatron leaves
out parameters without elements on a rank. Gated weights are saved as two halves.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megatron_fsdp.checkpoint.foreign import HALVES, common_wrappers
from megatron_fsdp.checkpoint.parts import Part, RowPart
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.integrations.megatron.names import GATED, WholeNames
from megatron_fsdp.optim.loaded_state import parameters_of, was_only_shown

__all__ = [
    "check_was_read", "describe_by_name", "innermost", "lay_out_for_megatron", "load_by_name", "owners_of",
    "with_wrapper", "without_wrappers",
]  # fmt: skip

_log = logging.getLogger(__name__)
_WRAPPER = "module."
_WRAPPERS = re.compile(r"^(module\.)*")
_EXTRA_STATE = "_extra_state"
# Placeholder for a hyperparameter that the checkpoint may lack.
_UNKNOWN_STEP = -1
# The tensors of a model's last state dict for torch.distributed.checkpoint, by the model inside its wrappers.
_LAID_OUT: weakref.WeakKeyDictionary[nn.Module, dict[str, Part]] = weakref.WeakKeyDictionary()
_MAX_LISTED = 20
# The step is loaded into each parameter's state, and is_expert_parallel depends on the mesh.
_NOT_LOADED = ("step", "is_expert_parallel")


# ---------------------------------------------------------------------- the model


def with_wrapper(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a model's state dict under Megatron-FSDP's names, without extra state that is empty."""
    return {
        f"{prefix}{_WRAPPER}{name.removeprefix(prefix)}": value
        for name, value in state.items()
        if value is not None or not name.endswith(_EXTRA_STATE)
    }


def without_wrappers(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a state dict under the model's own names, without the prefixes of wrappers."""
    own = model.state_dict()
    if not own.keys().isdisjoint(state):
        return dict(state)
    here, there = common_wrappers(own), common_wrappers(state)
    return {here + name.removeprefix(there): value for name, value in state.items()}


def lay_out_for_megatron(state: Mapping[str, Any], model: nn.Module, *, is_gated: bool) -> dict[str, Any]:
    """Return what Megatron's training scripts hand to ``torch.distributed.checkpoint``, to be saved or loaded in place.

    Args:
        state: with ``model``, and maybe ``optimizer`` as ``describe_by_name`` returned it. is_gated: SwiGLU.
        model: without Megatron's wrapper, or within it.
    """
    weights = state["model"]
    if not common_wrappers(weights):
        # Megatron takes its wrappers off before it asks for the state, so names are still those of this rank's part.
        whole: WholeNames | None = getattr(innermost(model), "whole_names", None)
        weights = with_wrapper(weights if whole is None else whole.outgoing(weights))
    laid_out: dict[str, Any] = {}
    for name, value in weights.items():
        laid_out |= _parts(name, value, is_gated=is_gated) if isinstance(value, torch.Tensor) else {name: value}
    _LAID_OUT[innermost(model)] = {name: part for name, part in laid_out.items() if isinstance(part, Part)}
    found = {**state, "model": laid_out}
    if is_gated and "state" in state.get("optimizer", {}):
        split: dict[str, dict[str, Any]] = {}
        for name, values in state["optimizer"]["state"].items():
            for key, value in values.items():
                is_whole = not isinstance(value, torch.Tensor) or not value.ndim
                names = _names(name, is_gated=True) if is_whole else ()
                parts = dict.fromkeys(names, value) if is_whole else _parts(name, value, is_gated=True)
                for part_name, part in parts.items():
                    split.setdefault(part_name, {})[key] = part
        found["optimizer"] = {**state["optimizer"], "state": split}
    return found


def check_was_read(model: nn.Module, *, strict: bool) -> None:
    """Check that the last load found the whole model in the checkpoint; Megatron skips missing tensors."""
    parts = _LAID_OUT.pop(innermost(model), {})
    missing = [name for name, part in parts.items() if not part.was_found]
    if not missing or any(part.was_saved for part in parts.values()):
        return
    more = f" and {len(missing) - _MAX_LISTED} more" if len(missing) > _MAX_LISTED else ""
    text = f"the checkpoint has no {', '.join(missing[:_MAX_LISTED])}{more}"
    if strict:
        raise CheckpointError(
            f"{text}; those weights were not changed. It is of another model, or was saved before names were "
            "Megatron-FSDP's. fix: load it with megatron_fsdp.load_checkpoint, or with strict=False to keep them"
        )
    _log.warning("%s; those weights were not changed", text)


def _parts(name: str, tensor: torch.Tensor, *, is_gated: bool) -> dict[str, torch.Tensor]:
    if not tensor.ndim:
        return {name: tensor}
    names = _names(name, is_gated=is_gated and tensor.shape[0] % 2 == 0)
    size = tensor.shape[0] // len(names)
    return {part: RowPart(tensor, size * position, size * (position + 1)) for position, part in enumerate(names)}


def _names(name: str, *, is_gated: bool) -> tuple[str, ...]:
    return tuple(name + half for half in HALVES) if is_gated and GATED.search(name) else (name,)


def innermost(model: nn.Module) -> nn.Module:
    """Return the model in its wrappers."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


# ---------------------------------------------------------------------- the optimizer


def describe_by_name(chunks: Sequence[nn.Module], optimizer: Optimizer, *, is_loading: bool) -> dict[str, Any]:
    """Return state and hyperparameters of an optimizer under the parameters' names, on live tensors.

    Args:
        chunks: the models inside Megatron's wrappers.
        optimizer: their optimizer.
        is_loading: include entries that only other software saves.
    """
    document, owners = optimizer.state_dict(), owners_of(chunks, optimizer)
    names = {index: owner.name for index, owner in owners.items()}
    state = {
        names[index]: {key: owners[index].part(value) for key, value in values.items()}
        for index, values in document["state"].items()
    }
    meta: dict[str, dict[str, Any]] = {}
    for group in document["param_groups"]:
        values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for index in group["params"]:
            name = names[index]
            meta[name] = dict(values)
            # The key of the step counter in TransformerEngine's and Apex's Adam.
            step = state.get(name, {}).get("step")
            if step is not None:
                meta[name]["step"] = _UNKNOWN_STEP if is_loading else int(step)
    return {"state": state, "param_to_group_meta": meta}


def load_by_name(chunks: Sequence[nn.Module], optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load what ``describe_by_name`` returned after a checkpoint was read into it, or was loaded elsewhere.

    Raises:
        CheckpointError: parameters are missing, or parameters of one group have different hyperparameters.
    """
    names = {index: owner.name for index, owner in owners_of(chunks, optimizer).items()}
    saved_state = _by_names_here(state_dict["state"], names.values())
    meta: Mapping[str, Any] = state_dict.get("param_to_group_meta") or {
        name: {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in state_dict["param_groups"]
        for name in group["params"]
    }
    saved_meta = _by_names_here(meta, names.values())
    groups: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        first = sum(len(before["params"]) for before in groups)
        indices = range(first, first + len(group["params"]))
        values = _hyperparameters([names[index] for index in indices], saved_meta)
        groups.append({**group, **values, "params": list(indices)})
        for index in indices:
            if names[index] in saved_state:
                found = saved_state[names[index]]
                step = saved_meta[names[index]].get("step", _UNKNOWN_STEP)
                if isinstance(found.get("step"), torch.Tensor) and step != _UNKNOWN_STEP:
                    found["step"].fill_(step)
                state[index] = {key: value.source if isinstance(value, Part) else value for key, value in found.items()}
                if not optimizer.state.get(group["params"][index - first]):
                    _check_was_read(state[index], names[index])
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _hyperparameters(names: list[str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all parameters of a group were saved with."""
    found: list[dict[str, Any]] = []
    for name in names:
        if name not in saved:
            raise CheckpointError(
                f"the checkpoint has no hyperparameters of {name}. fix: leave the optimizer out (--no-load-optim)"
            )
        found.append({key: value for key, value in saved[name].items() if key not in _NOT_LOADED})
        differing = [key for key in found[0] if repr(found[0][key]) != repr(found[-1].get(key))]
        if differing:
            raise CheckpointError(
                f"{names[0]} and {name} are in one group of this optimizer and were saved with another "
                f"{', '.join(differing)}. fix: group them as in the run that saved"
            )
    return found[0] if found else {}


def _check_was_read(values: Mapping[str, Any], name: str) -> None:
    if was_only_shown(values):
        raise CheckpointError(
            f"nothing was read into the optimizer's state of {name}: the checkpoint has it under another name. fix: "
            "load it with megatron_fsdp.load_checkpoint, or leave the optimizer out (--no-load-optim)"
        )


def _by_names_here(values: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    here = set(names)
    if not here.isdisjoint(values) or not here:
        return values
    # A rank may hold few of the parameters, all below one wrapper of the model's own.
    by_bare = {_WRAPPERS.sub("", name): name for name in here}
    return {by_bare.get(_WRAPPERS.sub("", name), name): value for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class _Owner:
    """A parameter of an optimizer: its name in a checkpoint, and how its values become parts of whole ones."""

    name: str
    own_name: str
    names: WholeNames | None

    def part(self, value: Any) -> Any:
        return value if self.names is None else self.names.part(self.own_name, value)


def owners_of(chunks: Sequence[nn.Module], optimizer: Optimizer) -> dict[int, _Owner]:
    """Return what each of an optimizer's parameters is called in a checkpoint, by its place among them."""
    # Two wrappers in Megatron-FSDP: its adapter in Megatron, and the engine's. Here there is one.
    by_parameter: dict[int, _Owner] = {}
    for chunk in chunks:
        names: WholeNames | None = getattr(chunk, "whole_names", None)
        for name, parameter in chunk.named_parameters():
            whole = name if names is None else names.whole_name(name)
            by_parameter[id(parameter)] = _Owner(f"{_WRAPPER}{_WRAPPER}{whole}", name, names)
    # Count like Optimizer.state_dict, without calling it: it would create state again.
    return {index: by_parameter[id(parameter)] for index, parameter in enumerate(parameters_of(optimizer))}
