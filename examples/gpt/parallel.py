"""Data parallelism of the example: sharded by megatron_fsdp; by PyTorch's FSDP2 or replicated (DDP) to compare with."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gpt.layers import MixtureOfExperts, Mlp
from gpt.meshes import Meshes
from gpt.model import GptModel, Recompute
from gpt.model_config import GptConfig
from megatron_fsdp import FsdpConfig, FSDPModule, Watch, clip_grad_norm_, fully_shard, microbatch


def build_model(config: GptConfig, args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Return a new model, ready to train on the mesh, as ``parallelize`` makes it.

    With ``--init-model-with-meta-device`` no rank ever holds it whole; its weights are the same.
    """
    recompute = Recompute(args.recompute_granularity or "none")
    if args.use_megatron_fsdp and args.init_model_with_meta_device:
        with torch.device("meta"):
            model = GptModel(config, recompute=recompute)
        sharded = shard_by_flags(model, args, mesh)
        sharded.to_empty(device=device)
        model.init_weights(args.seed)
        return sharded
    model = GptModel(config, recompute=recompute)
    model.init_weights(args.seed)
    return parallelize(model.to(device), args, mesh)


def parallelize(model: GptModel, args: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    """Return the model, ready to train on the mesh.

    It is sharded by this project with ``--use-megatron-fsdp``, by PyTorch with ``--use-torch-fsdp2``, else replicated.
    """
    if args.use_megatron_fsdp:
        return shard_by_flags(model, args, mesh)
    if args.use_torch_fsdp2:
        return shard_by_torch(model, args, mesh)
    if mesh.size() == 1:
        return model
    return DistributedDataParallel(model)


def shard_by_flags(model: GptModel, args: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    """Do what ``shard`` does, as the flags say."""
    count = args.global_batch_size // args.micro_batch_size
    options: dict[str, Any] = {"slot_pool": args.slot_pool, "num_microbatches": count}
    return shard(model, FsdpConfig.from_args(args), mesh, low_precision(args), **options)


def low_precision(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ``MixedPrecisionPolicy`` that flags of the script's own set."""
    return {"moments": "int8" if args.adam_moments == "int8" else None, "gather_dtype": args.weight_gather}


def shard(
    model: GptModel,
    config: FsdpConfig,
    mesh: DeviceMesh,
    precision: Mapping[str, Any] | None = None,
    *,
    slot_pool: str | None = None,
    num_microbatches: int | None = None,
) -> nn.Module:
    """Make units of every block, of the embedding and of the head, in place, and return the model.

    Tied embeddings are used at both ends of the model, so they, the positions and the final norm form the root unit,
    which stays gathered from forward to backward. Otherwise the head stays gathered: backward needs it first.
    """
    meshes = Meshes.of(mesh)
    options: dict[str, Any] = {**config.fully_shard_kwargs(meshes.shards), **meshes.dense}
    options["mp_policy"] = replace(options["mp_policy"], **(precision or {}))
    divide_layers(model, meshes)
    is_tied = not model.config.untie_embeddings_and_output_weights
    if not is_tied:
        fully_shard(model.embedding, **options)
    for block in model.blocks:
        if meshes.experts is not None and isinstance(block.mlp, MixtureOfExperts):
            # Tokens of all data-parallel ranks reach an expert, whose gradient is a mean over all of them.
            of_experts = {**options, "dp_mesh_dims": None, "mesh": meshes.experts}
            fully_shard(block.mlp.experts, **of_experts, grad_divisor=meshes.num_expert_ranks)
        fully_shard(block, **options)
    if not is_tied:
        fully_shard(model.head, **{**options, "reshard_after_forward": False})
    fully_shard(model, **options)
    config.apply(model, num_microbatches=num_microbatches)
    if slot_pool is not None:
        assert isinstance(model, FSDPModule)
        model.set_slot_pool(slot_pool)
    return model


def shard_by_torch(model: GptModel, args: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    """Make the units that ``shard`` makes, of PyTorch's FSDP2, in place, and return the model."""
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": args.torch_fsdp2_reshard_after_forward}
    if args.bf16:
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    is_tied = not model.config.untie_embeddings_and_output_weights
    for module in (*([] if is_tied else [model.embedding, model.head]), *model.blocks, model):
        fsdp.fully_shard(module, **options)
    return model


def divide_layers(model: GptModel, meshes: Meshes) -> None:
    """Give each rank its part of every block's layers, in place: tensor parallelism by PyTorch, and experts.

    Attention heads and the first layer of an MLP are divided by rows, what follows them by columns; norms, the router,
    embeddings and the head are whole on every tensor-parallel rank.
    """
    for block in model.blocks:
        if isinstance(block.mlp, MixtureOfExperts) and meshes.within is not None:
            block.mlp.experts.divide(meshes.within)
        if meshes.tensor is not None:
            plan: dict[str, ParallelStyle] = {
                "self_attention.linear_qkv": ColwiseParallel(),
                "self_attention.linear_proj": RowwiseParallel(),
            }
            if isinstance(block.mlp, Mlp):
                plan |= {"mlp.linear_fc1": ColwiseParallel(), "mlp.linear_fc2": RowwiseParallel()}
            parallelize_module(block, meshes.tensor, plan)


def watched(model: nn.Module, args: argparse.Namespace) -> AbstractContextManager[Watch | None]:
    """Return the context in which ranks that differ or stand still raise an error, before the collectives time out."""
    if not isinstance(model, FSDPModule) or args.fake_process_group:
        return nullcontext()
    timeout = 0.8 * datetime.timedelta(minutes=args.distributed_timeout_minutes)
    return Watch(model, timeout, interval=args.agreement_interval, replica_interval=args.replica_interval)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that was parallelized; its parameter names are those of the checkpoint."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def accumulation(model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
    """Return the context of one microbatch: gradients are communicated only as the step's last one requires."""
    if isinstance(model, FSDPModule):
        return microbatch(model, is_last)
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    if isinstance(model, fsdp.FSDPModule):
        model.set_requires_gradient_sync(is_last)
    return nullcontext()


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients down to a global norm of ``max_norm``, and return the norm that they had, a 0-d tensor.

    Args:
        max_norm: 0 or infinity only measures.
    """
    limit = max_norm or float("inf")
    if isinstance(model, FSDPModule):
        return clip_grad_norm_(model, limit)
    norm: Tensor = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
