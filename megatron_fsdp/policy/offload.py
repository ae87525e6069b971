"""Offload: what rests in CPU memory while the GPU computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dbuffer import Flat
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.policy.strategy import Placements

__all__ = ["CPUOffloadPolicy", "OffloadPolicy", "offload_of"]


@dataclass(frozen=True)
class OffloadPolicy:
    """No offload. The base of what ``fully_shard(offload_policy=...)`` takes.

    Example:
        for block in model.blocks:
            fully_shard(block, offload_policy=OffloadPolicy())
        fully_shard(model)
    """


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Main weights, gradients and with them the optimizer step live in CPU memory.

    A unit's shard is copied to the device and cast there just before the gather, and its reduced gradient back just
    after the reduction, both on the lanes of those collectives.

    Args:
        pin_memory: use page-locked memory, which copies run beside compute need; it is not swapped out.

    Example:
        for block in model.blocks:
            fully_shard(block, offload_policy=CPUOffloadPolicy())
        fully_shard(model, offload_policy=CPUOffloadPolicy())
    """

    pin_memory: bool = True


def offload_of(policy: Any, placements: Placements) -> CPUOffloadPolicy | None:
    """Return what an offload policy, ours, PyTorch's or None, asks for; None for nothing.

    Raises:
        ConfigError: it is something else, or weights or gradients rest whole on every rank, where compute needs them.
    """
    if policy is None or type(policy).__name__ == "OffloadPolicy":
        return None
    if not hasattr(policy, "pin_memory"):
        raise ConfigError(
            f"offload_policy is {policy!r}; give OffloadPolicy() or CPUOffloadPolicy(), ours or "
            "torch.distributed.fsdp's"
        )
    if Flat() not in placements.parameter or Flat() not in placements.gradient:
        raise ConfigError(
            f"offload_policy={policy!r} with {placements}: what rests whole on every rank is used where it rests and "
            "cannot be offloaded; use Placements.optim_grads_params(), hsdp() or hfsdp()"
        )
    return CPUOffloadPolicy(bool(policy.pin_memory))
