r"""Train a GPT with Megatron-LM's flags, its weights sharded over all ranks by megatron_fsdp.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --use-megatron-fsdp --num-layers 4 --hidden-size 192 \
        --num-attention-heads 6 --seq-length 128 --micro-batch-size 8 --global-batch-size 16 --train-iters 300 --lr 2e-3

One process without torchrun works too. To compare with: --use-torch-fsdp2 shards by PyTorch's own engine, and without
either the model is replicated. All flags: --help, and docs/training_script.md. preprocess_data.py writes indexed data,
generate_gpt.py uses what was saved.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dbuffer import DBufferError
from gpt.arguments import parse_arguments
from gpt.checkpoint import TrainingState, checkpoints_in
from gpt.data import DataError, Samples, rank_samples
from gpt.job import DEFAULT_FOLDER, Job, started
from gpt.launch import Ranks, report_error
from gpt.learning_rate import LearningRate
from gpt.loss import MeanLoss, TokenLoss, step_weight, token_loss
from gpt.memory import memory_use
from gpt.next_steps import next_steps
from gpt.optimizer import set_learning_rate
from gpt.parallel import accumulation, clip_gradients, unwrapped, watched
from gpt.profiling import StepProfiler
from gpt.resume import data_flags, resume
from gpt.sample import Sampling, generate
from gpt.signals import StopSignal
from gpt.train_log import Interval, IntervalMeans, IterationRecord
from megatron_fsdp import (
    FsdpError,
    GradientScale,
    NonfiniteGradientError,
    check_gradient_scale,
    check_gradients,
    unit_checksums,
)


class DivergedError(ArithmeticError):
    """The loss or the gradient norm is no longer a number."""


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

    SIGTERM or Ctrl-C to any rank, or the end of ``--exit-duration-in-mins``, ends the run after the step under way,
    with a checkpoint.
    """
    with (
        started(args, ranks) as job,
        StopSignal(args.exit_duration_in_mins, on_interrupt=interrupt_notice(args) if ranks.is_main else "") as stop,
        StepProfiler(args, ranks, args.save or DEFAULT_FOLDER, job.log, job.model) as profiler,
        watched(job.model, args) as watch,
    ):
        state = resume(job)
        say_gradient_scale(job, state)
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
                log_checksum(job, state)
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
        if stop.received or stop.is_time_up:
            reason = stop.received or f"--exit-duration-in-mins {args.exit_duration_in_mins}"
            job.log.message(f"stopped by {reason} after {state.iteration} iterations")
        if state.iteration == args.train_iters:
            show_sample(job)


def interrupt_notice(args: argparse.Namespace) -> str:
    """Return what to say when Ctrl-C comes."""
    then = "and saved" if args.save is not None else "and nothing saved, for want of --save"
    return f"Ctrl-C: the step under way is finished {then}; Ctrl-C again ends the run at once"


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
    mean = MeanLoss(job.args, job.device)
    batches = microbatches(job, job.data.train, state.consumed_samples)
    weight = step_weight(job.args, batches, job.masked_token)
    for index, text in enumerate(batches, start=1):
        with accumulation(job.model, is_last=index == len(batches)):
            torch.autograd.backward(mean.add(loss_of(job, text)) * weight)
    grad_norm = clip_gradients(job.model, job.args.clip_grad)
    if complaint := job.large_gradients.complaint(state.iteration + 1, grad_norm):
        job.log.message(complaint)
    learning_rate = LearningRate.from_args(job.args).at(state.iteration + 1)
    set_learning_rate(job.optimizer, learning_rate)
    loss = mean.over_ranks()
    try:
        is_good = check_gradients(job.model, grad_norm, nonfinite_policy(job.args))
    except NonfiniteGradientError as error:
        raise diverged(job, state.iteration + 1, f"lm loss {loss.item()}, {error}") from error
    if is_good:
        job.optimizer.step()
    return StepResult(loss, grad_norm, learning_rate, not is_good)


def say_gradient_scale(job: Job, state: TrainingState) -> None:
    """Log what ``measure_gradient_scale`` finds, with ``--check-gradient-scale``; it raises as that does."""
    if job.args.check_gradient_scale:
        job.log.message(str(measure_gradient_scale(job, state)))


def measure_gradient_scale(job: Job, state: TrainingState) -> GradientScale:
    """Run the first microbatch of the next step, and measure what its gradients are of the ranks' own.

    Raises:
        GradientScaleError: they are not the mean over data-parallel ranks, or with ``--calculate-per-token-loss`` the
            sum.
    """
    text = microbatches(job, job.data.train, state.consumed_samples)[0]
    is_per_token: bool = job.args.calculate_per_token_loss
    weight = step_weight(job.args, [text], job.masked_token)

    def loss_fn(_: nn.Module, batch: Tensor) -> Tensor:
        loss = loss_of(job, batch)
        return (loss.total if is_per_token else loss.mean) * weight

    return check_gradient_scale(job.model, loss_fn, text, expected=1.0 if is_per_token else None)


def nonfinite_policy(args: argparse.Namespace) -> str:
    """Return what ``check_gradients`` does with NaN."""
    if not args.check_for_nan_in_loss_and_grad:
        return "ignore"
    return "skip" if args.skip_nonfinite_steps else "raise"


def microbatches(job: Job, samples: Samples, first_sample: int) -> list[Tensor]:
    """Return this rank's part of one global batch, (micro batch, sequence + 1) int64 each."""
    args, size = job.args, job.args.data_parallel_size
    count = args.global_batch_size // (args.micro_batch_size * size)
    rank = job.ranks.rank // args.tensor_model_parallel_size
    numbers = (
        rank_samples(first_sample, index, micro_batch_size=args.micro_batch_size, rank=rank, num_ranks=size)
        for index in range(count)
    )
    return [samples.batch(part, job.device) for part in numbers]


def loss_of(job: Job, text: Tensor) -> TokenLoss:
    """Return the loss of one microbatch; a replicated model has no bf16 weights, so it computes under autocast."""
    is_autocast = job.args.bf16 and not (job.args.use_megatron_fsdp or job.args.use_torch_fsdp2)
    with torch.autocast(job.device.type, torch.bfloat16, enabled=is_autocast):
        has_experts = job.config.num_experts is not None
        return token_loss(job.model, text, has_experts=has_experts, masked_token=job.masked_token)


@torch.no_grad()
def validate(job: Job, state: TrainingState) -> None:
    """Log the loss on held-out text: the same samples each time, for any number of ranks."""
    num_batches = job.args.eval_iters
    if num_batches == 0:
        return
    mean = MeanLoss(job.args, job.device)
    with job.log.progress("validation", num_batches) as advance:
        for index in range(num_batches):
            for text in microbatches(job, job.data.valid, index * job.args.global_batch_size):
                mean.add(loss_of(job, text))
            advance()
    job.log.validation(state.iteration, mean.over_ranks().item())


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
            memory=memory_use(job.device),
        )
    )


def log_checksum(job: Job, state: TrainingState) -> None:
    """Log the checksum of weights and moments if ``--log-checksum`` asks for it after this step; all ranks call it."""
    args = job.args
    if args.log_checksum is not None and is_due(state, args.log_checksum, args):
        units = unit_checksums(unwrapped(job.model), job.optimizer)
        job.log.checksum(state.iteration, units, keeps_units=args.log_checksum_per_unit)


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


def show_sample(job: Job) -> None:
    """Print how the model continues ``--prompt``; all ranks take part."""
    args = job.args
    if args.num_tokens_to_generate == 0:
        return
    sampling = Sampling(args.temperature, args.seed, args.max_position_embeddings, job.tokenizer.vocabulary_size)
    tokens = job.tokenizer.encode(args.prompt)
    with job.log.progress("sample", args.num_tokens_to_generate) as advance:
        for token in generate(job.model, tokens, args.num_tokens_to_generate, sampling, job.device):
            tokens.append(token)
            advance()
    job.log.message(f" sample at temperature {args.temperature}:\n{job.tokenizer.decode(tokens)}")


def main(arguments: Sequence[str]) -> int:
    """Run the job, and return the exit status: 0, 2 after an error that the user can mend, 130 when interrupted."""
    ranks = Ranks.from_environment()
    try:
        args = parse_arguments(arguments, num_ranks=ranks.size)
        pretrain(args, ranks)
    except (FsdpError, DBufferError, DataError, DivergedError) as error:
        return report_error(error, ranks)
    except KeyboardInterrupt:
        return 130
    if ranks.is_main:
        print(next_steps(args, arguments, ranks.size), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
