"""Muon: one optimizer step by the ownership plan, beside every rank gathering and computing every matrix.

The matrices of a GPT are stepped over gloo ranks with gradients that are there already: by this library's ``Muon``,
and by ``torch.optim.Muon`` over the same sharded parameters, whose operators gather whole matrices on every rank. Both
compute Newton-Schulz in FP32, as CPUs without bf16 units take a hundred times as long in bf16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from benchmarks.engines import world_mesh
from benchmarks.harness import Row, Times, beside_peers, both, ranks_in_turn
from megatron_fsdp import Muon, fully_shard
from tests.harness import run_ranks


class Layer(nn.Module):
    """The four matrices of a GPT layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        self.linears = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the size of the model, the ranks and the number of rounds."""
    parser.add_argument("--layers", type=int, default=8, help="of the model, four matrices each")
    parser.add_argument("--width", type=int, default=512, help="of the model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="gloo ranks")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure each number of ranks."""
    rows: list[Row] = []
    for num_ranks in args.ranks:
        case = {"layers": args.layers, "width": args.width, "ranks": num_ranks}
        ranks = run_ranks(num_ranks, step_both_ways, args.layers, args.width, args.rounds, timeout=1800.0)
        for what, samples in both(ranks).items():
            rows += beside_peers(Row("muon", case, f"step, {what}", "s"), samples, "owners", "way")
    return rows


def step_both_ways(layers: int, width: int, rounds: int) -> Times:
    """Return what the steps of each way take on this rank, in turn."""
    steps = {"owners": _owners(layers, width), "gathered everywhere": _gathered(layers, width)}
    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", _in_fp32):
        return ranks_in_turn(steps, rounds, warmup=1)


def _owners(layers: int, width: int) -> Callable[[], Any]:
    return Muon(_parameters(layers, width), ns_dtype=torch.float32).step


def _gathered(layers: int, width: int) -> Callable[[], Any]:
    return torch.optim.Muon(_parameters(layers, width)).step


def _parameters(layers: int, width: int) -> list[nn.Parameter]:
    """Return sharded parameters with gradients."""
    torch.manual_seed(0)
    mesh = world_mesh()
    model = nn.Sequential(*(Layer(width) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh)
    fully_shard(model, mesh)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape)
        whole = DTensor.from_local(gradient, mesh, [Replicate()], run_check=False)
        parameter.grad = torch.zeros_like(parameter).copy_(whole)
    parameters = list(model.parameters())
    # Groups hold their parameters weakly.
    parameters[0].__dict__["model"] = model
    return parameters


def _in_fp32(matrix: torch.Tensor, coefficients: Sequence[float], num_steps: int, eps: float) -> torch.Tensor:
    """Do what torch's function does, without its rounding to bf16."""
    a, b, c = coefficients
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x
