"""torchtitan's ``parallelize_fn``, over this engine: its decoders, data-parallel in one or two dimensions."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from megatron_fsdp.api import fully_shard
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.policy.offload import CPUOffloadPolicy
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.runtime.lifecycle.module import FSDPModule

__all__ = ["parallelize_decoder"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def parallelize_decoder(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """Shard one of torchtitan's decoders in place; give it as ``ModelSpec(parallelize_fn=parallelize_decoder)``.

    The units are torchtitan's own: the token embedding, each layer, the norm with the output; a tied embedding joins
    the latter. Gradients are summed over ranks, since the training loop divides by its count of tokens.

    Args:
        model: a ``Decoder``, usually on the meta device.
        parallel_dims, training, parallelism, compile_config, ac_config, dump_folder: as torchtitan hands them over.
    Raises:
        ConfigError: tensor, context, pipeline or expert parallelism, symmetric memory, or a backend other than
            "partial_dtensor".
    """
    _refuse(parallel_dims, parallelism)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        compiler = importlib.import_module("torchtitan.distributed.compile")
        compiler.apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    options: dict[str, Any] = {
        "mesh": parallel_dims.get_mesh(axes),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_DTYPES[training.mixed_precision_param],
            reduce_dtype=_DTYPES[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
    }
    if training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    _shard(model, options, parallelism.fsdp_reshard_after_forward)
    return model


def _shard(model: Any, options: dict[str, Any], resharding: str) -> None:
    tail = [module for module in (model.norm, model.lm_head) if module is not None]
    embedding = [model.tok_embeddings] if model.tok_embeddings is not None else []
    if model.enable_weight_tying:
        embedding, tail = [], [*embedding, *tail]
    # The layers are needed again last, the tail first; "always" and "never" are the user's word on all of them.
    for units, reshards in (
        ([[module] for module in [*embedding, *model.layers.values()]], resharding != "never"),
        ([tail] if tail else [], resharding == "always"),
    ):
        for modules in units:
            fully_shard(modules, **options, reshard_after_forward=reshards)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def _refuse(dims: Any, parallelism: Any) -> None:
    found = {
        "tensor_parallel_degree": dims.tp,
        "context_parallel_degree": dims.cp,
        "pipeline_parallel_degree": dims.pp,
        "expert_parallel_degree": dims.ep,
    }
    for name, degree in found.items():
        if degree > 1:
            raise ConfigError(f"parallelism.{name} is {degree}: sharding is over data-parallel ranks only, wanted 1")
    if parallelism.spmd_backend != "partial_dtensor":
        raise ConfigError(f"parallelism.spmd_backend is {parallelism.spmd_backend!r}; give 'partial_dtensor'")
    if parallelism.enable_fsdp_symm_mem:
        raise ConfigError("parallelism.enable_fsdp_symm_mem: gathered weights cannot be symmetric memory; leave it off")
