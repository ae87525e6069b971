"""Hugging Face users: shard a transformers model with the right defaults, and serve ``Trainer`` and accelerate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp.api import fully_shard
from megatron_fsdp.checkpoint.safetensors_model import import_safetensors
from megatron_fsdp.config.fsdp_config import FsdpConfig
from megatron_fsdp.config.hf_settings import HfSettings
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.integrations.huggingface.accelerate import accelerate_fsdp2
from megatron_fsdp.integrations.huggingface.prepared import announce
from megatron_fsdp.integrations.huggingface.recompute import recompute_in_backward, refuse_own_checkpointing
from megatron_fsdp.integrations.huggingface.units import PlannedUnit, ignored_parameters, plan_units
from megatron_fsdp.integrations.huggingface.weights import (
    FirstRankWeights,
    allocate_for_import,
    load_pretrained,
    take_weights,
)
from megatron_fsdp.policy.mesh import buffer_device, sharding_target
from megatron_fsdp.runtime.lifecycle.module import FSDPModule

__all__ = ["accelerate_fsdp2", "prepare_model"]

M = TypeVar("M", bound=nn.Module)


def prepare_model(
    model: M,
    config: FsdpConfig | Mapping[str, Any] | str | Path | None = None,
    mesh: DeviceMesh | None = None,
    *,
    checkpoint: str | Path | None = None,
    name_map: Mapping[str, str] | None = None,
) -> M:
    """Shard a Hugging Face model in place, with units and settings as its users know them.

    The input embedding is a unit, each layer is one, and the last norm and the head are one together, which keeps its
    weights between forward and backward; an embedding tied to the head joins them. Build the optimizer afterwards.

    Args:
        model: a ``PreTrainedModel``, or a module that says what it would: ``get_input_embeddings``,
            ``get_output_embeddings``, ``base_model_prefix``, ``_no_split_modules``; each may be missing.
        config: ``FsdpConfig``, or what ``FsdpConfig.from_hf`` takes. None: its defaults.
        mesh: as in ``fully_shard``. None: all ranks; with a HYBRID strategy, groups of the ranks of one host.
        checkpoint: a folder of safetensors files to read the weights from; the model may be on the meta device.
            Every rank reads its shards; with ``cpu_ram_efficient_loading`` the first rank calls ``from_pretrained``.
        name_map: for a checkpoint under other names, see ``import_safetensors``.
    Returns:
        ``model``. ``transformers.Trainer`` takes it as one that is distributed already.
    Raises:
        ConfigError: settings that contradict the model, the mesh or each other.
        CheckpointError: the checkpoint is damaged or of another model.

    Example:
        model = prepare_model(AutoModelForCausalLM.from_pretrained("gpt2"))
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
    """
    _refuse_models(model)
    config = config if isinstance(config, FsdpConfig) else FsdpConfig.from_hf({} if config is None else config)
    settings = config.hugging_face or HfSettings()
    mesh = _mesh(mesh, settings)
    options = config.fully_shard_kwargs(mesh)
    ignored = ignored_parameters(model, settings.ignored_modules) if settings.ignored_modules else []
    units = plan_units(model, settings)
    if settings.activation_checkpointing:
        _recompute(model, units)
    weights = _first_rank_weights(model, mesh, settings, checkpoint, name_map)
    if weights is not None:
        # They have new objects by now, on the meta device.
        ignored = ignored_parameters(model, settings.ignored_modules) if settings.ignored_modules else []
    for parameter in ignored if weights is None else ():
        parameter.data = parameter.data.to(buffer_device(mesh))
    for unit in units:
        chosen = {**options, "reshard_after_forward": False} if unit.keeps_weights else options
        fully_shard(list(unit.modules), mesh, ignored_params=ignored, **chosen)
    fully_shard(model, mesh, ignored_params=ignored, **{**options, "reshard_after_forward": None})
    config.apply(model)
    if weights is not None:
        weights.scatter(model)
    elif checkpoint is not None:
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            allocate_for_import(model)
        import_safetensors(model, checkpoint, name_map=name_map)
    announce(model, mesh)
    return model


# ---------------------------------------------------------------- steps of prepare_model


def _refuse_models(model: nn.Module) -> None:
    """Refuse a model that something else has sharded, placed or packed."""
    name = type(model).__name__
    if isinstance(model, FSDPModule):
        raise ConfigError(f"{name} is sharded already; call prepare_model once, on the plain model")
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise ConfigError(
            f"{name} was sharded by from_pretrained(distributed_config=...); load it without, then prepare"
        )
    placed = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(placed) > 1 or placed & {"cpu", "disk"}:
        raise ConfigError(
            f"{name} was spread over {sorted(map(str, placed))} by device_map; load it without, and shard it instead"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise ConfigError(
            f"{name} is quantized: its weights are packed, with rows that mean nothing; load it unquantized, or "
            "pass the packed weights as ignored_params to fully_shard"
        )


def _mesh(mesh: DeviceMesh | None, settings: HfSettings) -> DeviceMesh:
    if mesh is None and not settings.is_hybrid:
        return sharding_target(None, None, None).mesh
    if mesh is None:
        # Joins the job where the script has not.
        device_type = sharding_target(None, None, None).mesh.device_type
        world, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if not local or world % local:
            raise ConfigError(
                f"sharding_strategy {settings.sharding_strategy} shards inside each host, found {world} ranks and "
                f"LOCAL_WORLD_SIZE {local or 'unset'}; start with torchrun, or pass a mesh of two axes (outer, inner)"
            )
        return init_device_mesh(device_type, (world // local, local), mesh_dim_names=("replicate", "shard"))
    if settings.is_hybrid and mesh.ndim != 2:
        raise ConfigError(
            f"sharding_strategy {settings.sharding_strategy} needs a mesh of two axes (outer, inner), found {mesh.ndim}"
        )
    return mesh


def _recompute(model: nn.Module, units: list[PlannedUnit]) -> None:
    refuse_own_checkpointing(model)
    layers = [unit.modules[0] for unit in units if unit.is_layer]
    inner = {id(below) for layer in layers for below in list(layer.modules())[1:]}
    if not layers:
        raise ConfigError(
            "activation_checkpointing computes layers again, and auto_wrap_policy NO_WRAP leaves none; give "
            "TRANSFORMER_BASED_WRAP, or call model.gradient_checkpointing_enable() instead"
        )
    recompute_in_backward(layer for layer in layers if id(layer) not in inner)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False


def _first_rank_weights(
    model: nn.Module,
    mesh: DeviceMesh,
    settings: HfSettings,
    checkpoint: str | Path | None,
    name_map: Mapping[str, str] | None,
) -> FirstRankWeights | None:
    """Return the first rank's weights where they are to be shared out, and leave the model without any."""
    if not settings.is_from_first_rank:
        return None
    if checkpoint is None or not settings.cpu_ram_efficient_loading:
        return None if checkpoint is not None else take_weights(model, mesh, None)
    if name_map:
        raise ConfigError("name_map contradicts cpu_ram_efficient_loading: from_pretrained has names of its own")
    return take_weights(model, mesh, load_pretrained(model, checkpoint, mesh))
