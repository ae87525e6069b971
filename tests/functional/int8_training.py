"""A small model with 8-bit moments, trained so that the sums of its gradients are the same on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dbuffer import memory_meter
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
    """Units besides the root, strategy ("hsdp" on 2 x ranks / 2), seed of stochastic rounding, precision."""

    units: tuple[str, ...] = ()
    strategy: str = "optim_grads_params"
    seed: int | None = None
    policy: MixedPrecisionPolicy = INT8

    def build(self, moments: str | None = "int8") -> tuple[FsdpModule, AdamW]:
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
        seed = self.seed if moments == "int8" else None
        return sharded, AdamW(model.parameters(), lr=1e-2, moments=moments, rounding_seed=seed)


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
    """Return the meter's bytes, what ``explain`` says rests and AdamW adds, after a step and one more backward."""
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
    """Return what the meter holds after backward, gathered weights released, times ranks over the parameters."""
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


def distance_after_spike(spike: float, seed: int | None) -> float:
    """Return how far weights are from those of FP32 moments, in learning rates, some steps after a larger gradient."""
    found = []
    for moments in (None, "int8"):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(64, 70, bias=False), mp_policy=INT8)
        optimizer = AdamW(model.parameters(), lr=0.01, moments=moments, rounding_seed=None if moments is None else seed)
        for step in range(6):
            output = model(torch.randn(5, 64))
            factor = torch.ones_like(output)
            # Larger for three rows: of a block of 256 elements, one part and not the rest.
            factor[:, 5:8] = spike if step == 1 else 1.0
            (output.square() * factor).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.weight.full_tensor().detach())
    return float((found[0] - found[1]).abs().max()) / 0.01
