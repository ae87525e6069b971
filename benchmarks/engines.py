"""The engines that benches compare: each makes a sharded model of a plain one, by its public interface alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import megatron_fsdp
from benchmarks.torch_engines import Precision, Shard, fsdp2, plain, world_mesh

__all__ = ["ENGINES", "Precision", "fsdp2", "ours", "plain", "world_mesh"]


def ours(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, precision: Precision) -> nn.Module:
    """Shard every unit and the rest by this project, which prefetches by itself."""
    policy = megatron_fsdp.MixedPrecisionPolicy(
        precision.compute,
        precision.reduce,
        cast_forward_inputs=False,
        main_grads_dtype=precision.main_grads,
        split_main_params=precision.is_split,
        fuse_weight_gradients=precision.fuses,
    )
    for module in (*units, model):
        megatron_fsdp.fully_shard(module, mesh, mp_policy=policy)
    return model


ENGINES: dict[str, Shard] = {"plain": plain, "ours": ours, "FSDP2": fsdp2}
