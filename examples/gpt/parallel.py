"""The model over the ranks: sharded by megatron_fsdp; by PyTorch's FSDP2 or replicated (DDP) to compare with."""

from __future__ import annotations

import argparse
import datetime
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gpt.model import GptConfig, GptModel, MixtureOfExperts, Mlp
from megatron_fsdp import DataParallelMeshDims, FsdpConfig, FSDPModule, Watch, clip_grad_norm_, fully_shard, microbatch


def build_model(config: GptConfig, args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return a new model, ready to train on all ranks: sharded by this engine or by PyTorch's FSDP2, or replicated.

    With ``--init-model-with-meta-device`` the weights are the same, but no rank ever holds the whole model.
    """
    mesh, is_late = build_mesh(args, device), args.use_megatron_fsdp and args.init_model_with_meta_device
    with torch.device("meta" if is_late else device):
        model = GptModel(config, recomputes=args.recompute_granularity == "full")
    if not is_late:
        model.init_weights(args.seed)
    if args.use_megatron_fsdp:
        shard(model, args, mesh)
    elif args.use_torch_fsdp2:
        shard_by_torch(model, args, mesh)
    elif mesh.size() > 1:
        return DistributedDataParallel(model)
    if is_late:
        model.to_empty(device=device)
        model.init_weights(args.seed)
    return model


def build_mesh(args: argparse.Namespace, device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks in Megatron's order tp-ep-dp, in which neighbouring ranks are tensor-parallel.

    Its axes, outermost first: "dp", or "dp_outer" and "dp_inner" with several optimizer instances. With expert
    parallelism the last of these is split into "edp" and "ep". With tensor parallelism, "tp" follows.
    """
    instances, expert = args.num_distributed_optimizer_instances, args.expert_model_parallel_size
    axes = {"dp_outer": instances} if instances > 1 else {}
    if expert > 1:
        axes |= {"edp": args.ranks_per_instance // expert, "ep": expert}
    else:
        axes["dp_inner" if instances > 1 else "dp"] = args.ranks_per_instance
    if args.tensor_model_parallel_size > 1:
        axes["tp"] = args.tensor_model_parallel_size
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def shard(model: GptModel, args: argparse.Namespace, mesh: DeviceMesh) -> None:
    """Make units of every block, of the embedding and of the head, in place, as the flags say.

    Tied embeddings are used at both ends of the model, so they, the positions and the final norm form the root unit,
    which stays gathered from forward to backward. Otherwise the head stays gathered: backward needs it first.
    """
    axes = mesh.mesh_dim_names or ()
    within = tuple(axis for axis in axes if axis in ("ep", "tp"))
    shards = mesh[tuple(axis for axis in axes if axis not in within)] if within else mesh
    if within:
        divide_layers(model, mesh, within)
    config = FsdpConfig.from_args(args)
    options = {**config.fully_shard_kwargs(shards), "mesh": shards}
    moments = "int8" if args.adam_moments == "int8" else None
    options["mp_policy"] = replace(options["mp_policy"], moments=moments, gather_dtype=args.weight_gather)
    # Tokens of all data-parallel ranks reach an expert, whose gradient is a mean over all of them.
    of_experts = {**options, "dp_mesh_dims": None, "grad_divisor": args.expert_model_parallel_size}
    if "ep" in axes:
        outer = "dp_outer" if "dp_outer" in axes else None
        options |= {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(replicate=outer, shard=("edp", "ep"))}
    is_tied = not model.config.untie_embeddings_and_output_weights
    if not is_tied:
        fully_shard(model.embedding, **options)
    for block in model.blocks:
        if "ep" in axes:
            fully_shard(block.get_submodule("mlp.experts"), **of_experts)
        fully_shard(block, **options)
    if not is_tied:
        fully_shard(model.head, **{**options, "reshard_after_forward": False})
    fully_shard(model, **options)
    config.apply(model, num_microbatches=args.global_batch_size // args.micro_batch_size)
    if args.slot_pool is not None:
        assert isinstance(model, FSDPModule)
        model.set_slot_pool(args.slot_pool)


def divide_layers(model: GptModel, mesh: DeviceMesh, axes: tuple[str, ...]) -> None:
    """Divide every block in place: tensor parallelism by PyTorch, and expert parallelism.

    Attention heads and the first layer of an MLP are divided by rows, the layers after them by columns. Norms, the
    router, embeddings and the head are whole on every tensor-parallel rank.
    """
    within = mesh[axes]
    for block in model.blocks:
        if isinstance(block.mlp, MixtureOfExperts):
            block.mlp.experts.divide(within)
        if "tp" in axes:
            plan: dict[str, ParallelStyle] = {
                "self_attention.linear_qkv": ColwiseParallel(),
                "self_attention.linear_proj": RowwiseParallel(),
            }
            if isinstance(block.mlp, Mlp):
                plan |= {"mlp.linear_fc1": ColwiseParallel(), "mlp.linear_fc2": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)


def shard_by_torch(model: GptModel, args: argparse.Namespace, mesh: DeviceMesh) -> None:
    """Make the units that ``shard`` makes, of PyTorch's FSDP2, in place."""
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else fsdp.MixedPrecisionPolicy()
    reshards = args.torch_fsdp2_reshard_after_forward
    ends = [model.embedding, model.head] if model.config.untie_embeddings_and_output_weights else []
    for module in (*ends, *model.blocks, model):
        fsdp.fully_shard(module, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy)


def watched(model: nn.Module, args: argparse.Namespace) -> AbstractContextManager[Watch | None]:
    """Return a context that raises an error if ranks differ or a rank hangs, before the collectives time out."""
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
    """Scale gradients down to a global norm of ``max_norm`` (0 only measures); return the norm that they had, 0-d."""
    limit = max_norm or float("inf")
    if isinstance(model, FSDPModule):
        return clip_grad_norm_(model, limit)
    norm: Tensor = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
