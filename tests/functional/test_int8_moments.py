"""8-bit moments are those of one process, however the model is sharded, saved and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dbuffer_kernels import dequantize_blocks, quantize_blocks
from tests.functional.int8_training import (
    SPLIT,
    Job,
    Outcome,
    bytes_after_backward,
    bytes_per_parameter,
    distance_after_spike,
    loaded,
    resume,
    train,
)
from tests.harness import run_ranks
from tests.harness.grids import nightly_but


def assert_same(found: Outcome, wanted: Outcome) -> None:
    assert found.losses == wanted.losses[-len(found.losses) :]
    for name, weight in wanted.weights.items():
        assert torch.equal(found.weights[name], weight), name
        assert found.state[name].keys() == wanted.state[name].keys()
        for key, value in wanted.state[name].items():
            assert torch.equal(found.state[name][key], value), (name, key)


# Rounding up or down at random, from a seed, or to the nearest.
@pytest.mark.parametrize("seed", nightly_but([5], [None, 5]))
def test_one_to_four_ranks_and_any_units_train_to_the_same_bits_and_resume_on_other_ranks(
    seed: int | None, tmp_path: Path
) -> None:
    folder = str(tmp_path / "step")
    (alone,) = run_ranks(1, train, Job(seed=seed))
    assert {key: value.dtype for key, value in alone.state["second.weight"].items()} == {
        "step": torch.float32,
        "exp_avg_codes": torch.uint8,
        "exp_avg_scales": torch.float32,
        "exp_avg_sq_codes": torch.uint8,
        "exp_avg_sq_scales": torch.float32,
    }
    assert alone.state["second.weight"]["exp_avg_scales"].shape == (37,)
    assert set(alone.state["last.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    for found in run_ranks(3, train, Job(("second",), seed=seed), folder):
        assert_same(found, alone)
    for found in run_ranks(4, train, Job(("first", "last"), "hsdp", seed)):
        assert_same(found, alone)
    for found in run_ranks(2, resume, Job(("first", "second", "last"), "optim", seed), folder):
        assert_same(found, alone)


def test_split_weights_train_to_the_same_bits_on_two_axes() -> None:
    (alone,) = run_ranks(1, train, Job(policy=SPLIT))
    for found in run_ranks(4, train, Job(("first",), "hfsdp", policy=SPLIT)):
        assert_same(found, alone)


# The second is more than FP32 holds squares of.
@pytest.mark.parametrize("spike", [1e4, 1e30])
@pytest.mark.parametrize("seed", [None, 5])
def test_after_a_spike_weights_stay_near_those_of_fp32_moments(spike: float, seed: int | None) -> None:
    (distance,) = run_ranks(1, distance_after_spike, spike, seed)
    # Four steps after it, of which Adam makes none longer than a few learning rates.
    assert distance < 6


def test_codes_load_as_their_values_into_fp32_moments_and_back(tmp_path: Path) -> None:
    folder = str(tmp_path / "step")
    run_ranks(2, train, Job(("first",)), folder)
    coded = run_ranks(3, loaded, Job(), folder, "int8")[0]
    plain = run_ranks(3, loaded, Job(("second",)), folder, None)[0]
    for name, values in plain.state.items():
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            own = coded.state[name]
            wanted = own.get(key)
            if wanted is None:
                codes = own[f"{key}_codes"]
                wanted = dequantize_blocks(codes.flatten(), own[f"{key}_scales"], signed=signed).view(codes.shape)
            assert torch.equal(values[key], wanted), (name, key)


def test_fp32_moments_load_into_codes_as_they_are_quantized(tmp_path: Path) -> None:
    folder = str(tmp_path / "step")
    run_ranks(2, save_plain, folder)
    plain = run_ranks(2, loaded, Job(), folder, None)[0]
    coded = run_ranks(3, loaded, Job(), folder, "int8")[0]
    for name in ("first.weight", "long"):
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            codes, scales = quantize_blocks(plain.state[name][key].flatten(), signed=signed)
            assert torch.equal(coded.state[name][f"{key}_codes"].flatten(), codes)
            assert torch.equal(coded.state[name][f"{key}_scales"], scales)


def save_plain(folder: str) -> None:
    from megatron_fsdp import save_checkpoint
    from tests.functional.int8_training import backward

    model, optimizer = Job().build(None)
    backward(model, 0)
    optimizer.step()
    save_checkpoint(model, optimizer, folder)


def test_the_meter_counts_the_bytes_that_explain_says() -> None:
    for moments, expected, _ in run_ranks(3, bytes_after_backward, Job(("second",), policy=SPLIT)):
        # Small parameters' moments are padded to 16 bytes.
        assert 0 <= moments - expected <= 16 * 8


def test_split_weights_with_8_bit_moments_take_8_03_bytes_per_parameter() -> None:
    for found in run_ranks(2, bytes_per_parameter):
        assert found == 8 + 2 * 4 / 256
