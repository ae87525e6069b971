"""Offload: keep weights, gradients and optimizer state in CPU memory. The policy classes are PyTorch's."""

from __future__ import annotations

import warnings
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from dbuffer import Flat
from dbuffer.mesh import cannot_send_cpu_tensors, mesh_axes
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.policy.strategy import Placements

__all__ = ["CPUOffloadPolicy", "OffloadPolicy", "offload_of", "warn_without_gloo"]


def warn_without_gloo(mesh: DeviceMesh) -> None:
    """Warn if parameters are offloaded from a GPU mesh, but no backend communicates CPU tensors."""
    if mesh.device_type != "cpu" and cannot_send_cpu_tensors(mesh_axes(mesh)[0].gather_group):
        warnings.warn(
            "offload_policy=CPUOffloadPolicy() in a job without a backend for CPU tensors: training works, but "
            "torch.nn.utils.clip_grad_norm_, GradScaler, full_tensor() and full_state_dict of offloaded parameters "
            "will raise 'No backend type associated with device type cpu'. fix: "
            'torch.distributed.init_process_group("cpu:gloo,cuda:nccl")',
            stacklevel=3,
        )


def offload_of(policy: Any, placements: Placements) -> CPUOffloadPolicy | None:
    """Return ``policy`` if it offloads main weights, gradients and the optimizer step to the CPU; else None.

    A unit's shard is copied to the GPU and cast there just before its gather, and its reduced gradient is copied back
    just after the reduction; both copies run on the lanes of those collectives.

    Raises:
        ConfigError: ``policy`` is not an offload policy; or weights or gradients are not sharded at rest, so compute
            uses them where they are.
    """
    if policy is None or type(policy) is OffloadPolicy:
        return None
    if not isinstance(policy, CPUOffloadPolicy):
        raise ConfigError(f"offload_policy is {policy!r}. fix: give OffloadPolicy() or CPUOffloadPolicy()")
    if Flat() not in placements.parameter or Flat() not in placements.gradient:
        raise ConfigError(
            f"offload_policy={policy!r} with {placements}: what rests whole on every rank is used where it rests and "
            "cannot be offloaded. fix: fully_shard in place of replicate, with Placements.optim_grads_params() (the "
            "default), hsdp() or hfsdp(); or leave out offload_policy."
        )
    return policy
