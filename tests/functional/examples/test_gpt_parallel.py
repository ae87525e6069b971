"""Tensor and expert parallelism of the training script: losses, norms and weights are those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from gpt.checkpoint import TrainingState, checkpoints_in, resume, what_to_save
from gpt.job import Job
from megatron_fsdp import GradientScale
from tests.harness import run_ranks
from tests.harness.grids import nightly_but
from tests.unit.examples.jobs import TINY, make_job, steps, train_steps, whole_weights

MODEL = "--use-megatron-fsdp --global-batch-size 8 --num-attention-heads 4 --optimizer sgd --lr 0.5"
EXPERTS = f"{MODEL} --num-experts 4 --moe-aux-loss-coeff 0.1"
TENSOR, EXPERT = "--tensor-model-parallel-size 2", "--expert-model-parallel-size 2"
HYBRID = "--num-distributed-optimizer-instances 2"
STEPS = 2

# name: ranks, model, how it is divided.
CASES = {
    "tp 2": (2, MODEL, TENSOR),
    "ep 2": (2, EXPERTS, EXPERT),
    "tp 2, ep 2": (4, EXPERTS, f"{TENSOR} {EXPERT}"),
    "tp 2, hsdp": (4, MODEL, f"{TENSOR} {HYBRID}"),
    "tp 2, experts": (2, EXPERTS, TENSOR),
    "ep 4": (4, EXPERTS, "--expert-model-parallel-size 4"),
    "ep 2, hsdp": (4, EXPERTS, f"{EXPERT} {HYBRID}"),
    "ep 2 of 4": (4, EXPERTS, EXPERT),
    "tp 2, zero 1": (4, MODEL, f"{TENSOR} --data-parallel-sharding-strategy optim"),
    "ep 2, no shard": (4, EXPERTS, f"{EXPERT} --data-parallel-sharding-strategy no_shard"),
    "ep 2, per token": (2, EXPERTS, f"{EXPERT} --calculate-per-token-loss --eod-mask-loss"),
    "tp 2, per token": (4, MODEL, f"{TENSOR} --calculate-per-token-loss --eod-mask-loss"),
    "tp 2, untied, unbiased": (
        2,
        f"{MODEL} --hidden-size 24 --untie-embeddings-and-output-weights --disable-bias-linear "
        "--position-embedding-type rope",
        f"{TENSOR} --recompute-granularity full",
    ),
    "ep 2, swiglu": (2, f"{EXPERTS} --swiglu --disable-bias-linear", EXPERT),
}
QUICK = ["tp 2, ep 2", "tp 2, hsdp"]


@pytest.mark.parametrize("name", nightly_but(QUICK, list(CASES)))
def test_losses_norms_and_weights_are_those_of_one_process(name: str, documents: str) -> None:
    num_ranks, model, divided = CASES[name]
    num_data_ranks = num_ranks // (2 if TENSOR in divided else 1)
    flags = f"{model} --data-path {documents}"
    # The single process takes the microbatches of all ranks, so that experts are balanced over the same tokens.
    per_token = "--calculate-per-token-loss --eod-mask-loss" if "per-token" in divided else ""
    micro = f"--micro-batch-size {8 // num_data_ranks // 2}"
    ((wanted, weights),) = run_ranks(1, train_steps, f"{flags} {per_token} {micro}", STEPS)
    for found, own_weights in run_ranks(num_ranks, train_steps, f"{flags} {divided} {micro}", STEPS):
        assert found == pytest.approx(wanted, rel=1e-5)
        assert {
            key for key in weights if not torch.allclose(weights[key], own_weights[key], rtol=0, atol=2e-6)
        } == set()


def run_on(flags: str, folder: str, num_steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Continue from the newest checkpoint in a folder if it has one, and save a new one."""
    job = make_job(f"{flags} --load {folder} --save {folder}")
    numbers, state = steps(job, resume(job), num_steps)
    extra = what_to_save(job, state)
    checkpoints_in(Path(folder)).save(job.model, job.optimizer, state.iteration, extra=extra)
    return numbers, whole_weights(job)


JOURNEYS = {
    "ep": (EXPERTS, [(2, EXPERT), (4, "--expert-model-parallel-size 4"), (1, ""), (4, f"{EXPERT} {TENSOR}"), (2, "")]),
    "tp": (MODEL, [(2, TENSOR), (4, f"{TENSOR} {HYBRID}"), (1, ""), (2, TENSOR)]),
}


@pytest.mark.parametrize("name", nightly_but(["tp"], JOURNEYS))
def test_checkpoints_go_from_one_division_to_another(name: str, documents: str, tmp_path: Path) -> None:
    model, journey = JOURNEYS[name]
    # With Adam, so that the checkpoint has to carry moments.
    flags = f"{model} --optimizer adam --lr 0.01 --adam-eps 1e-3 --lr-decay-style constant --data-path {documents}"
    micro = "--micro-batch-size 2"
    ((wanted, weights),) = run_ranks(1, train_steps, f"{flags} {micro}", len(journey))
    found: list[float] = []
    for num_ranks, divided in journey:
        results = run_ranks(num_ranks, run_on, f"{flags} {divided} {micro}", str(tmp_path / "run"), 1)
        numbers, last = results[0]
        found += numbers
    assert found == pytest.approx(wanted, rel=2e-5)
    assert {key for key in weights if not torch.allclose(weights[key], last[key], rtol=0, atol=5e-6)} == set()


@pytest.mark.parametrize("divided", nightly_but([EXPERT], [TENSOR, EXPERT]))
def test_a_model_on_the_meta_device_is_divided_alike(divided: str, documents: str) -> None:
    flags = f"{EXPERTS} --data-path {documents} --micro-batch-size 2 {divided}"
    there = run_ranks(2, train_steps, f"{flags} --init-model-with-meta-device", 1)
    here = run_ranks(2, train_steps, flags, 1)
    for (numbers, weights), (wanted, other) in zip(there, here, strict=True):
        assert numbers == wanted
        assert all(torch.equal(weights[key], other[key]) for key in weights)


def scale_and_step(flags: str) -> tuple[GradientScale, list[float], list[float]]:
    """Return the measured gradient scale, and the first step's loss and norm after measuring and without."""
    job, other = make_job(flags), make_job(flags)
    report = pretrain_gpt.measure_gradient_scale(job, TrainingState())
    return report, steps(job, TrainingState(), 1)[0], steps(other, TrainingState(), 1)[0]


@pytest.mark.parametrize("name", nightly_but(["ep 2, per token"], list(CASES)))
def test_check_gradient_scale_finds_every_division_right_and_changes_no_step(name: str, documents: str) -> None:
    num_ranks, model, divided = CASES[name]
    num_data_ranks = num_ranks // (2 if TENSOR in divided else 1)
    wanted = 1.0 if "per-token" in divided else 1 / num_data_ranks
    flags = f"{model} {divided} --micro-batch-size 2 --data-path {documents}"
    for report, after, without in run_ranks(num_ranks, scale_and_step, flags):
        assert after == without
        assert all(each.factor == pytest.approx(wanted, rel=2e-6) for each in report.parameters)


@pytest.mark.usefixtures("plain_start")
def test_check_gradient_scale_says_what_it_found_or_ends_the_run(
    documents: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"{TINY} {MODEL} --micro-batch-size 8 --eval-iters 0 --num-tokens-to-generate 0 --data-path {documents}"
    command = [*flags.split(), "--check-gradient-scale", "--train-iters", "1"]
    assert pretrain_gpt.main(command) == 0
    assert "unit 'blocks.0', 12 parameters over dp of 1: factor 1, expected 1" in capfd.readouterr().out
    build = Job.__init__

    def build_wrong(self: Job, *args: Any) -> None:
        build(self, *args)
        self.model.blocks[1].set_gradient_divide_factor(4)  # type: ignore[index,operator,union-attr]  # an FsdpModule

    monkeypatch.setattr(Job, "__init__", build_wrong)
    assert pretrain_gpt.main(command) == 2
    dist.destroy_process_group()
    said = capfd.readouterr().err
    assert (
        "parameter 'blocks.1.input_layernorm.weight' (unit 'blocks.1', over dp of 1): the reduced gradient is 0.25 x"
        in said
    )
