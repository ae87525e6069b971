"""What a run works with: built once, before the first step."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gpt.arguments import flags_without_engine
from gpt.data import TrainingData
from gpt.large_gradients import LargeGradients
from gpt.launch import Ranks, precision_line, select_device, start_process_group
from gpt.meshes import build_mesh
from gpt.model_config import GptConfig
from gpt.optimizer import build_optimizer, write_parameter_groups
from gpt.parallel import build_model, unwrapped
from gpt.tokenizer import Tokenizer, build_tokenizer
from gpt.train_log import TrainLog
from gpt.training_data import load_data
from megatron_fsdp import FsdpConfig, explain, fully_shard_optimizer
from megatron_fsdp.checkpoint.async_save import finish_pending_save

DEFAULT_FOLDER = Path("runs/gpt")


@dataclass(frozen=True, slots=True)
class Job:
    """What stays the same from the first step to the last."""

    args: argparse.Namespace
    ranks: Ranks
    device: torch.device
    data: TrainingData
    tokenizer: Tokenizer
    config: GptConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    log: TrainLog
    large_gradients: LargeGradients

    @property
    def masked_token(self) -> int | None:
        """The token after which nothing is predicted, with ``--eod-mask-loss``."""
        return self.tokenizer.end_of_document if self.args.eod_mask_loss else None


@contextlib.contextmanager
def started(args: argparse.Namespace, ranks: Ranks) -> Iterator[Job]:
    """Join the other ranks and yield the job: text, model in units, optimizer and log."""
    device = select_device(args.distributed_backend, ranks)
    data = load_data(args)
    tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    if args.num_tokens_to_generate:
        tokenizer.encode(args.prompt)  # refused now rather than after the last step
    unit = "byte" if args.tokenizer_type == "ByteTokenizer" else "token"
    log = TrainLog(args.save or DEFAULT_FOLDER, is_main=ranks.is_main, train_iters=args.train_iters, unit=unit)
    if args.tensorboard_dir is not None:
        log.open_tensorboard(args.tensorboard_dir)
    start_process_group(args, ranks, device)
    config = GptConfig.from_args(args)
    model = build_model(config, args, build_mesh(args, ranks.size, device), device)
    optimizer = build_optimizer(model, args)
    if args.use_megatron_fsdp:
        optimizer = fully_shard_optimizer(optimizer)
    if args.dump_param_to_param_group_map is not None and ranks.is_main:
        write_parameter_groups(unwrapped(model), optimizer, Path(args.dump_param_to_param_group_map))
    job = Job(args, ranks, device, data, tokenizer, config, model, optimizer, log, LargeGradients(args))
    describe(job)
    try:
        yield job
    finally:
        log.end()
    # Not after an error: the other ranks may be gone, and both wait for them.
    finish_pending_save()
    dist.destroy_process_group()


def describe(job: Job) -> None:
    """Print what is about to be trained, on what, and how it is sharded."""
    args, log = job.args, job.log
    num_parameters = sum(parameter.numel() for parameter in job.model.parameters())
    log.message(
        f"GPT with {num_parameters:,} parameters on {job.ranks.size} rank(s), {job.device.type}; "
        f"training text: {job.data.num_tokens:,} {log.unit}s from {job.data.source}"
    )
    if args.fake_process_group:
        log.message(f"one process stands for {job.ranks.size} ranks (--fake-process-group): losses mean nothing")
    log.message(precision_line(is_bf16=args.bf16, device=job.device))
    if args.use_megatron_fsdp:
        config = FsdpConfig.from_args(args)
        log.message("\n".join([config.explain(), *config.notices(), str(explain(job.model))]))
    elif idle := flags_without_engine(args):
        sharder = "PyTorch shards" if args.use_torch_fsdp2 else "nothing is sharded"
        log.message(f"without --use-megatron-fsdp {sharder}, and these do nothing: {', '.join(idle)}")
