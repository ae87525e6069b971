"""Invariance: time of a step with ``MixedPrecisionPolicy(reduction="invariant")`` over the default's, on gloo ranks.

Both policies train a GPT in turn, in the same processes. Rows are seconds and ratios of each round.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import megatron_fsdp
from benchmarks.engines import LEARNING_RATE, Step, make_model, train_in_turn
from benchmarks.harness import Row, Times, both, ratio
from benchmarks.models import Shape
from tests.harness import run_ranks

__all__ = ["add_arguments", "run"]

MESHES = {"2": (2,), "4": (4,), "2x2": (2, 2)}
# The two values of a policy's ``reduction``.
REDUCTIONS = ("default", "invariant")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for meshes, wire dtypes, microbatches and rounds."""
    parser.add_argument("--meshes", nargs="+", default=["2", "4"], choices=list(MESHES), help="gloo ranks; 2x2: HSDP")
    parser.add_argument("--wires", nargs="+", default=["fp32"], choices=["fp32", "bf16"], help="reduce_dtype")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4], help="of each rank in a step")
    parser.add_argument("--rounds", type=int, default=15, help="measured steps of each")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--width", type=int, default=512, help="of the model")
    parser.add_argument("--tokens", type=int, default=128, help="of a microbatch, in two samples")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure every mesh, wire and number of microbatches."""
    rows = []
    shape = Shape(args.layers, args.width, 8192, batch=2, length=args.tokens // 2, head_width=64)
    for mesh in args.meshes:
        sizes = MESHES[mesh]
        for wire in args.wires:
            for microbatches in args.microbatches:
                call = (shape, sizes, wire, microbatches, args.rounds)
                ranks = run_ranks(torch.Size(sizes).numel(), train, *call, timeout=3000.0)
                rows += rows_of({"mesh": mesh, "wire": wire, "microbatches": microbatches}, ranks)
    return rows


def train(shape: Shape, sizes: Sequence[int], wire: str, microbatches: int, rounds: int) -> Times:
    """Train with both policies in turn, and return the seconds of each of their steps on this rank."""
    steps = {name: step_of(name, shape, sizes, wire, microbatches) for name in REDUCTIONS}
    return train_in_turn(steps, shape, rounds)


def step_of(name: str, shape: Shape, sizes: Sequence[int], wire: str, microbatches: int) -> Step:
    """Return a step of several microbatches, with gradients divided by their number on all ranks."""
    model = make_model(shape, "cpu")
    strategy = megatron_fsdp.Placements.hsdp(0, 1) if len(sizes) == 2 else None
    policy = megatron_fsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if wire == "bf16" else None, reduction=name)
    mesh = init_device_mesh("cpu", tuple(sizes))
    for module in (*model.layers, model):
        megatron_fsdp.fully_shard(module, mesh, strategy, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, megatron_fsdp.FsdpModule):
            module.set_gradient_divide_factor(microbatches * dist.get_world_size())
    optimizer = megatron_fsdp.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(tokens: torch.Tensor) -> None:
        for number in range(microbatches):
            with megatron_fsdp.microbatch(model, is_last=number == microbatches - 1):
                model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def rows_of(case: Mapping[str, str | int | float], ranks: Sequence[Times]) -> list[Row]:
    """Return each policy's seconds (of the slowest rank, and of all processors) and their ratio."""
    rows = []
    for what, samples in both(ranks).items():
        rows += [Row("invariance", {**case, "reduction": name}, what, "s", samples[name]) for name in samples]
        rows.append(
            Row("invariance", case, f"{what} over default's", "", ratio(samples["invariant"], samples["default"]))
        )
    return rows
