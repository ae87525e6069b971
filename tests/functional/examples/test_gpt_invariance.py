"""The training script with ``--fsdp-invariant-reduction``: the same bits on any number of ranks."""

import argparse
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from gpt.checkpoint import TrainingState
from gpt.loss import MeanLoss, TokenLoss
from megatron_fsdp import load_checkpoint, save_checkpoint
from tests.harness import run_ranks
from tests.unit.examples.jobs import TINY, make_job, steps, train_steps, whole_weights

FLAGS = "--use-megatron-fsdp --fsdp-invariant-reduction --micro-batch-size 2 --global-batch-size 24"
Trained = tuple[list[float], dict[str, torch.Tensor]]


def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, value in wanted.items() if not torch.equal(value, found[name])]


@pytest.mark.parametrize(
    "more", ["", "--calculate-per-token-loss --eod-mask-loss", "--bf16 --grad-reduce-in-bf16", "--optimizer muon"]
)
def test_losses_norms_and_weights_have_the_same_bits_on_any_number_of_ranks(more: str, documents: str) -> None:
    flags = f"{FLAGS} {more} --data-path {documents}"
    ((numbers, wanted),) = run_ranks(1, train_steps, flags, 2)
    for size in (4,) if more else (2, 3):
        for found, weights in run_ranks(size, train_steps, flags, 2):
            assert (found, differing(weights, wanted)) == (numbers, []), size


@pytest.mark.parametrize(
    "more",
    [
        "--num-experts 4 --moe-aux-loss-coeff 0.1",
        "--num-experts 4 --expert-model-parallel-size 2",
        "--tensor-model-parallel-size 2",
    ],
)
def test_tensor_and_expert_parallel_ranks_keep_the_bits_while_their_number_stays(more: str, documents: str) -> None:
    flags = f"{FLAGS} {more} --data-path {documents}"
    found = {size: run_ranks(size, train_steps, flags, 2) for size in (2, 4)}
    for rank, (numbers, weights) in enumerate(found[4]):
        wanted_numbers, wanted = found[2][rank % 2]
        assert (numbers, differing(weights, wanted)) == (wanted_numbers, []), rank


def saved(flags: str, path: str) -> Trained:
    """Train a step, save, and train one more."""
    job = make_job(flags)
    _, state = steps(job, TrainingState(), 1)
    save_checkpoint(job.model, job.optimizer, path)
    return steps(job, state, 1)[0], whole_weights(job)


def resumed(flags: str, path: str) -> Trained:
    job = make_job(flags)
    load_checkpoint(job.model, job.optimizer, path)
    state = TrainingState().after_step(job.args.global_batch_size)
    return steps(job, state, 1)[0], whole_weights(job)


HSDP = "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy no_shard"


@pytest.mark.parametrize(
    ("more", "on_4"),
    [
        ("", ""),
        ("--adam-moments int8", ""),
        ("--optimizer muon", ""),
        ("", HSDP),
        pytest.param("", HSDP.replace("no_shard", "optim"), marks=pytest.mark.slow),
        *(
            pytest.param(f"--data-parallel-sharding-strategy {strategy}", "", marks=pytest.mark.slow)
            for strategy in ("no_shard", "optim", "optim_grads")
        ),
    ],
)
def test_a_run_that_stopped_on_4_ranks_goes_on_with_the_same_bits_on_fewer(
    more: str, on_4: str, documents: str, tmp_path: Path
) -> None:
    flags, path = f"{FLAGS} {more} --data-path {documents}", str(tmp_path / "checkpoint")
    numbers, wanted = run_ranks(4, saved, f"{flags} {on_4}", path)[0]
    for found, weights in run_ranks(2 if on_4 else 3, resumed, flags, path):
        assert (found, differing(weights, wanted)) == (numbers, [])


def mean_of_large_and_small() -> float:
    """Return the mean of losses whose FP64 sum depends on the order."""
    args = argparse.Namespace(calculate_per_token_loss=False)
    mean, size, rank = MeanLoss(args, torch.device("cpu")), dist.get_world_size(), dist.get_rank()
    values = [1e17, 3.0, -1e17, 5.0]
    for number in range(rank, len(values), size):
        mean.add(TokenLoss(torch.tensor(values[number], dtype=torch.float64), torch.tensor(1)))
    return mean.over_ranks().item()


def test_logged_losses_are_added_in_the_order_of_microbatches() -> None:
    (wanted,) = run_ranks(1, mean_of_large_and_small)
    assert [run_ranks(size, mean_of_large_and_small) for size in (2, 4)] == [[wanted] * 2, [wanted] * 4]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--fsdp-invariant-reduction", "--fsdp-invariant-reduction needs --use-megatron-fsdp"),
        ("--use-megatron-fsdp --fsdp-invariant-reduction --check-gradient-scale", "--check-gradient-scale contradicts"),
        ("--log-checksum-per-unit", "--log-checksum-per-unit needs --log-checksum N"),
        ("--use-torch-fsdp2 --ckpt-format torch_dist --log-checksum 2", "--log-checksum contradicts --use-torch-fsdp2"),
    ],
)
def test_flags_that_contradict_invariant_reduction_are_refused(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain_gpt.main([*TINY.split(), "--micro-batch-size", "2", *flags.split()]) == 2
    assert words in capsys.readouterr().err
