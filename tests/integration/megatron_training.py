"""Train a small GPTModel as Megatron-LM's training loop does, under its own DistributedDataParallel or this engine."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp.integrations.megatron import adapter as mcore_adapter
from tests.integration.cuda_double import cuda_double

# It says at import which faster packages are missing.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing as dist_checkpointing
    from megatron.core import distributed, parallel_state, tensor_parallel
    from megatron.core import optimizer as optimizers
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as DistributedOptimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection as ProcessGroupCollection
    from megatron.core.tensor_parallel import layers as layers
    from megatron.core.transformer import torch_norm as torch_norm
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

MegatronBase = _BaseDataParallel
LENGTH, VOCABULARY, NUM_MICROBATCHES, NUM_EXPERTS = 16, 64, 2, 4
EXPERTS = {
    "num_moe_experts": NUM_EXPERTS,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "alltoall",
    # Their biases are added in place to what autograd forbids to change without a GPU's fused kernel.
    "add_bias_linear": False,
}


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        strategy: of this engine; None trains under Megatron's DistributedDataParallel.
        is_tied: whether the output layer shares the embedding's weight.
        positions: GPTModel's position_embedding_type.
        model: fields of TransformerConfig. ddp: of DistributedDataParallelConfig. optimizer: of OptimizerConfig.
        is_installed: whether Megatron's own names are called, which ``install`` has given to this engine.
    """

    strategy: str | None
    is_tied: bool = False
    positions: str = "learned_absolute"
    model: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    is_installed: bool = False


@contextmanager
def megatron_processes(**options: Any) -> Iterator[None]:
    """Set up Megatron's process groups, data-parallel over all ranks, inside the stand-in for CUDA.

    Args:
        options: of ``initialize_model_parallel``.
    """
    # The stand-in's two random number generators are one, which megatron.core notices at each fork.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    with cuda_double(), warnings.catch_warnings():
        # It warns of its own defaults, and of packages that are missing.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        # It calls functions by names that PyTorch has newer ones for.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **options)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def build_model(job: Job) -> tuple[TransformerConfig, Any]:
    """Return the config and the model; equal weights on all ranks and in all jobs of one model."""
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, hidden_dropout=0.0, **job.model
    )
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    # As Megatron does: layers that name no device of their own have no memory yet.
    with torch.device("meta") if config.init_model_with_meta_device else contextlib.nullcontext():
        model = GPTModel(
            config,
            spec,
            VOCABULARY,
            LENGTH,
            position_embedding_type=job.positions,
            share_embeddings_and_output_weights=job.is_tied,
        )
    return config, Float16Module(config, model) if config.bf16 else model


def build(job: Job) -> tuple[Any, Any]:
    """Return the wrapped model and its optimizer."""
    config, model = build_model(job)
    ddp = {"grad_reduce_in_fp32": True, "overlap_grad_reduce": True, **job.ddp}
    precise = {"bf16": config.bf16, "params_dtype": config.params_dtype}
    optimizer = OptimizerConfig(**{"lr": 1e-2, "log_num_zeros_in_grad": True, **precise, **job.optimizer})
    if job.strategy is None:
        wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(**ddp), model)
        return wrapped, get_megatron_optimizer(optimizer, [wrapped], use_gloo_process_groups=False)
    ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy=job.strategy, **ddp)
    if job.is_installed:
        wrap, get_optimizer = distributed.FullyShardedDataParallel, optimizers.get_megatron_optimizer
    else:
        wrap, get_optimizer = mcore_adapter.ShardedDataParallel, mcore_adapter.get_megatron_optimizer
    sharded = wrap(config, ddp_config, model)
    config.param_sync_func = sharded.start_param_sync
    return sharded, get_optimizer(optimizer, [sharded], use_gloo_process_groups=False)


def train(model: Any, optimizer: Any, steps: Sequence[int]) -> list[tuple[float, float, float]]:
    """Train with Megatron's schedule; return the loss over all ranks, the gradient norm and zeros of each step."""
    model.config.no_sync_func = model.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    figures = []
    for step in steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(step),
            model=[model],
            num_microbatches=NUM_MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        is_done, norm, zeros = optimizer.step()
        assert is_done
        loss = torch.stack([entry["loss"] for entry in losses]).mean()
        dist.all_reduce(loss)
        figures.append((loss.item() / dist.get_world_size(), norm, float(zeros or 0)))
    return figures


def batches(step: int) -> Iterator[torch.Tensor]:
    """Yield this rank's microbatches of a step: numbers in order, each sequence from another one on."""
    generator = torch.Generator().manual_seed(1000 * parallel_state.get_data_parallel_rank() + step)
    for _ in range(NUM_MICROBATCHES):
        first = torch.randint(0, VOCABULARY, (2, 1), generator=generator)
        yield (first + torch.arange(LENGTH)) % VOCABULARY


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """Run one microbatch, as pretrain_gpt.py's function of this name does."""
    tokens = next(data)
    positions = torch.arange(LENGTH)[None].expand(2, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    output = model(tokens, positions, mask, labels=(tokens + 1) % VOCABULARY)
    # Ranks count different numbers of tokens, which matters where losses are normalised by them.
    counted = (tokens > 5 * parallel_state.get_data_parallel_rank()).float()

    def loss_function(output: torch.Tensor) -> tuple[Any, ...]:
        total, number = (output.float() * counted).sum(), counted.sum()
        report = {"loss": (total / number).detach()}
        if model.config.calculate_per_token_loss:
            return total, number.int(), report
        return total / number, report

    return output, loss_function
