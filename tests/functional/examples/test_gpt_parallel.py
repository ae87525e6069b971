"""Tensor and expert parallelism of the training script: losses, norms and weights are those of one process."""

from pathlib import Path

import pytest
import torch

from tests.harness import run_ranks
from tests.harness.grids import nightly_but
from tests.unit.examples.jobs import train_steps

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
        f"{MODEL} --untie-embeddings-and-output-weights --disable-bias-linear --position-embedding-type rope",
        f"{TENSOR} --recompute-granularity full",
    ),
    "ep 2, swiglu": (2, f"{EXPERTS} --swiglu --disable-bias-linear", EXPERT),
}
QUICK = ["tp 2", "ep 2", "tp 2, ep 2", "tp 2, hsdp"]


@pytest.fixture
def documents(tmp_path: Path) -> str:
    """Return a text with empty documents in places."""
    path = tmp_path / "documents"
    words = b"the quick brown fox jumps over the lazy dog and runs"
    path.write_bytes(b"".join(words[index % 7 : index % 7 + index % 31] + b"\0" * (index % 13) for index in range(999)))
    return str(path)


@pytest.mark.parametrize("name", nightly_but(QUICK, list(CASES)))
def test_losses_norms_and_weights_are_those_of_one_process(name: str, documents: str) -> None:
    num_ranks, model, divided = CASES[name]
    num_data_ranks = num_ranks // (2 if TENSOR in divided else 1)
    flags = f"{model} --data-path {documents}"
    # One process takes the microbatches of all ranks, so that the balance of experts is over the same tokens.
    per_token = "--calculate-per-token-loss --eod-mask-loss" if "per-token" in divided else ""
    micro = f"--micro-batch-size {8 // num_data_ranks // 2}"
    ((wanted, weights),) = run_ranks(1, train_steps, f"{flags} {per_token} {micro}", STEPS)
    for found, own_weights in run_ranks(num_ranks, train_steps, f"{flags} {divided} {micro}", STEPS):
        assert found == pytest.approx(wanted, rel=1e-5)
        assert {
            key for key in weights if not torch.allclose(weights[key], own_weights[key], rtol=0, atol=2e-6)
        } == set()
