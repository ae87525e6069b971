"""The engines that benches compare: each makes a sharded model of a plain one, by its public interface alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import megatron_fsdp

__all__ = ["ENGINES", "Precision", "fsdp2", "ours", "plain", "world_mesh"]


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a run.

    Attributes:
        compute: of the gathered weights; None for that of the model (FP32).
        reduce: of gradients on the wire; None for that of ``compute``.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None


Shard = Callable[[nn.Module, Sequence[nn.Module], DeviceMesh, Precision], nn.Module]


def world_mesh(device_type: str = "cpu") -> DeviceMesh:
    """Return the mesh of one axis over all ranks."""
    return init_device_mesh(device_type, (dist.get_world_size(),))


def plain(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, precision: Precision) -> nn.Module:
    """Leave the model unsharded, in the compute dtype."""
    return model if precision.compute is None else model.to(precision.compute)


def ours(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, precision: Precision) -> nn.Module:
    """Shard every unit and the rest by this project, which prefetches by itself."""
    policy = megatron_fsdp.MixedPrecisionPolicy(precision.compute, precision.reduce, cast_forward_inputs=False)
    for module in (*units, model):
        megatron_fsdp.fully_shard(module, mesh, mp_policy=policy)
    return model


def fsdp2(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, precision: Precision) -> nn.Module:
    """Shard every unit and the rest by torch.distributed.fsdp, with asynchronous prefetch of a unit ahead."""
    policy = fsdp.MixedPrecisionPolicy(precision.compute, precision.reduce, cast_forward_inputs=False)
    for module in (*units, model):
        fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
    sharded: list[Any] = list(units)
    for before, after in itertools.pairwise(sharded):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    if mesh.device_type == "cpu":
        # Without it a gather is over when it is issued, and nothing overlaps; CUDA has streams for that.
        root: Any = model
        root._set_unshard_async_op(True)
    return model


ENGINES: dict[str, Shard] = {"plain": plain, "ours": ours, "FSDP2": fsdp2}
