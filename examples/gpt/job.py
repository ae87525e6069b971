"""Build the objects of a run before the first step: model, optimizer, data and log."""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile, schedule

from gpt.arguments import flags_without_engine, idle_flags
from gpt.data import Tokenizer, TrainingData, build_tokenizer
from gpt.indexed import load_data
from gpt.launch import Ranks, select_device, start_process_group
from gpt.model import GptConfig
from gpt.optimizer import build_optimizer, write_parameter_groups
from gpt.parallel import build_model, unwrapped
from gpt.throughput import peak_tflops
from gpt.trackers import open_trackers
from gpt.train_log import CAN_DRAW, NO_CHART, TrainLog
from megatron_fsdp import FsdpConfig, FSDPModule, Timeline, explain, fully_shard_optimizer
from megatron_fsdp.checkpoint.async_save import finish_pending_save

DEFAULT_FOLDER = Path("runs/gpt")


@dataclass(frozen=True, slots=True)
class Job:
    """The objects of a run; they do not change between steps."""

    args: argparse.Namespace
    ranks: Ranks
    device: torch.device
    data: TrainingData
    tokenizer: Tokenizer
    config: GptConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    log: TrainLog

    @property
    def masked_token(self) -> int | None:
        """The token after which nothing is predicted, with ``--eod-mask-loss``."""
        return self.tokenizer.end_of_document if self.args.eod_mask_loss else None


@contextlib.contextmanager
def started(args: argparse.Namespace, ranks: Ranks) -> Iterator[Job]:
    """Join the other ranks and yield the job: text, model in units, optimizer and log."""
    device = select_device(args.distributed_backend, ranks)
    data = load_data(args)
    unit = "byte" if args.tokenizer_model is None else "token"
    trackers = open_trackers(args, is_main=ranks.is_main)
    folder, is_main = args.save or DEFAULT_FOLDER, ranks.is_main
    log = TrainLog(folder, is_main=is_main, train_iters=args.train_iters, unit=unit, trackers=trackers)
    start_process_group(args, ranks, device)
    job = build_job(args, ranks, device, data, log)
    describe(job)
    yield job
    # Not after an error: the other ranks may be gone, and both wait for them.
    finish_pending_save()
    dist.destroy_process_group()


def build_job(args: argparse.Namespace, ranks: Ranks, device: torch.device, data: TrainingData, log: TrainLog) -> Job:
    """Build model and optimizer. The process group must be initialised."""
    config, tokenizer = GptConfig.from_args(args), build_tokenizer(args.tokenizer_model)
    model = build_model(config, args, device)
    optimizer = build_optimizer(model, args)
    if args.use_megatron_fsdp:
        optimizer = fully_shard_optimizer(optimizer)
    if args.dump_param_to_param_group_map is not None and ranks.is_main:
        write_parameter_groups(unwrapped(model), optimizer, Path(args.dump_param_to_param_group_map))
    return Job(args, ranks, device, data, tokenizer, config, model, optimizer, log)


def describe(job: Job) -> None:
    """Print the model, the data, the device and the sharding."""
    args, log = job.args, job.log
    num_parameters = sum(parameter.numel() for parameter in job.model.parameters())
    log.message(
        f"GPT with {num_parameters:,} parameters on {job.ranks.size} rank(s), {job.device.type}, "
        f"{'bf16' if args.bf16 else 'fp32'}; training text: {job.data.num_tokens:,} {log.unit}s from {job.data.source}"
    )
    if not CAN_DRAW:
        log.message(NO_CHART)
    if args.log_throughput and peak_tflops(job.device) is None:
        log.message("--log-throughput logs TFLOP/s without MFU: the peak of this device is not known")
    for line in idle_flags(args):
        log.message(line)
    if args.fake_process_group:
        log.message(f"one process stands for {job.ranks.size} ranks (--fake-process-group): losses mean nothing")
    if args.use_megatron_fsdp:
        config = FsdpConfig.from_args(args)
        log.message("\n".join([config.explain(), *config.notices(), str(explain(job.model))]))
    elif idle := flags_without_engine(args):
        sharder = "PyTorch shards" if args.use_torch_fsdp2 else "nothing is sharded"
        log.message(f"without --use-megatron-fsdp {sharder}, and these do nothing: {', '.join(idle)}")


@contextlib.contextmanager
def profiled(job: Job, iteration: int) -> Iterator[Callable[[], None]]:
    """Profile a run that resumes after ``iteration``; yield a function to call after each step.

    Records the steps from ``--profile-step-start`` to ``--profile-step-end`` (exclusive) on the main rank, in a file
    such as ``trace_rank0_steps10-11.json``. If the model is sharded, logs the share of exposed communication.
    """
    args, wait = job.args, job.args.profile_step_start - 1 - iteration
    if args.profile and not iteration < args.profile_step_start <= args.train_iters:
        job.log.message(
            f"--profile records nothing: this run trains iterations {iteration + 1} to {args.train_iters}, without "
            f"--profile-step-start {args.profile_step_start}"
        )
    if not (args.profile and job.ranks.is_main and wait >= 0):
        yield lambda: None
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no warm-up: the steps before are one
        steps = schedule(wait=wait, warmup=0, active=args.profile_step_end - args.profile_step_start, repeat=1)
    with profile(schedule=steps, on_trace_ready=lambda recorded: _write(job, recorded), acc_events=True) as profiler:
        yield profiler.step


def _write(job: Job, recorded: profile) -> None:
    folder = job.args.save or DEFAULT_FOLDER
    name = f"rank0_steps{job.args.profile_step_start}-{job.args.profile_step_end - 1}"
    trace = folder / f"trace_{name}.json"
    recorded.export_chrome_trace(str(trace))
    headline = str(Timeline.read(trace)).partition("\n")[0] if isinstance(job.model, FSDPModule) else ""
    job.log.message(f" wrote the trace {trace}" + (f": {headline}" if headline else ""))
