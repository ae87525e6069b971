"""Link: exposed communication on a simulated link, over the minimum of any schedule.

The layers sleep instead of computing, and collectives take latency + bytes / bandwidth (benchmarks/simulated_link.py).
Exposed communication is the time that a step waits for collectives. If compute is long enough, the minimum is the first
gather and the last reduce-scatter. FSDP2 overlaps reductions on CUDA streams only and reduces synchronously on a CPU,
so its rows say nothing about GPUs.

A second case is dominated by latency: in a ring of 1,024 ranks with 20 us per hop, each collective takes at least 20
ms. The layers' parameters have two dtypes and some are frozen, so each layer has three groups. The minimum is one
collective per layer and phase. Backends other than gloo reduce one dtype at a time, so gradients of two dtypes need two
collectives there; with a reduce_dtype they need one.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.engines import ENGINES, Precision, world_mesh
from benchmarks.harness import Row, Samples, in_turn
from benchmarks.simulated_link import Link, link_world, take_waited_seconds

WIDTH = 64


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, *weights: torch.Tensor) -> torch.Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(*weights)
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Sleeps like a matrix product computes: backward takes twice as long as forward.
        time.sleep(2 * ctx.seconds)
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        return gradients[0], None, *(torch.zeros_like(weight) if is_wanted else None for weight, is_wanted in pairs)


class Layer(nn.Module):
    """A layer with one weight, whose compute takes a given time."""

    def __init__(self, numel: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel // WIDTH, WIDTH))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input after the given time."""
        output: torch.Tensor = _Sleep.apply(x, self.seconds, *self.parameters())  # type: ignore[no-untyped-call]
        return output


class MixedLayer(Layer):
    """Two weights, the second one of another dtype, and a frozen one."""

    def __init__(self, numel: int, seconds: float, dtype: torch.dtype) -> None:
        super().__init__(numel, seconds)
        self.other = nn.Parameter(torch.zeros(numel // WIDTH, WIDTH, dtype=dtype))
        self.frozen = nn.Parameter(torch.zeros(numel // WIDTH, WIDTH), requires_grad=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for sizes, link and compute times."""
    parser.add_argument("--layers", type=int, default=12, help="of the model")
    parser.add_argument("--numel", type=int, default=65536, help="parameters of a layer")
    parser.add_argument("--ranks", type=int, default=8, help="simulated ranks")
    parser.add_argument("--collective", type=float, default=10.0, help="ms that a layer's gather takes")
    parser.add_argument(
        "--compute",
        type=float,
        nargs="+",
        default=[2.0, 1.0, 0.5],
        help="forward of a layer over its gather",
    )
    parser.add_argument("--ring", type=int, default=1024, help="ranks of the case of latency")
    parser.add_argument("--hop", type=float, default=20.0, help="us of latency from rank to rank there")
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each engine")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure each length of compute."""
    seconds, latency = args.collective * 1e-3, args.collective * 1e-4
    remote = args.numel * 4 * (args.ranks - 1) // args.ranks
    rows = []
    with link_world(args.ranks, Link(latency, remote / (seconds - latency))):
        for compute in args.compute:
            case = {"forward over gather": compute, "layers": args.layers, "ranks": args.ranks}
            layers = functools.partial(_layers, args, compute * seconds)
            rows += overlap_rows(
                args, case, layers, least_exposed(args.layers, seconds, compute * seconds), Precision()
            )
    latency = args.hop * 1e-6 * (args.ring - 1)
    layers = functools.partial(_mixed_layers, args, latency)
    with link_world(args.ring, Link(latency, 1e12)):
        for reduce in (torch.float32, None):
            words = "FP32" if reduce else "of two dtypes"
            case = {"gradients": words, "groups": 3, "layers": args.layers, "ranks": args.ring}
            least = least_exposed(args.layers, latency, latency)
            rows += overlap_rows(args, case, layers, least, Precision(reduce=reduce))
    return rows


def _layers(args: argparse.Namespace, seconds: float, engine: str) -> list[Layer]:
    return [Layer(args.numel, seconds) for _ in range(args.layers)]


def _mixed_layers(args: argparse.Namespace, seconds: float, engine: str) -> list[Layer]:
    # FSDP2 does not accept two dtypes in one unit.
    dtype = torch.float32 if engine == "FSDP2" else torch.bfloat16
    return [MixedLayer(args.numel, seconds, dtype) for _ in range(args.layers)]


def overlap_rows(
    args: argparse.Namespace,
    case: Mapping[str, Any],
    make: Callable[[str], list[Layer]],
    least: float,
    precision: Precision,
) -> list[Row]:
    """Return the exposed communication of each engine, in seconds and over the minimum.

    Args:
        case: the case of the rows.
        make: function that returns the layers for an engine.
        least: seconds that no schedule hides.
    """
    steps, mesh = {}, world_mesh()
    for name in ("ours", "FSDP2"):
        model = nn.Sequential(*make(name))
        steps[name] = functools.partial(_step, ENGINES[name](model, list(model), mesh, precision))
    rows = []
    for name, exposed in in_turn(steps, _waited, args.rounds).items():
        of_engine = {"engine": name, **case}
        rows.append(Row("link", of_engine, "exposed communication", "s", Samples(tuple(exposed))))
        share = Samples(tuple(value / least for value in exposed))
        rows.append(Row("link", of_engine, "exposed communication over the least", "", share))
    return rows


def least_exposed(num_layers: int, collective: float, forward: float) -> float:
    """Return the least exposed communication of any schedule, in seconds, with a link each for gathers and reductions.

    The sum of the first gather, the last reduce-scatter, and for each layer but the first the time by which its gather
    is longer than the compute that overlaps with it. Backward computes twice as long as forward and gathers as many
    layers, because the last layer's weights are still gathered.
    """
    others = num_layers - 1
    return 2 * collective + others * (max(collective - forward, 0.0) + max(collective - 2 * forward, 0.0))


def _waited(step: Callable[[], object]) -> float:
    take_waited_seconds()
    step()
    return take_waited_seconds()


def _step(model: nn.Module) -> None:
    model(torch.ones(1, WIDTH, requires_grad=True)).sum().backward()
    model.zero_grad()
