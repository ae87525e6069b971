"""Save and load model and optimizer through PyTorch's distributed checkpoint, under the model's own names and shapes.

A checkpoint is a folder: the tensors in DCP's format, and ``state.pt`` with what is not a tensor (hyperparameters,
    the caller's ``extra``, random
state of each rank). Nothing in it is executed on load: DCP files hold tensors only, ``state.pt`` is read with
``weights_only=True``.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from dbuffer.collectives import barrier
from megatron_fsdp.errors import CheckpointError, ConfigError
from megatron_fsdp.module import units_below

__all__ = ["load_checkpoint", "save_checkpoint"]

_STATE_FILE = "state.pt"
_METADATA_FILE = ".metadata"
_MAX_LISTED = 20


def save_checkpoint(
    model: nn.Module,
    optimizer: Optimizer | None,
    path: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> None:
    """Write a checkpoint folder at ``path``; every rank calls it. The folder appears when it is complete, and
    replaces an older one.

    Args:
        model: the (sharded) model. optimizer: over its parameters, or None.
        extra: what else the caller wants back on load: nested dicts, lists, numbers, strings, tensors. Rank 0's is
            kept.
        asynchronous: not supported yet.
    Raises:
        ConfigError: ``asynchronous``.
    """
    if asynchronous:
        raise ConfigError("save_checkpoint(asynchronous=True) is not supported yet; leave it False")
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    if _rank() == 0 and partial.exists():
        shutil.rmtree(partial)
    barrier()
    tensors = _model_tensors(model)
    plain: dict[str, Any] = {"extra": dict(extra or {}), "world_size": _world_size()}
    if optimizer is not None:
        optimizer_tensors, plain["optimizer"] = _split_optimizer(get_optimizer_state_dict(model, optimizer))
        tensors |= optimizer_tensors
    save(tensors, checkpoint_id=partial)
    torch.save({"random_state": _random_state()}, partial / f"rank_{_rank()}.pt")
    barrier()
    if _rank() == 0:
        torch.save(plain, partial / _STATE_FILE)
        _publish(partial, path)
    barrier()


def load_checkpoint(model: nn.Module, optimizer: Optimizer | None, path: str | Path) -> dict[str, Any]:
    """Load a checkpoint folder into the model and optimizer, on any number of ranks; every rank calls it.

    Random state is restored where the number of ranks is the one that saved.

    Returns:
        The ``extra`` that was saved.
    Raises:
        CheckpointError: no checkpoint there, or one of another model: names and shapes that differ are listed.
            Nothing has changed then.
    """
    path = Path(path)
    if not (path / _METADATA_FILE).exists() or not (path / _STATE_FILE).exists():
        raise CheckpointError(f"{path} holds no complete checkpoint (looked for {_METADATA_FILE} and {_STATE_FILE})")
    saved = _saved_shapes(path)
    plain = torch.load(path / _STATE_FILE, weights_only=True)
    tensors = _model_tensors(model)
    _compare(path, "model", tensors, saved)
    optimizer_state: dict[str, Any] = {}
    if optimizer is not None:
        if "optimizer" not in plain:
            raise CheckpointError(f"{path} was saved without an optimizer; load it with optimizer=None")
        optimizer_state = get_optimizer_state_dict(model, optimizer)
        optimizer_tensors, _ = _split_optimizer(optimizer_state)
        _compare(path, "optimizer", optimizer_tensors, saved)
        tensors |= optimizer_tensors
    load(tensors, checkpoint_id=path)
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, _join_optimizer(tensors, plain["optimizer"]))
    for unit in units_below(model):
        for group in unit.groups:
            group.catch_up()
    if plain["world_size"] == _world_size():
        state = torch.load(path / f"rank_{_rank()}.pt", weights_only=True)
        _restore_random_state(state["random_state"])
    extra: dict[str, Any] = plain["extra"]
    return extra


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    state = get_model_state_dict(model)
    return {f"model.{name}": value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _split_optimizer(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return an optimizer state's tensors under flat names, and the rest."""
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, dict[str, Any]] = {}
    for name, values in state["state"].items():
        rest[name] = {key: value for key, value in values.items() if not isinstance(value, torch.Tensor)}
        tensors |= {
            f"optimizer.{name}.{key}": value for key, value in values.items() if isinstance(value, torch.Tensor)
        }
    return tensors, {"state": rest, "param_groups": state["param_groups"]}


def _join_optimizer(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in plain["state"].items()}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            parameter, key = name.removeprefix("optimizer.").rsplit(".", 1)
            state.setdefault(parameter, {})[key] = value
    return {"state": state, "param_groups": plain["param_groups"]}


def _saved_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    metadata = FileSystemReader(path).read_metadata()
    return {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _compare(path: Path, kind: str, wanted: Mapping[str, torch.Tensor], saved: Mapping[str, tuple[int, ...]]) -> None:
    prefix = f"{kind}."
    there = {name: shape for name, shape in saved.items() if name.startswith(prefix)}
    differences = [f"{name.removeprefix(prefix)}: not in the checkpoint" for name in wanted if name not in there]
    differences += [f"{name.removeprefix(prefix)}: only in the checkpoint" for name in there if name not in wanted]
    differences += [
        f"{name.removeprefix(prefix)}: {there[name]} in the checkpoint, {tuple(tensor.shape)} here"
        for name, tensor in wanted.items()
        if name in there and there[name] != tuple(tensor.shape)
    ]
    if differences:
        listed = "\n  ".join(differences[:_MAX_LISTED])
        more = f"\n  and {len(differences) - _MAX_LISTED} more" if len(differences) > _MAX_LISTED else ""
        raise CheckpointError(
            f"{path} is of another {kind}; nothing was loaded. {len(differences)} entries differ:\n  {listed}{more}"
        )


def _publish(partial: Path, path: Path) -> None:
    """Give a complete folder its name; an older one of that name is removed after."""
    if not path.exists():
        partial.rename(path)
        return
    old = path.with_name(path.name + ".old")
    if old.exists():
        shutil.rmtree(old)
    path.rename(old)
    partial.rename(path)
    shutil.rmtree(old)


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
