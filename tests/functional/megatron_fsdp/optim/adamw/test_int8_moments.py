"""8-bit moments equal those of one process for each way to shard, save and resume.

Sums of gradients are equal on any number of ranks, because only rank 0 has nonzero gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dbuffer import memory_meter
from dbuffer_kernels import dequantize_blocks, quantize_blocks
from megatron_fsdp import (
    AdamW,
    FsdpModule,
    MixedPrecisionPolicy,
    Placements,
    explain,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
)
from tests.harness import run_ranks

STEPS = 3
INT8 = MixedPrecisionPolicy(moments="int8")
SPLIT = MixedPrecisionPolicy(torch.bfloat16, main_params_dtype=torch.float32, split_main_params=True, moments="int8")


class Net(nn.Module):
    """Rows that are no multiple of 256, last partial blocks, a weight cut inside of an expert, and small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, 120)
        self.second = nn.Linear(120, 77)
        self.experts = nn.Parameter(torch.randn(3, 77, 20) * 0.1)
        self.long = nn.Parameter(torch.ones(4099))
        self.last = nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        x = torch.einsum("bi,eij->bj", x, self.experts) * self.long.sum() / 4099
        return self.last(x)


@dataclass(frozen=True)
class Job:
    """Units other than the root, strategy ("hsdp" on 2 x ranks / 2), precision."""

    units: tuple[str, ...] = ()
    strategy: str = "optim_grads_params"
    policy: MixedPrecisionPolicy = INT8

    def build(self, moments: str | None = "int8") -> tuple[Net, AdamW]:
        torch.manual_seed(0)
        model = Net()
        is_hybrid = self.strategy in ("hsdp", "hfsdp")
        sizes = (2, dist.get_world_size() // 2) if is_hybrid else (dist.get_world_size(),)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])
        placements = getattr(Placements, self.strategy)(*range(len(sizes)))
        for name in self.units:
            fully_shard(getattr(model, name), mesh, placements, mp_policy=self.policy)
        sharded = fully_shard(model, mesh, placements, mp_policy=self.policy)
        for module in model.modules():
            if isinstance(module, FsdpModule):
                module.set_gradient_divide_factor(1)
        return sharded, AdamW(model.parameters(), lr=1e-2, moments=moments)


def backward(model: nn.Module, step: int) -> float:
    """Only rank 0 has gradients other than zero, so every sum over ranks is exact: its own."""
    torch.manual_seed(step)
    loss = model(torch.randn(5, 100)).square().mean()
    (loss * (dist.get_rank() == 0)).backward()
    return float(loss.detach())


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    weights: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> Outcome:
    named = dict(model.named_parameters())
    state = {name: {key: whole(value) for key, value in optimizer.state[p].items()} for name, p in named.items()}
    return Outcome(losses, {name: whole(p) for name, p in named.items()}, state)


def train(job: Job, folder: str = "") -> Outcome:
    """Train; with a folder, save there before the last step."""
    model, optimizer = job.build()
    losses = []
    for step in range(STEPS):
        if folder and step == STEPS - 1:
            save_checkpoint(model, optimizer, folder)
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return outcome(model, optimizer, losses)


def resume(job: Job, folder: str, moments: str | None = "int8") -> Outcome:
    """Load and take the last step."""
    model, optimizer = job.build(moments)
    load_checkpoint(model, optimizer, folder)
    loss = backward(model, STEPS - 1)
    optimizer.step()
    return outcome(model, optimizer, [loss])


def loaded(job: Job, folder: str, moments: str | None) -> Outcome:
    model, optimizer = job.build(moments)
    load_checkpoint(model, optimizer, folder)
    return outcome(model, optimizer, [])


def bytes_after_backward(job: Job) -> tuple[int, int, int]:
    """Return metered moments, ``explain``'s bytes for AdamW and at rest, after a step and one more backward."""
    model, optimizer = job.build()
    before = memory_meter().current_bytes
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)
    found: Any = explain(model)
    moments = memory_meter().current_bytes - before - found.gradient_bytes
    return moments, found.optimizer_bytes - 4 * len(list(model.parameters())), found.persistent_bytes


def bytes_per_parameter() -> float:
    """Return the metered bytes per parameter over all ranks, after backward with gathered weights released."""
    before = memory_meter().current_bytes
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    for module in (*model, model):
        fully_shard(module, mp_policy=SPLIT)
    optimizer = AdamW(model.parameters(), moments="int8")
    for _ in range(2):
        optimizer.step()
        model(torch.randn(2, 512)).sum().backward()
    for module in model.modules():
        if isinstance(module, FsdpModule):
            module.reshard()
    return (memory_meter().current_bytes - before) * dist.get_world_size() / (2 * 512 * 512)


def distance_after_spike(spike: float) -> float:
    """Return the distance to weights with FP32 moments, in learning rates, some steps after a larger gradient."""
    found = []
    for moments in (None, "int8"):
        torch.manual_seed(0)
        model: Any = fully_shard(nn.Linear(64, 70, bias=False), mp_policy=INT8)
        optimizer = AdamW(model.parameters(), lr=0.01, moments=moments)
        for step in range(6):
            output = model(torch.randn(5, 64))
            factor = torch.ones_like(output)
            # Three rows have larger gradients: a part of a block of 256 elements.
            factor[:, 5:8] = spike if step == 1 else 1.0
            (output.square() * factor).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.weight.full_tensor().detach())
    return float((found[0] - found[1]).abs().max()) / 0.01


def assert_same(found: Outcome, wanted: Outcome) -> None:
    assert found.losses == wanted.losses[-len(found.losses) :]
    for name, weight in wanted.weights.items():
        assert torch.equal(found.weights[name], weight), name
        assert found.state[name].keys() == wanted.state[name].keys()
        for key, value in wanted.state[name].items():
            assert torch.equal(found.state[name][key], value), (name, key)


def test_one_to_four_ranks_train_to_the_same_bits_and_resume_on_other_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "step")
    (alone,) = run_ranks(1, train, Job())
    assert {key: value.dtype for key, value in alone.state["second.weight"].items()} == {
        "step": torch.float32,
        "exp_avg_codes": torch.uint8,
        "exp_avg_scales": torch.float32,
        "exp_avg_sq_codes": torch.uint8,
        "exp_avg_sq_scales": torch.float32,
    }
    assert alone.state["second.weight"]["exp_avg_scales"].shape == (37,)
    assert set(alone.state["last.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    for found in run_ranks(3, train, Job(("second",)), folder):
        assert_same(found, alone)
    for found in run_ranks(4, train, Job(("first", "last"), "hsdp")):
        assert_same(found, alone)
    for found in run_ranks(2, resume, Job(("first", "second", "last"), "optim"), folder):
        assert_same(found, alone)


def test_split_weights_train_to_the_same_bits_on_two_axes() -> None:
    (alone,) = run_ranks(1, train, Job(policy=SPLIT))
    for found in run_ranks(4, train, Job(("first",), "hfsdp", policy=SPLIT)):
        assert_same(found, alone)


# The square of the second gradient overflows FP32.
@pytest.mark.parametrize("spike", [1e4, 1e30])
def test_after_a_spike_weights_stay_near_those_of_fp32_moments(spike: float) -> None:
    (distance,) = run_ranks(1, distance_after_spike, spike)
    # Four steps later. Adam makes no step longer than a few learning rates.
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
