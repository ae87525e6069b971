"""Offload: what rests in CPU memory while the GPU computes; the policies are PyTorch's."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from dbuffer import Flat
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.policy.strategy import Placements

__all__ = ["CPUOffloadPolicy", "OffloadPolicy", "offload_of"]


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
