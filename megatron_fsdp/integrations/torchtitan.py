"""torchtitan's ``parallelize_fn``, over this engine: its decoders, data-parallel in one or two dimensions."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from megatron_fsdp.api import fully_shard
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.lifecycle.module import FSDPModule
from megatron_fsdp.policy.offload import CPUOffloadPolicy
from megatron_fsdp.policy.precision import MixedPrecisionPolicy

__all__ = ["parallelize_decoder"]


def parallelize_decoder(
    model: Any, *, parallel_dims: Any, training: Any, parallelism: Any, compile_config: Any, ac_config: Any, **rest: Any
) -> Any:
    """Shard one of torchtitan's decoders in place; give it as ``ModelSpec(parallelize_fn=parallelize_decoder)``.

    The units are torchtitan's own. Gradients are summed over ranks, since the loop divides by its count of tokens.

    Raises:
        ConfigError: other parallelism than data parallelism, symmetric memory, or another ``spmd_backend``.
    """
    degrees = {name: getattr(parallel_dims, name) for name in ("tp", "cp", "pp", "ep")}
    backend, is_symmetric = parallelism.spmd_backend, parallelism.enable_fsdp_symm_mem
    if max(degrees.values()) > 1 or backend != "partial_dtensor" or is_symmetric:
        raise ConfigError(
            f"parallelism: found degrees {degrees}, spmd_backend {backend!r}, enable_fsdp_symm_mem {is_symmetric}. "
            "fix: degrees of 1 (only data-parallel ranks share weights), 'partial_dtensor', no symmetric memory"
        )
    if ac_config is not None:
        ac_config.build(dump_folder=rest["dump_folder"]).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        compiler = importlib.import_module("torchtitan.distributed.compile")
        compiler.apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    dtypes = [getattr(torch, name) for name in (training.mixed_precision_param, training.mixed_precision_reduce)]
    options: dict[str, Any] = {
        "mesh": parallel_dims.get_mesh(["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]),
        "mp_policy": MixedPrecisionPolicy(dtypes[0], dtypes[1], cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy() if training.enable_cpu_offload else None,
    }
    parts = [model.tok_embeddings], [model.norm, model.lm_head]
    first, tail = ([each for each in some if each is not None] for some in parts)
    if model.enable_weight_tying:
        first, tail = [], [*first, *tail]
    # The layers are needed again last, the tail first; "always" and "never" are the user's word on all of them.
    resharding = parallelism.fsdp_reshard_after_forward
    for module in (*first, *model.layers.values()):
        fully_shard(module, **options, reshard_after_forward=resharding != "never")
    for modules in [tail] if tail else []:
        fully_shard(modules, **options, reshard_after_forward=resharding == "always")
    for module in fully_shard(model, **options).modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return model
