r"""Train a GPT with Megatron-LM's flags, its weights sharded over all ranks by megatron_fsdp.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --use-megatron-fsdp --num-layers 4 --hidden-size 192 \
        --num-attention-heads 6 --seq-length 128 --micro-batch-size 8 --global-batch-size 16 --train-iters 300 --lr 2e-3

One process without torchrun works too. Without --use-megatron-fsdp the model is replicated, to compare with. All flags:
--help, and docs/training_script.md. preprocess_data.py writes indexed data, generate_gpt.py uses what was saved.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dbuffer import DBufferError
from dbuffer.collectives import wait_for
from gpt.arguments import parse_arguments
from gpt.blend import DEFAULT_SPLIT, Samples, TrainingData, load_data
from gpt.checkpoint import TrainingState, check_tracker, checkpoints_in, differences, resume_folder
from gpt.data import DataError, rank_samples
from gpt.launch import Ranks, build_mesh, precision_line, report_error, select_device, start_process_group
from gpt.learning_rate import LearningRate
from gpt.model import GptModel, Recompute, next_token_loss
from gpt.model_config import GptConfig
from gpt.optimizer import build_optimizer, set_learning_rate
from gpt.parallel import accumulation, clip_gradients, parallelize, unwrapped, watched
from gpt.profiling import StepProfiler
from gpt.sample import Sampling, generate_tokens
from gpt.signals import StopSignal
from gpt.tokenizer import Tokenizer, build_tokenizer, tokenizer_flags
from gpt.train_log import Interval, IntervalMeans, IterationRecord, TrainLog, peak_memory_mib
from megatron_fsdp import FsdpConfig, FsdpError, NonfiniteGradientError, check_gradients, explain, fully_shard_optimizer
from megatron_fsdp.checkpoint_background import finish_pending_save

_DEFAULT_FOLDER = Path("runs/gpt")


class DivergedError(ArithmeticError):
    """The loss or the gradient norm is no longer a number."""


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


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's loss over all ranks and gradient norm before clipping, 0-d tensors, and its learning rate.

    Attributes:
        is_skipped: whether weights were left alone, because gradients had NaN or infinity in them.
    """

    loss: Tensor
    grad_norm: Tensor
    learning_rate: float
    is_skipped: bool


def pretrain(args: argparse.Namespace, ranks: Ranks) -> None:
    """Train from the start or from the latest checkpoint, save on the way, and show a sample; every rank calls it.

    SIGTERM to any rank, or the end of ``--exit-duration-in-mins``, ends the run after the step under way, with a
    checkpoint.
    """
    with (
        started(args, ranks) as job,
        StopSignal(args.exit_duration_in_mins) as stop,
        StepProfiler(args, ranks, args.save or _DEFAULT_FOLDER, job.log) as profiler,
        watched(job.model, args) as watch,
    ):
        state = resume(job)
        job.log.begin(state.iteration)
        interval = Interval(job.device, loss_sum=state.loss_sum, loss_count=state.loss_count)
        while state.iteration < args.train_iters:
            profiler.before_step(state.iteration + 1)
            result = train_step(job, state)
            state = state.after_step(args.global_batch_size)
            profiler.after_step(state.iteration)
            if result.is_skipped:
                interval.add_skipped()
            else:
                interval.add(result.loss)
            if state.iteration == 1 or is_due(state, args.log_interval, args):
                log_iteration(job, state, result, interval.lap())
            with interval.excluded():
                if is_due(state, args.eval_interval, args):
                    validate(job, state)
                is_last = stop.is_received_anywhere() or is_due(state, args.exit_interval, args)
                if is_last or is_due(state, args.save_interval, args):
                    if watch is not None:
                        watch.check()
                    save(job, state, result, interval)
            job.log.step()
            if is_last:
                break
        job.log.end()
        if stop.is_received or stop.is_time_up:
            reason = "SIGTERM" if stop.is_received else f"--exit-duration-in-mins {args.exit_duration_in_mins}"
            job.log.message(f"stopped by {reason} after {state.iteration} iterations")
        if state.iteration == args.train_iters:
            show_sample(job)


def is_due(state: TrainingState, interval: int | None, args: argparse.Namespace) -> bool:
    """Whether what happens at an interval (None: never) and at the end happens after this iteration."""
    is_at_interval = interval is not None and state.iteration % interval == 0
    return is_at_interval or state.iteration == args.train_iters


def train_step(job: Job, state: TrainingState) -> StepResult:
    """Take the optimizer step that follows ``state``: accumulate microbatches, clip, update.

    Raises:
        DivergedError: NaN or infinity in gradients, unless flags say to skip or not to look.
    """
    job.optimizer.zero_grad()
    loss = torch.zeros((), device=job.device)
    batches = microbatches(job, job.data.train, state.consumed_samples)
    for index, text in enumerate(batches, start=1):
        with accumulation(job.model, is_last=index == len(batches)):
            part = loss_of(job, text) / len(batches)
            torch.autograd.backward(part)
        loss += part.detach()
    grad_norm = clip_gradients(job.model, job.args.clip_grad)
    learning_rate = LearningRate.from_args(job.args).at(state.iteration + 1)
    set_learning_rate(job.optimizer, learning_rate)
    loss = mean_over_ranks(loss)
    try:
        is_good = check_gradients(job.model, grad_norm, nonfinite_policy(job.args))
    except NonfiniteGradientError as error:
        raise diverged(job, state.iteration + 1, f"lm loss {loss.item()}, {error}") from error
    if is_good:
        job.optimizer.step()
    return StepResult(loss, grad_norm, learning_rate, not is_good)


def nonfinite_policy(args: argparse.Namespace) -> str:
    """Return what ``check_gradients`` does with NaN."""
    if not args.check_for_nan_in_loss_and_grad:
        return "ignore"
    return "skip" if args.skip_nonfinite_steps else "raise"


def microbatches(job: Job, samples: Samples, first_sample: int) -> list[Tensor]:
    """Return this rank's part of one global batch, (micro batch, sequence + 1) int64 each."""
    args, ranks = job.args, job.ranks
    count = args.global_batch_size // (args.micro_batch_size * ranks.size)
    numbers = (
        rank_samples(first_sample, index, micro_batch_size=args.micro_batch_size, rank=ranks.rank, num_ranks=ranks.size)
        for index in range(count)
    )
    return [samples.batch(part, job.device) for part in numbers]


def loss_of(job: Job, text: Tensor) -> Tensor:
    """Return the loss of one microbatch; a replicated model has no bf16 weights, so it computes under autocast."""
    is_autocast = job.args.bf16 and not job.args.use_megatron_fsdp
    with torch.autocast(job.device.type, torch.bfloat16, enabled=is_autocast):
        return next_token_loss(job.model, text, has_experts=job.config.num_experts is not None)


@torch.no_grad()
def validate(job: Job, state: TrainingState) -> None:
    """Log the loss on held-out text: the same samples each time, for any number of ranks."""
    num_batches = job.args.eval_iters
    if num_batches == 0:
        return
    loss = torch.zeros((), device=job.device)
    with job.log.progress("validation", num_batches) as advance:
        for index in range(num_batches):
            batches = microbatches(job, job.data.valid, index * job.args.global_batch_size)
            loss += sum(loss_of(job, text) for text in batches) / (len(batches) * num_batches)
            advance()
    job.log.validation(state.iteration, mean_over_ranks(loss).item())


def log_iteration(job: Job, state: TrainingState, result: StepResult, means: IntervalMeans) -> None:
    """Write one line of the training log.

    Raises:
        DivergedError: as ``check_finite`` does.
    """
    args, grad_norm = job.args, result.grad_norm.item()
    check_finite(job, state, means.loss, 0.0 if result.is_skipped else grad_norm)
    job.log.iteration(
        IterationRecord(
            iteration=state.iteration,
            train_iters=args.train_iters,
            consumed_samples=state.consumed_samples,
            elapsed_ms=1000 * means.seconds,
            tokens_per_second=args.global_batch_size * args.seq_length / means.seconds,
            learning_rate=result.learning_rate,
            global_batch_size=args.global_batch_size,
            lm_loss=means.loss,
            grad_norm=grad_norm,
            peak_memory_mib=peak_memory_mib(job.device),
        )
    )


def check_finite(job: Job, state: TrainingState, loss: float, grad_norm: float) -> None:
    """Refuse to go on with a loss or gradient norm that is not finite; they are equal on all ranks.

    Raises:
        DivergedError: one is not finite, and ``--no-check-for-nan-in-loss-and-grad`` is not given.
    """
    is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if job.args.check_for_nan_in_loss_and_grad and not is_finite:
        raise diverged(job, state.iteration, f"lm loss {loss}, gradient norm {grad_norm}; wanted finite numbers.")


def diverged(job: Job, iteration: int, what: str) -> DivergedError:
    """Return the error that ends a run whose numbers are none, with the flags to change."""
    return DivergedError(
        f"iteration {iteration}: {what} Lower --lr {job.args.lr} or raise --lr-warmup-iters "
        f"{job.args.lr_warmup_iters}, and resume from the last checkpoint; --skip-nonfinite-steps leaves such steps "
        "out, --no-check-for-nan-in-loss-and-grad goes on regardless"
    )


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean of a 0-d tensor over all ranks, without waiting for a GPU."""
    total = value.detach().clone()
    wait_for(dist.all_reduce(total, async_op=True))
    return total / dist.get_world_size()


def save(job: Job, state: TrainingState, result: StepResult, interval: Interval) -> None:
    """Write a checkpoint into ``--save``, if that is given, and draw the loss curve.

    Raises:
        DivergedError: as ``check_finite`` does; no good checkpoint is followed by a broken one.
    """
    if job.args.save is not None:
        check_finite(job, state, interval.loss_sum, 0.0 if result.is_skipped else result.grad_norm.item())
        checkpoints = checkpoints_in(job.args.save)
        state = dataclasses.replace(state, loss_sum=interval.loss_sum, loss_count=interval.loss_count)
        extra = state.to_extra(job.config, data_flags(job))
        handle = checkpoints.save(
            unwrapped(job.model),
            job.optimizer,
            state.iteration,
            extra=extra,
            keep_last=job.args.keep_last,
            asynchronous=job.args.async_save,
        )
        job.log.message(f" {'saved' if handle.done else 'saving'} checkpoint {handle.path}")
    job.log.draw()


def resume(job: Job) -> TrainingState:
    """Load the newest whole checkpoint of the run and return where it stands, or a new run's state if there is none."""
    root = resume_folder(job.args)
    if root is None:
        return TrainingState()
    loaded = checkpoints_in(root).load(unwrapped(job.model), job.optimizer)
    if loaded is None:
        check_tracker(checkpoints_in(root))
        job.log.message(f"no checkpoint in {root}: starting from new weights")
        return TrainingState()
    for message in loaded.damaged:
        job.log.message(f"passed over a checkpoint: {message}")
    state = TrainingState.from_extra(loaded.extra, job.config, loaded.path)
    job.log.message(
        f"resuming from {loaded.path}: {state.iteration} iterations, {state.consumed_samples} samples consumed"
    )
    for difference in differences(loaded.extra["data"], data_flags(job)):
        job.log.message(f"the loss curve will not continue exactly: {difference}")
    return state


def data_flags(job: Job) -> dict[str, Any]:
    """Return what decides which text a sample number stands for, and how to read it; defaults are left out."""
    args = job.args
    flags = {"seed": args.seed, "seq_length": args.seq_length, "data_path": job.data.source}
    if args.split not in (None, DEFAULT_SPLIT):
        flags["split"] = args.split
    return flags | tokenizer_flags(args)


def show_sample(job: Job) -> None:
    """Print how the model continues ``--prompt``; all ranks take part."""
    args = job.args
    if args.num_tokens_to_generate == 0:
        return
    with job.log.progress("sample", args.num_tokens_to_generate) as advance:
        tokens = generate_tokens(
            job.model,
            job.tokenizer.encode(args.prompt),
            args.num_tokens_to_generate,
            sampling=Sampling(args.temperature, args.seed, args.max_position_embeddings, job.tokenizer.vocabulary_size),
            device=job.device,
            on_token=advance,
        )
    job.log.message(f" sample at temperature {args.temperature}:\n{job.tokenizer.decode(tokens)}")


@contextlib.contextmanager
def started(args: argparse.Namespace, ranks: Ranks) -> Iterator[Job]:
    """Join the other ranks and yield the job: text, model in units, optimizer and log."""
    device = select_device(args.distributed_backend, ranks)
    data = load_data(args)
    tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    if args.num_tokens_to_generate:
        tokenizer.encode(args.prompt)  # refused now rather than after the last step
    unit = "byte" if args.tokenizer_type == "ByteTokenizer" else "token"
    log = TrainLog(args.save or _DEFAULT_FOLDER, is_main=ranks.is_main, train_iters=args.train_iters, unit=unit)
    if args.tensorboard_dir is not None:
        log.open_tensorboard(args.tensorboard_dir)
    start_process_group(args, ranks, device)
    config = GptConfig.from_args(args)
    gpt = GptModel(config, recompute=Recompute(args.recompute_granularity or "none"))
    gpt.init_weights(args.seed)
    model = parallelize(gpt.to(device), args, build_mesh(args, ranks, device))
    optimizer = build_optimizer(model, args)
    if args.use_megatron_fsdp:
        optimizer = fully_shard_optimizer(optimizer)
    job = Job(args, ranks, device, data, tokenizer, config, model, optimizer, log)
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
    log.message(precision_line(is_bf16=args.bf16, device=job.device))
    if args.use_megatron_fsdp:
        config = FsdpConfig.from_args(args)
        log.message("\n".join([config.explain(), *config.notices(), str(explain(job.model))]))


def main(arguments: Sequence[str]) -> int:
    """Run the job, and return the exit status: 0, 2 after an error that the user can mend, 130 when interrupted."""
    ranks = Ranks.from_environment()
    try:
        pretrain(parse_arguments(arguments, num_ranks=ranks.size), ranks)
    except (FsdpError, DBufferError, DataError, DivergedError) as error:
        return report_error(error, ranks)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
