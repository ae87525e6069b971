"""Names that tests use from megatron.core, and its process groups inside the stand-in for CUDA."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from tests.integration.cuda_double import cuda_double

# megatron.core warns at import about missing faster packages.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing, distributed, parallel_state, tensor_parallel
    from megatron.core import optimizer as optimizers
    from megatron.core.datasets import indexed_dataset
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel as MegatronBase
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "DistributedDataParallel", "DistributedDataParallelConfig", "DistributedOptimizer", "Float16Module", "GPTModel",
    "MegatronBase", "OptimizerConfig", "ProcessGroupCollection", "TransformerConfig", "dist_checkpointing",
    "distributed", "finalize_model_grads", "get_forward_backward_func", "get_gpt_layer_local_spec",
    "get_megatron_optimizer", "indexed_dataset", "layers", "megatron_processes", "optimizers", "parallel_state",
    "tensor_parallel", "torch_norm",
]  # fmt: skip


@contextmanager
def megatron_processes(**options: Any) -> Iterator[None]:
    """Set up Megatron's process groups, data-parallel over all ranks, inside the stand-in for CUDA.

    Args:
        options: of ``initialize_model_parallel``.
    """
    # The stand-in's two random number generators are one, which megatron.core notices at each fork.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    with cuda_double(), warnings.catch_warnings():
        # megatron.core warns about its own defaults and about missing packages.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        # megatron.core calls functions by names that PyTorch has renamed.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        others = set(_world.pg_map)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **options)
        groups = [group for group in _world.pg_map if group not in others]
        try:
            yield
        finally:
            # This forgets the groups, but does not destroy them. Each gloo group has a thread.
            parallel_state.destroy_model_parallel()
            for group in groups:
                dist.destroy_process_group(group)
