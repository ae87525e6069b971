"""Weights for a sharded Hugging Face model: from the first rank's copy, or from a folder that every rank reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer.collectives_rare import broadcast
from megatron_fsdp.checkpoint.model_state import announce_change
from megatron_fsdp.checkpoint.parts import pieces_of
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.meta_init import in_full_precision, materialize
from megatron_fsdp.runtime.lifecycle.make_param_group import materialize_unit
from megatron_fsdp.runtime.step.unit import units_below

__all__ = ["FirstRankWeights", "allocate_for_import", "load_pretrained", "take_weights"]


@dataclass(frozen=True, slots=True)
class FirstRankWeights:
    """The whole weights and buffers of a model on the first rank of a mesh, by name; empty on the others."""

    tensors: dict[str, torch.Tensor]
    is_first: bool

    def scatter(self, model: nn.Module) -> None:
        """Fill a model that was sharded on the meta device, in place; every rank calls it.

        One tensor at a time is whole on the ranks that do not hold them all. On a mesh of GPUs it is whole there.
        """
        units = list(units_below(model))
        groups = [group for unit in units for group in unit.groups]
        axes = {id(axis.gather_group): axis for group in groups for axis in group.main_weight.axes}.values()
        device = groups[0].spec.device
        for unit in units:
            materialize_unit(unit)
        _move(model, device, lambda tensor: tensor.is_meta)
        with torch.no_grad(), in_full_precision(groups):
            for name, target in _tensors(model):
                full = torch.empty(target.shape, dtype=target.dtype, device=device)
                if self.is_first:
                    full.copy_(self.tensors[name])
                for axis in axes:
                    broadcast(full, axis)
                for offsets, local in pieces_of(target):
                    local.copy_(full[tuple(slice(o, o + size) for o, size in zip(offsets, local.shape, strict=True))])
        announce_change(model)


def take_weights(model: nn.Module, mesh: DeviceMesh, source: nn.Module | None) -> FirstRankWeights:
    """Put a model's parameters on the meta device, and return the first rank's.

    Args:
        source: a model with the values, on the first rank; None: ``model`` itself.
    Raises:
        ConfigError: the first rank's model has no values, because it is on the meta device.
    """
    is_first = not any(mesh.get_coordinate() or (0,))
    tensors = dict(_tensors(source or model)) if is_first else {}
    without = [name for name, tensor in tensors.items() if tensor.is_meta]
    if without:
        raise ConfigError(
            f"cpu_ram_efficient_loading: {without[0]!r} and {len(without) - 1} more are on the meta device on the "
            "first rank too, so there is nothing to share; build or load the model there, or give checkpoint="
        )
    _move(model, torch.device("meta"), lambda tensor: isinstance(tensor, nn.Parameter))
    return FirstRankWeights(tensors, is_first)


def load_pretrained(model: nn.Module, folder: str | Path, mesh: DeviceMesh) -> nn.Module | None:
    """Return, on the first rank of a mesh, a model of the same class with the weights of a folder; None elsewhere.

    The package that the model is from reads it, so weights which it stores in another form (experts one by one) are
    converted.
    """
    cls: Any = type(model)
    if not hasattr(cls, "from_pretrained"):
        raise ConfigError(
            f"{cls.__name__} has no from_pretrained; leave out cpu_ram_efficient_loading to read {folder}"
        )
    if any(mesh.get_coordinate() or (0,)):
        return None
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    loaded: nn.Module = cls.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    return loaded


def allocate_for_import(model: nn.Module) -> None:
    """Give memory to what a sharded model has on the meta device, before a checkpoint fills it.

    Buffers that checkpoints do not hold (rotary frequencies) get their values from the model's ``_init_weights``.
    """
    computed = {
        id(module)
        for module in model.modules()
        if any(
            buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
            for name, buffer in module._buffers.items()
        )
    }
    initialise = getattr(model, "_init_weights", None)
    if computed and initialise is None:
        raise ConfigError(
            f"{type(model).__name__} has buffers on the meta device that no checkpoint holds, and no _init_weights to "
            "fill them; build the model on the CPU, or fill them after materialize()"
        )

    def fill(module: nn.Module) -> None:
        if id(module) in computed and initialise is not None:
            initialise(module)

    materialize(model, fill)


# ---------------------------------------------------------------- parts


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _move(model: nn.Module, device: torch.device, is_meant: Callable[[torch.Tensor], bool]) -> None:
    """Put tensors on a device, with any values in them; parameters that were one stay one."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is None or not is_meant(tensor):
                    continue
                new = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                    # Marks that other packages, and fsdp_no_shard, leave on parameters.
                    vars(new).update(vars(tensor))
                tensors[key] = moved.setdefault(id(tensor), new)  # type: ignore[assignment]
