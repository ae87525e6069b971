"""Link: communication that compute does not hide, on a simulated link, over the least that any schedule exposes.

Layers that sleep where they would compute are trained in a world whose collectives take latency + bytes / bandwidth
(benchmarks/simulated_link.py). Exposed is what a step waits for collectives. Where compute is long enough, no schedule
exposes less than the first gather and the last reduce-scatter. FSDP2 reduces synchronously on CPU and overlaps on CUDA
streams only, so its rows say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import torch
from torch import nn

from benchmarks.engines import ENGINES, Precision, world_mesh
from benchmarks.harness import Row, Samples
from benchmarks.simulated_link import Link, link_world, take_waited_seconds

WIDTH = 64


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(weight)
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # As a matrix product: twice the work of forward.
        time.sleep(2 * ctx.seconds)
        return gradients[0], torch.zeros_like(ctx.saved_tensors[0]), None


class Layer(nn.Module):
    """One weight, and compute of a given length."""

    def __init__(self, numel: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel // WIDTH, WIDTH))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input after a while."""
        output: torch.Tensor = _Sleep.apply(x, self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sizes, the link, and how long compute takes."""
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--numel", type=int, default=65536, help="parameters of a layer (default: 65536)")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--collective", type=float, default=10.0, help="ms that a layer's gather takes (default: 10)")
    parser.add_argument(
        "--compute",
        type=float,
        nargs="+",
        default=[2.0, 1.0, 0.5],
        help="forward of a layer over its gather (default: 2 1 0.5)",
    )
    parser.add_argument("--rounds", type=int, default=9)


def run(args: argparse.Namespace) -> list[Row]:
    """Measure each length of compute."""
    seconds, latency = args.collective * 1e-3, args.collective * 1e-4
    remote = args.numel * 4 * (args.ranks - 1) // args.ranks
    rows = []
    with link_world(args.ranks, Link(latency, remote / (seconds - latency))):
        for compute in args.compute:
            rows += overlap_rows(args, seconds, compute)
    return rows


def overlap_rows(args: argparse.Namespace, collective: float, compute: float) -> list[Row]:
    """Return what is exposed of the communication of each engine, in seconds and over the least possible."""
    steps, waits, mesh = {}, {}, world_mesh()
    for name in ("ours", "FSDP2"):
        model = nn.Sequential(*(Layer(args.numel, compute * collective) for _ in range(args.layers)))
        steps[name] = functools.partial(_step, ENGINES[name](model, list(model), mesh, Precision()))
        waits[name] = list[float]()
    for number in range(-2, args.rounds):
        for name in list(steps) if number % 2 else list(steps)[::-1]:
            take_waited_seconds()
            steps[name]()
            if number >= 0:
                waits[name].append(take_waited_seconds())
    least = least_exposed(args.layers, collective, compute * collective)
    rows = []
    for name, exposed in waits.items():
        case = {"engine": name, "forward over gather": compute, "layers": args.layers, "ranks": args.ranks}
        rows.append(Row("link", case, "exposed communication", "s", Samples(tuple(exposed))))
        share = Samples(tuple(value / least for value in exposed))
        rows.append(Row("link", case, "exposed communication over the least", "", share))
    return rows


def least_exposed(num_layers: int, collective: float, forward: float) -> float:
    """Return the seconds that no schedule hides, where gathers and reductions have a link each.

    The first gather and the last reduce-scatter; and where a layer's gather takes longer than the compute beside it,
    the difference, for every layer but the first: in forward, and in backward, which takes twice as long and gathers as
    many, because the last layer's weights are still there.
    """
    others = num_layers - 1
    return 2 * collective + others * (max(collective - forward, 0.0) + max(collective - 2 * forward, 0.0))


def _step(model: nn.Module) -> None:
    model(torch.ones(1, WIDTH, requires_grad=True)).sum().backward()
    model.zero_grad()
