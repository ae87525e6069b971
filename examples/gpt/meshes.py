"""The ranks of a job by what they share: replicas, shards, experts, and parts of one layer."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp import ConfigError, DataParallelMeshDims

__all__ = ["Meshes", "build_mesh", "data_parallel_size"]


def data_parallel_size(args: argparse.Namespace, num_ranks: int) -> int:
    """Return how many ranks have data of their own: those of one tensor-parallel group have the same.

    Raises:
        ConfigError: sizes that do not divide the ranks.
    """
    tensor, expert = args.tensor_model_parallel_size, args.expert_model_parallel_size
    instances = args.num_distributed_optimizer_instances
    for flag, size, whole in (
        ("--tensor-model-parallel-size", tensor, num_ranks),
        ("--num-distributed-optimizer-instances", instances, num_ranks // tensor),
        ("--expert-model-parallel-size", expert, num_ranks // tensor // instances),
    ):
        if whole % size:
            raise ConfigError(
                f"{flag} {size} does not divide {whole}: {num_ranks} ranks (torchrun --nproc-per-node x --nnodes), "
                f"--tensor-model-parallel-size {tensor}, --num-distributed-optimizer-instances {instances}"
            )
    return num_ranks // int(tensor)


def build_mesh(args: argparse.Namespace, num_ranks: int, device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks.

    Its axes, outermost first: "dp" or, with ``--num-distributed-optimizer-instances`` > 1, "dp_outer" and "dp_inner";
    the innermost of these is two, "edp" and "ep", with ``--expert-model-parallel-size`` > 1; and "tp" with
    ``--tensor-model-parallel-size`` > 1. That is Megatron's order tp-ep-dp: neighbours share a layer.

    Raises:
        ConfigError: sizes that do not divide the ranks.
    """
    size = data_parallel_size(args, num_ranks)
    instances, expert, tensor = (
        args.num_distributed_optimizer_instances,
        args.expert_model_parallel_size,
        args.tensor_model_parallel_size,
    )
    axes = [("dp_outer", instances)] if instances > 1 else []
    inner = size // instances
    if expert > 1:
        axes += [("edp", inner // expert), ("ep", expert)]
    else:
        axes.append(("dp_inner" if instances > 1 else "dp", inner))
    if tensor > 1:
        axes.append(("tp", tensor))
    return init_device_mesh(
        device.type, tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes)
    )


@dataclass(frozen=True, slots=True)
class Meshes:
    """Parts of the mesh of ``build_mesh``.

    Attributes:
        dense: arguments of ``fully_shard`` that say where weights are sharded that all data-parallel ranks have.
        shards: a mesh with as many axes as that has.
        experts: over which those of an expert are sharded; None where that is the same.
        num_expert_ranks: how many ranks have other experts.
        tensor: the tensor-parallel axis, None for none. within: of the axes that divide experts, "ep", "tp" or both.
    """

    dense: dict[str, Any]
    shards: DeviceMesh
    experts: DeviceMesh | None
    num_expert_ranks: int
    tensor: DeviceMesh | None
    within: DeviceMesh | None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Meshes:
        """Return the parts of a mesh, which are the same objects for all units of a model."""
        names = mesh.mesh_dim_names or ()
        tensor = mesh["tp"] if "tp" in names else None
        within = tuple(name for name in names if name in ("ep", "tp"))
        data = tuple(name for name in names if name not in within)
        shards = mesh[data] if len(data) < len(names) else mesh
        if "ep" not in names:
            return cls({"mesh": shards}, shards, None, 1, tensor, mesh[within] if within else None)
        outer = "dp_outer" if "dp_outer" in names else None
        dims = DataParallelMeshDims(replicate=outer, shard=("edp", "ep"))
        return cls({"mesh": mesh, "dp_mesh_dims": dims}, shards, shards, mesh["ep"].size(), tensor, mesh[within])
