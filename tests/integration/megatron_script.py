"""A training script like Megatron-LM's pretrain_gpt.py: megatron.training reads flags, sets up, steps, saves and loads.

The test of a checkout starts it through the launcher, and plain for Megatron's DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel as megatron_FSDP
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.checkpointing import save_checkpoint
from megatron.training.initialize import initialize_megatron
from megatron.training.training import setup_model_and_optimizer, train_step
from megatron.training.utils import calc_params_l2_norm

from tests.integration.cuda_double import cuda_double
from tests.integration.megatron_training import finalize_model_grads

LENGTH, VOCABULARY, NUM_MICROBATCHES = 16, 64, 2


def add_own_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add where the figures go, and how many steps this run takes."""
    parser.add_argument("--result", required=True)
    parser.add_argument("--steps", type=int, required=True)
    return parser


def model_provider(
    *, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any
) -> GPTModel:
    """Return the model that the flags describe."""
    args = get_args()
    config = core_transformer_config_from_args(args)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    return GPTModel(
        config,
        spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
    )


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


def endless(first: int) -> Iterator[torch.Tensor]:
    """Yield microbatches of the steps from ``first`` on."""
    step = first
    while True:
        yield from batches(step)
        step += 1


def run() -> dict[str, Any]:
    """Train as ``megatron.training.pretrain`` does; return losses, norms, and the model's class."""
    args = get_args()
    model, optimizer, scheduler = setup_model_and_optimizer(ModelType.encoder_or_decoder, model_provider)
    config: TransformerConfig = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if isinstance(model[0], megatron_FSDP) and args.overlap_grad_reduce:
        is_one = len(model) == 1
        config.no_sync_func = model[0].no_sync if is_one else [chunk.no_sync for chunk in model]
        config.param_sync_func = model[0].start_param_sync if is_one else [chunk.start_param_sync for chunk in model]
    iterators = [RerunDataIterator(endless(args.iteration)) for _ in model]
    data, first = iterators if len(model) > 1 else iterators[0], args.iteration
    figures = []
    for iteration in range(first, first + args.steps):
        losses, _, _, _, _, norm, zeros, *_ = train_step(
            forward_step, data, model, optimizer, scheduler, config, get_forward_backward_func(), iteration=iteration
        )
        # Other pipeline stages have none.
        found = [losses["loss"].item(), 1.0] if losses else [0.0, 0.0]
        total = torch.tensor(found, dtype=torch.float64)
        dist.all_reduce(total)
        figures.append(((total[0] / total[1]).item(), norm, zeros))
    if args.save:
        save_checkpoint(first + args.steps, model, optimizer, scheduler, 0)
    return {
        "figures": figures,
        "weights": calc_params_l2_norm(model),
        "classes": [cls.__module__ for cls in type(model[0]).__mro__[1:3]],
        "inner": type(unwrap_model(model)[0]).__name__,
        "first": first,
    }


def main() -> None:
    """Run on CPU tensors and write the figures."""
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    # No data set is read, so none of their C++ is compiled.
    with cuda_double(), mock.patch("megatron.core.datasets.utils.compile_helpers"):
        # Some flags depend on the generation of the GPU.
        generation = SimpleNamespace(major=9, minor=0)
        with mock.patch("torch.cuda.get_device_properties", return_value=generation):
            parse_and_validate_args(extra_args_provider=add_own_flags)
        initialize_megatron(allow_no_cuda=True)
        found = run()
    if dist.get_rank() == 0:
        with open(get_args().result, "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
