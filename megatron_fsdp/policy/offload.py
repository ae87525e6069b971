"""Offload: what rests in CPU memory while the GPU computes; the policies are PyTorch's."""

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
    """Warn where parameters in CPU memory have a mesh of GPUs and no backend that communicates CPU tensors."""
    if mesh.device_type != "cpu" and cannot_send_cpu_tensors(mesh_axes(mesh)[0].gather_group):
        warnings.warn(
            "offload_policy=CPUOffloadPolicy() in a job without a backend for CPU tensors: training works, but "
            "torch.nn.utils.clip_grad_norm_, GradScaler, full_tensor() and full_state_dict of offloaded parameters "
            "will raise 'No backend type associated with device type cpu'. fix: "
            'torch.distributed.init_process_group("cpu:gloo,cuda:nccl")',
            stacklevel=3,
        )


def offload_of(policy: Any, placements: Placements) -> CPUOffloadPolicy | None:
    """Return the policy where it asks for main weights, gradients and the optimizer's step in CPU memory; else None.

    A unit's shard is copied to the device and cast there just before the gather, and its reduced gradient back just
    after the reduction, both on the lanes of those collectives.

    Raises:
        ConfigError: it is none, or weights or gradients rest whole on every rank, where compute needs them.
    """
    if policy is None or type(policy) is OffloadPolicy:
        return None
    if not isinstance(policy, CPUOffloadPolicy):
        raise ConfigError(f"offload_policy is {policy!r}; give OffloadPolicy() or CPUOffloadPolicy()")
    if Flat() not in placements.parameter or Flat() not in placements.gradient:
        raise ConfigError(
            f"offload_policy={policy!r} with {placements}: what rests whole on every rank is used where it rests and "
            "cannot be offloaded. fix: fully_shard in place of replicate, with Placements.optim_grads_params() (the "
            "default), hsdp() or hfsdp(); or leave out offload_policy."
        )
    return policy
