"""Provide what verl's engines need from a trainer: full parameters one by one, and local shards with their offsets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dbuffer.mesh import mesh_axes
from dbuffer.placements import flat_axes
from megatron_fsdp.errors import TransferError
from megatron_fsdp.transfer.catalog import WeightCatalog
from megatron_fsdp.transfer.local_shards import local_shards
from megatron_fsdp.transfer.stream import weight_stream

__all__ = ["get_per_tensor_param", "get_per_tensor_param_shard"]


def get_per_tensor_param(model: nn.Module, **options: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], dict | None]:  # type: ignore[type-arg]  # verl's
    """Return an iterator of (name, whole tensor), and None as the peft config.

    Use it as the body of the method of this name of verl's engine.

    Args:
        model: a sharded model.
        options: options of ``weight_stream``. Models with adapters need ``merge_lora=True``, because the peft config
            is None.
    """
    return weight_stream(model, **options), None


def get_per_tensor_param_shard(
    model: nn.Module, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[Iterator[tuple[str, torch.Tensor, Any]], dict | None]:  # type: ignore[type-arg]  # verl's
    """Return an iterator of (name, flat local tensor, ``ShardSpec``), and None as the peft config.

    ``ShardSpec.place`` is the flat offset of the local tensor; it is exact for every layout of the flat buffer.

    Args:
        model: a sharded model.
        dtype: dtype of floating-point parameters; buffers keep their dtype.
    Raises:
        TransferError: two data-parallel axes or tensor parallelism cut a parameter; verl gathers over one group.
    """
    return _shards(model, dtype), None


def _shards(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, Any]]:
    from verl.workers.engine.spec import ShardSpec

    catalog = WeightCatalog.of(model)
    groups = {weight.name: each.group for each in catalog.groups for weight in each.weights}
    # weight_stream keeps the dtype of buffers too.
    kept = {weight.name for weight in catalog.loose if weight.is_buffer}
    for name, shard in local_shards(model).items():
        local = shard.local.to(dtype) if shard.local.is_floating_point() and name not in kept else shard.local
        group = groups.get(name)
        if group is None:
            yield name, local.view(shard.shape), ShardSpec(full_shape=shard.shape)
            continue
        cut = flat_axes(group.weights.main.placements)
        if group.owned[0].tensor_parallel is not None or len(cut) > 1:
            raise TransferError(
                f"unit {group.name!r}: parameter {name!r} is cut along several axes of its mesh, and verl gathers a "
                "shard over one group. fix: use get_per_tensor_param, or shard over one data-parallel axis"
            )
        gather = mesh_axes(group.weights.main.mesh)[cut[0]].gather_group if cut else None
        # Each group of replicas gathers its own weights, because its ranks hold all shards.
        yield name, local, ShardSpec(full_shape=shard.shape, place=shard.offset, gather_group=gather)
