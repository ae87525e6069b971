"""Trainers: one training step of each engine with the optimizer that goes with it, and the least a step can cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import megatron_fsdp
from benchmarks.engines import LEARNING_RATE, Precision, Step, make_model, ours, step_of, train_fsdp2, world_mesh
from benchmarks.models import Shape

__all__ = ["TRAINERS", "bare"]


def train_ours(shape: Shape, precision: Precision, device: str) -> Step:
    """Train with this project's fully_shard and torch's fused AdamW, which the other engines use too."""
    model = make_model(shape, device)
    ours(model, list(model.layers), world_mesh(device), precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return step_of(model, megatron_fsdp.fully_shard_optimizer(optimizer))


def train_ours_flat(shape: Shape, precision: Precision, device: str) -> Step:
    """Train with this project's fully_shard and its flat AdamW."""
    model = make_model(shape, device)
    ours(model, list(model.layers), world_mesh(device), precision)
    return step_of(model, megatron_fsdp.AdamW(model.parameters(), lr=LEARNING_RATE))


def train_ddp(shape: Shape, precision: Precision, device: str) -> Step:
    """Train with DistributedDataParallel and torch's fused AdamW: every rank has all weights and state."""
    model = DistributedDataParallel(make_model(shape, device), gradient_as_bucket_view=True)
    return step_of(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True))


def bare(shape: Shape, precision: Precision, device: str) -> Step:
    """The minimum of a ZeRO-3 step: local compute, collectives, and AdamW on a shard.

    The plain model in the compute dtype runs forward and backward. Each unit but the last layer and the root is
    gathered twice, and gradients are reduce-scattered once, from memory that is already allocated. Nothing overlaps.
    """
    model = make_model(shape, device)
    units: list[nn.Module] = [*model.layers, model]
    inner = {id(parameter) for layer in model.layers for parameter in layer.parameters()}
    compute, reduce = precision.compute or torch.float32, precision.reduce or precision.compute or torch.float32
    size = dist.get_world_size()
    shards = []
    for unit in units:
        owned = [parameter for parameter in unit.parameters() if unit is not model or id(parameter) not in inner]
        shards.append(-(-sum(parameter.numel() for parameter in owned) // size))
    model.to(compute)
    gathered = torch.zeros(max(shards) * size, dtype=compute, device=device)
    packed = torch.zeros(max(shards) * size, dtype=reduce, device=device)
    weights = [torch.zeros(numel, dtype=compute, device=device) for numel in shards]
    main = nn.Parameter(torch.zeros(sum(shards), device=device))
    main.grad = torch.zeros_like(main)
    reduced = [torch.zeros(numel, dtype=reduce, device=device) for numel in shards]
    optimizer = torch.optim.AdamW([main], lr=LEARNING_RATE, fused=True)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def step(tokens: torch.Tensor) -> None:
        for weight in (*weights, *weights[:-2]):
            gather(gathered[: weight.numel() * size], weight)
        model(tokens).backward()
        model.zero_grad()
        for output in reduced:
            scatter(output, packed[: output.numel() * size])
        optimizer.step()

    return step


TRAINERS: Mapping[str, Callable[[Shape, Precision, str], Step]] = {
    "ours": train_ours,
    "ours, flat AdamW": train_ours_flat,
    "FSDP2": train_fsdp2,
    "DDP": train_ddp,
    "bare": bare,
}
