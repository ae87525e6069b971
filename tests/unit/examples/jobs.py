"""The training script's job on a rank of the harness, without its process group, folder and log."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import pretrain_gpt
from gpt.arguments import parse_arguments
from gpt.checkpoint import TrainingState
from gpt.indexed import load_data
from gpt.job import Job, build_job
from gpt.launch import Ranks
from gpt.parallel import unwrapped

__all__ = ["TINY", "make_job", "steps", "train_steps", "whole_weights"]

TINY = (
    "--num-layers 2 --hidden-size 12 --num-attention-heads 2 --seq-length 9 --train-iters 6 --lr 0.01 "
    "--distributed-backend gloo"
)


def make_job(flags: str) -> Job:
    """Return the job of a command line on this rank; ``--data-path`` must be absolute, as ranks start in any folder."""
    ranks = Ranks(dist.get_rank(), dist.get_rank(), dist.get_world_size())
    args = parse_arguments([*TINY.split(), *flags.split()], num_ranks=ranks.size)
    log: Any = SimpleNamespace(message=print)
    return build_job(args, ranks, torch.device("cpu"), load_data(args), log)


def whole_weights(job: Job) -> dict[str, torch.Tensor]:
    """Return copies of all weights, gathered."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in unwrapped(job.model).named_parameters()
    }


def steps(job: Job, state: TrainingState, count: int) -> tuple[list[float], TrainingState]:
    """Return the loss and the gradient norm of each step, one after the other, and the state after them."""
    numbers: list[float] = []
    for _ in range(count):
        result = pretrain_gpt.train_step(job, state)
        numbers += [result.loss.item(), result.grad_norm.item()]
        state = state.after_step(job.args.global_batch_size)
    return numbers, state


def train_steps(flags: str, num_steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the loss and the gradient norm of each step, one after the other, and the weights at the end."""
    job = make_job(flags)
    return steps(job, TrainingState(), num_steps)[0], whole_weights(job)
