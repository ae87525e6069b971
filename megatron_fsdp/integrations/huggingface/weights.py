"""Weights for a sharded Hugging Face model: from the first rank's copy, or from a folder that every rank reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dbuffer.collectives import broadcast
from dbuffer.mesh import MeshAxis
from megatron_fsdp.checkpoint.model_state import announce_change
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.runtime.materialize import in_full_precision, materialize
from megatron_fsdp.runtime.unit import units_below

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
        _allocate(model)
        axes = _axes(model)
        groups = [group for unit in units_below(model) for group in unit.groups]
        device = groups[0].spec.device
        with torch.no_grad(), in_full_precision(groups):
            for name, target in _tensors(model):
                full = torch.empty(target.shape, dtype=target.dtype, device=device)
                if self.is_first:
                    full.copy_(self.tensors[name])
                for axis in axes:
                    broadcast(full, axis)
                _write(target, full)
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
    renewed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = renewed.setdefault(id(parameter), _on_meta(parameter))
    return FirstRankWeights(tensors, is_first)


def load_pretrained(model: nn.Module, folder: str | Path, mesh: DeviceMesh) -> nn.Module | None:
    """Return, on the first rank of a mesh, a model of the same class with the weights of a folder; None elsewhere.

    The package that the model is from reads it, so weights which it stores in another form (experts one by one) are
    converted.

    Raises:
        ConfigError: the model's class has no ``from_pretrained``.
    """
    cls: Any = type(model)
    if not hasattr(cls, "from_pretrained"):
        raise ConfigError(
            f"{cls.__name__} has no from_pretrained to read {folder} with; leave out cpu_ram_efficient_loading, and "
            "every rank reads its shards"
        )
    if any(mesh.get_coordinate() or (0,)):
        return None
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    loaded: nn.Module = cls.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    return loaded


def allocate_for_import(model: nn.Module) -> None:
    """Give memory to what a sharded model has on the meta device, before a checkpoint fills it.

    Buffers that checkpoints do not hold (rotary frequencies) get their values from the model's ``_init_weights``.

    Raises:
        ConfigError: there are such buffers on the meta device, and no ``_init_weights``.
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


def _allocate(model: nn.Module) -> None:
    """Give memory, with any values in it, to what a sharded model has on the meta device."""
    units = list(units_below(model))
    device = next((group.spec.device for unit in units for group in unit.groups), torch.device("cpu"))
    for unit in units:
        unit.materialize()
    renewed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[key] = renewed.setdefault(id(parameter), _on(parameter, device))
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)


def _axes(model: nn.Module) -> list[MeshAxis]:
    groups = [group for unit in units_below(model) for group in unit.groups]
    return list({id(axis.gather_group): axis for group in groups for axis in group.main_weight.axes}.values())


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    return _on(parameter, torch.device("meta"))


def _on(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    new = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
    # Marks that other packages, and fsdp_no_shard, leave on parameters.
    new.__dict__.update(parameter.__dict__)
    return new


def _write(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copy what this rank holds of a tensor out of the whole."""
    if not isinstance(target, DTensor):
        target.copy_(full)
        return
    # The interface by which PyTorch's own checkpoints ask any DTensor where its parts lie.
    for position, chunk in enumerate(target.__create_chunk_list__()):
        box = tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
        local = target.__get_tensor_shard__(MetadataIndex("", chunk.offsets, position))
        local.copy_(full[box])
