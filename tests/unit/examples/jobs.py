"""The training script's job on a rank of the harness, without its process group, folder and log."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import pretrain_gpt
from gpt.arguments import parse_arguments
from gpt.checkpoint import TrainingState
from gpt.large_gradients import LargeGradients
from gpt.launch import Ranks
from gpt.meshes import build_mesh
from gpt.model_config import GptConfig
from gpt.optimizer import build_optimizer
from gpt.parallel import build_model, unwrapped
from gpt.tokenizer import build_tokenizer
from gpt.training_data import load_data
from megatron_fsdp import fully_shard_optimizer

__all__ = ["TINY", "make_job", "train_steps", "whole_weights"]

TINY = (
    "--num-layers 2 --hidden-size 12 --num-attention-heads 2 --seq-length 9 --train-iters 6 --lr 0.01 "
    "--distributed-backend gloo"
)


def make_job(flags: str) -> pretrain_gpt.Job:
    """Return the job of a command line on this rank; ``--data-path`` is absolute, for ranks start anywhere."""
    ranks = Ranks(dist.get_rank(), dist.get_rank(), dist.get_world_size())
    args = parse_arguments([*TINY.split(), *flags.split()], num_ranks=ranks.size)
    device, config = torch.device("cpu"), GptConfig.from_args(args)
    model = build_model(config, args, build_mesh(args, ranks.size, device), device)
    optimizer = build_optimizer(model, args)
    if args.use_megatron_fsdp:
        optimizer = fully_shard_optimizer(optimizer)
    log: Any = SimpleNamespace(message=print)
    tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    return pretrain_gpt.Job(
        args, ranks, device, load_data(args), tokenizer, config, model, optimizer, log, LargeGradients(args)
    )


def whole_weights(job: pretrain_gpt.Job) -> dict[str, torch.Tensor]:
    """Return copies of all weights, gathered."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in unwrapped(job.model).named_parameters()
    }


def train_steps(flags: str, num_steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the loss and the gradient norm of each step, one after the other, and the weights at the end."""
    job = make_job(flags)
    state = TrainingState()
    numbers: list[float] = []
    for _ in range(num_steps):
        result = pretrain_gpt.train_step(job, state)
        numbers += [result.loss.item(), result.grad_norm.item()]
        state = state.after_step(job.args.global_batch_size)
    return numbers, whole_weights(job)
