r"""Train a GPT with Megatron-LM's flags, its weights sharded over all ranks by megatron_fsdp.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --use-megatron-fsdp --num-layers 4 --hidden-size 192 \
        --num-attention-heads 6 --seq-length 128 --micro-batch-size 8 --global-batch-size 16 --train-iters 300 --lr 2e-3

A single process, without torchrun, works too. For a comparison, --use-torch-fsdp2 shards with PyTorch's FSDP2. Without
either flag the model is replicated. --help and docs/training_script.md list all flags. generate_gpt.py generates text
from a checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dbuffer import DBufferError
from gpt.arguments import parse_arguments
from gpt.checkpoint import TrainingState, checkpoints_in, next_steps, resume, what_to_save
from gpt.data import DataError, Samples
from gpt.job import Job, profiled, started
from gpt.launch import Ranks, StopSignal, report_error
from gpt.loss import MeanLoss, TokenLoss, step_weight, token_loss
from gpt.model import continued
from gpt.optimizer import learning_rate, set_learning_rate
from gpt.parallel import accumulation, clip_gradients, unwrapped, watched
from gpt.throughput import throughput
from gpt.train_log import Interval, memory_use
from megatron_fsdp import (
    FsdpError,
    GradientScale,
    NonfiniteGradientError,
    check_gradient_scale,
    check_gradients,
    unit_checksums,
)


class DivergedError(ArithmeticError):
    """A gradient is no longer a number."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's loss over all ranks and gradient norm before clipping, 0-d; and whether NaN skipped the update."""

    loss: Tensor
    grad_norm: Tensor
    is_skipped: bool


def pretrain(args: argparse.Namespace, ranks: Ranks) -> None:
    """Train from the start or from the latest checkpoint, save checkpoints, and print a sample. Every rank calls this.

    SIGTERM or Ctrl-C on any rank ends the run after the current step, with a checkpoint.
    """
    with started(args, ranks) as job, StopSignal() as stop:
        state = resume(job)
        if args.check_gradient_scale:
            job.log.message(str(measure_gradient_scale(job, state)))
        job.log.begin(state.iteration)
        interval, is_last = Interval(job.device, loss_sum=state.loss_sum, loss_count=state.loss_count), False
        with profiled(job, state.iteration) as step_profiler, watched(job.model, args) as watch:
            while state.iteration < args.train_iters and not is_last:
                result = train_step(job, state)
                state = state.after_step(args.global_batch_size)
                step_profiler()
                log_step(job, state, result, interval)
                with interval.excluded():
                    log_checksum(job, state)
                    validate(job, state)
                    is_last = stop.is_received_anywhere() or is_due(state, args.exit_interval, args)
                    if is_last or is_due(state, args.save_interval, args):
                        if watch is not None:
                            watch.check()
                        save(job, state, interval)
        if stop.received:
            job.log.message(f"stopped by {stop.received} after {state.iteration} iterations")
        if state.iteration == args.train_iters and args.num_tokens_to_generate > 0:
            text = continued(job.model, job.tokenizer, args.max_position_embeddings, args, job.device)
            job.log.message(f" sample at temperature {args.temperature}:\n{text}")


def is_due(state: TrainingState, interval: int | None, args: argparse.Namespace) -> bool:
    """Return whether this iteration is the last one or a multiple of ``interval``; None: never."""
    is_at_interval = interval is not None and state.iteration % interval == 0
    return is_at_interval or state.iteration == args.train_iters


def train_step(job: Job, state: TrainingState) -> StepResult:
    """Take the optimizer step that follows ``state``: accumulate microbatches, clip, update.

    NaN or infinity in gradients raises a DivergedError, unless flags say to skip or not to look.
    """
    job.optimizer.zero_grad()
    mean = MeanLoss(job.args, job.device)
    numbers = sample_numbers(job, state.consumed_samples)
    batches = microbatches(job, job.data.train, numbers)
    job.data.train.prepare(sample_numbers(job, state.consumed_samples + job.args.global_batch_size))
    weight = step_weight(job.args, batches, job.masked_token)
    for index, text in enumerate(batches, start=1):
        seed_dropout(job.args, numbers[index - 1].start)
        with accumulation(job.model, is_last=index == len(batches)):
            torch.autograd.backward(mean.add(loss_of(job, text)) * weight)
    grad_norm = clip_gradients(job.model, job.args.clip_grad)
    set_learning_rate(job.optimizer, learning_rate(job.args, state.iteration + 1))
    loss = mean.over_ranks()
    policy = "skip" if job.args.skip_nonfinite_steps else "raise"
    try:
        is_looking = job.args.check_for_nan_in_loss_and_grad
        is_good = check_gradients(job.model, grad_norm, policy if is_looking else "ignore")
    except NonfiniteGradientError as error:
        raise DivergedError(
            f"iteration {state.iteration + 1}: lm loss {loss.item()}, {error} fix: lower --lr or raise "
            "--lr-warmup-iters, and resume from the last checkpoint; --skip-nonfinite-steps skips such steps, "
            "--no-check-for-nan-in-loss-and-grad ignores them"
        ) from error
    if is_good:
        job.optimizer.step()
    return StepResult(loss, grad_norm, not is_good)


def microbatches(job: Job, samples: Samples, numbers: Sequence[range]) -> list[Tensor]:
    """Return the microbatches of these samples, (micro batch, sequence + 1) int64 each."""
    return [samples(each, job.device) for each in numbers]


def sample_numbers(job: Job, first_sample: int) -> list[range]:
    """Return the samples of each of this rank's microbatches in the global batch that starts with ``first_sample``.

    Neighbouring data-parallel ranks take neighbouring samples, as in Megatron.
    """
    size, num_ranks = job.args.micro_batch_size, job.args.data_parallel_size
    first = first_sample + job.ranks.rank // job.args.tensor_model_parallel_size * size
    starts = range(first, first + job.args.global_batch_size, size * num_ranks)
    return [range(start, start + size) for start in starts]


def seed_dropout(args: argparse.Namespace, sample: int) -> None:
    """Seed dropout by the microbatch's first sample, so that it is equal on any number of ranks and after a resume."""
    if args.hidden_dropout or args.attention_dropout:
        torch.manual_seed(int(np.random.SeedSequence((args.seed, sample)).generate_state(1, np.uint64)[0]))


def loss_of(job: Job, text: Tensor) -> TokenLoss:
    """Return the loss of one microbatch; a replicated model has no bf16 weights, so it computes under autocast."""
    is_autocast = job.args.bf16 and not (job.args.use_megatron_fsdp or job.args.use_torch_fsdp2)
    with torch.autocast(job.device.type, torch.bfloat16, enabled=is_autocast):
        return token_loss(job.model, text, job.masked_token)


def measure_gradient_scale(job: Job, state: TrainingState) -> GradientScale:
    """Check that a microbatch's gradients are the mean (or the sum) of the ranks' own gradients; raise if not."""
    text = microbatches(job, job.data.train, sample_numbers(job, state.consumed_samples))[0]
    is_per_token: bool = job.args.calculate_per_token_loss
    weight = step_weight(job.args, [text], job.masked_token)

    def loss_fn(_: nn.Module, batch: Tensor) -> Tensor:
        loss = loss_of(job, batch)
        return (loss.total if is_per_token else loss.mean) * weight

    return check_gradient_scale(job.model, loss_fn, text, expected=1.0 if is_per_token else None)


def log_step(job: Job, state: TrainingState, result: StepResult, interval: Interval) -> None:
    """Count a step, and write a line of the training log at each log interval."""
    args = job.args
    interval.add(None if result.is_skipped else result.loss)
    if args.check_for_large_grads:
        job.log.gradient_norm(state.iteration, result.grad_norm.item())
    if state.iteration == 1 or is_due(state, args.log_interval, args):
        seconds, loss = interval.lap()
        row = {
            "iteration": state.iteration,
            "consumed_samples": state.consumed_samples,
            "elapsed_ms": 1000 * seconds,
            "tokens_per_second": args.global_batch_size * args.seq_length / seconds,
            "learning_rate": learning_rate(args, state.iteration),
            "global_batch_size": args.global_batch_size,
            "lm_loss": loss,
            "grad_norm": result.grad_norm.item(),
        }
        if args.log_throughput:
            row |= throughput(job.config, args, seconds, job.device)
        job.log.iteration(row, memory_use(job.device))


def log_checksum(job: Job, state: TrainingState) -> None:
    """Log the checksum of weights and moments if ``--log-checksum`` asks for it after this step; all ranks call it."""
    args = job.args
    if args.log_checksum is not None and is_due(state, args.log_checksum, args):
        units = unit_checksums(unwrapped(job.model), job.optimizer)
        job.log.checksum(state.iteration, units, keeps_units=args.log_checksum_per_unit)


@torch.no_grad()
def validate(job: Job, state: TrainingState) -> None:
    """Log the loss on held-out text at each evaluation interval, on the same samples for any number of ranks."""
    if job.args.eval_iters == 0 or not is_due(state, job.args.eval_interval, job.args):
        return
    mean = MeanLoss(job.args, job.device)
    job.model.eval()
    for index in range(job.args.eval_iters):
        for text in microbatches(job, job.data.valid, sample_numbers(job, index * job.args.global_batch_size)):
            mean.add(loss_of(job, text))
    job.model.train()
    job.log.validation(state.iteration, mean.over_ranks().item())


def save(job: Job, state: TrainingState, interval: Interval) -> None:
    """Write a checkpoint into ``--save``, if that is given, and draw the loss curve."""
    args = job.args
    if args.save is not None:
        state = dataclasses.replace(state, loss_sum=interval.loss_sum, loss_count=interval.loss_count)
        handle = checkpoints_in(args.save).save(
            unwrapped(job.model),
            None if args.no_save_optim else job.optimizer,
            state.iteration,
            extra=what_to_save(job, state),
            keep_last=args.keep_last,
            asynchronous=args.async_save,
        )
        job.log.message(f" {'saved' if handle.done else 'saving'} checkpoint {handle.path}")
    job.log.draw()


def main(arguments: Sequence[str]) -> int:
    """Run the job, and return the exit status: 0, 2 after an error that the user can mend, 130 when interrupted."""
    ranks = Ranks(rank=0, local_rank=0, size=1)
    try:
        ranks = Ranks.from_environment(is_fake="--fake-process-group" in arguments)
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
