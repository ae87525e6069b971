"""A model whose experts are sharded over fewer ranks than its other weights, and ways to shard it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp import DataParallelMeshDims, Placements, fully_shard
from tests.harness.models import WIDTH, Block, Stack

__all__ = ["ROWS", "ExpertLayer", "build", "rows", "shard_experts"]

ROWS = 4
"""Rows of one rank's data; each expert takes an equal part of them."""


class ExpertLayer(nn.Module):
    """An expert layer: row i of a rank's data belongs to expert i modulo their number; an all-to-all sends it there."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.expert = Block(hidden=5)
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num_experts = self._group.size()
        sent = x.view(-1, num_experts, WIDTH).transpose(0, 1).contiguous()
        done = self.expert(all_to_all_single_autograd(sent, None, None, self._group))
        return all_to_all_single_autograd(done.contiguous(), None, None, self._group).transpose(0, 1).reshape(x.shape)


def rows(rank: int, step: int = 0) -> torch.Tensor:
    """Draw one rank's data, (ROWS, WIDTH)."""
    generator = torch.Generator().manual_seed(7 + 1000 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator)


def build(group: dist.ProcessGroup) -> Any:
    """Build a model with dense layers around an expert layer; each rank of the group has a different expert."""
    torch.manual_seed(3)
    first, last = Block(), Block(hidden=3)
    torch.manual_seed(100 + group.rank())
    return Stack(first, ExpertLayer(group), last)


def shard_experts(num_experts: int, strategy: str = "optim_grads_params", **options: Any) -> tuple[Any, DeviceMesh]:
    """Return the model with dense weights sharded over all ranks and each expert over its ranks, and the mesh.

    Args:
        num_experts: divides the ranks.
        options: of the experts' units; ``grad_divisor`` makes up for the ranks that have other experts.
    """
    shape = (dist.get_world_size() // num_experts, num_experts)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("edp", "ep"))
    model = build(mesh.get_group("ep"))
    first, experts, last = model.layers
    placements = getattr(Placements, strategy)(0)
    fully_shard(experts.expert, mesh["edp"], placements, **{"grad_divisor": num_experts, **options})
    for dense in (first, last, model):
        fully_shard(dense, mesh, placements, dp_mesh_dims=DataParallelMeshDims(shard=("edp", "ep")))
    return model, mesh
