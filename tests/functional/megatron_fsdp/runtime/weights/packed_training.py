"""A small model whose matrices travel in 8 bits, with gradients whose sums are the same on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dbuffer import Row, memory_meter, observe_collectives
from megatron_fsdp import AdamW, FsdpModule, MixedPrecisionPolicy, Placements, explain, fully_shard
from tests.harness.oracle import whole


class Net(nn.Module):
    """Matrices that blocks of 32 divide, one that they do not, an expert weight, and biases, which travel whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 96)
        self.second = nn.Linear(96, 64, bias=False)
        self.experts = nn.Parameter(torch.randn(2, 64, 32) * 0.1)
        self.last = nn.Linear(32, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.first(x)))
        return self.last(torch.einsum("bi,eij->bj", x, self.experts))


@dataclass(frozen=True)
class Job:
    """How to gather, units besides the root, whether on two axes, whether rows may be cut anywhere."""

    gather: str | None
    units: tuple[str, ...] = ()
    is_hybrid: bool = False
    cuts_rows: bool = False
    dtype: torch.dtype | None = None

    def build(self) -> FsdpModule:
        torch.manual_seed(0)
        model = Net()
        sizes = (2, dist.get_world_size() // 2) if self.is_hybrid else (dist.get_world_size(),)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])
        placements = Placements.hsdp(0, 1) if self.is_hybrid else Placements.optim_grads_params(0)
        options: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(self.dtype, gather_dtype=self.gather),
            "granularity": Row() if self.cuts_rows else None,
            "reshard_after_forward": True,
        }
        for name in self.units:
            fully_shard(getattr(model, name), mesh, placements, **options)
        sharded = fully_shard(model, mesh, placements, **options)
        for module in model.modules():
            if isinstance(module, FsdpModule):
                module.set_gradient_divide_factor(1)
        return sharded


def backward(model: nn.Module, step: int) -> float:
    """Only rank 0 has gradients other than zero, so every sum over ranks is exact: its own."""
    torch.manual_seed(step)
    loss = model(torch.randn(5, 64)).square().mean()
    (loss * (dist.get_rank() == 0)).backward()
    return float(loss.detach())


def train(job: Job) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = job.build()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: whole(p, p).detach().clone() for name, p in model.named_parameters()}


def used_weights(job: Job) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return main weights, and what compute sees in forward and in backward."""
    model = job.build()
    main = {name: whole(p, p).detach().clone() for name, p in model.named_parameters()}
    seen: list[dict[str, torch.Tensor]] = [{}, {}]

    def note(grid: int) -> None:
        seen[grid].update({name: p.detach().clone() for name, p in model.named_parameters()})

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            note(0)
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            note(1)
            return gradient

    forward = Net.forward
    try:
        Net.forward = lambda self, x: Probe.apply(forward(self, x))
        model(torch.randn(3, 64)).sum().backward()
    finally:
        Net.forward = forward
    return main, seen[0], seen[1]


def traffic(job: Job) -> tuple[list[str], list[str], int, int]:
    """Return the collectives of one step as observed and as ``explain`` says, and the bytes at rest by both."""
    before = memory_meter().current_bytes
    model = job.build()
    rest = memory_meter().current_bytes - before
    optimizer = AdamW(model.parameters(), lr=1e-2)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    calls: list[str] = []
    with observe_collectives(lambda call: calls.append(f"{call.kind} {call.num_bytes}")):
        backward(model, 1)
        optimizer.step()
    report: Any = explain(model)
    said = [
        f"{each.kind} {each.bytes_each}"
        for unit in report.units
        for group in unit.groups
        for each in group.collectives
        for _ in range(each.count)
    ]
    return sorted(calls), sorted(said), rest, report.persistent_bytes
