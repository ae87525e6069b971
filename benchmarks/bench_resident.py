"""Resident: how the memory of training processes grows over many steps on gloo ranks, beside FSDP2's.

Each engine trains the model of ``make train`` in processes of its own, with torch's fused AdamW. What one holds is read
where the kernel counts it, at each tenth of the steps after the first 50. A Linux machine is needed.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.engines import Precision
from benchmarks.harness import Row, Samples, ratio
from benchmarks.models import Shape
from benchmarks.trainers import TRAINERS
from tests.harness import run_ranks

_STATM = Path("/proc/self/statm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sizes, those of ``make train`` unless told otherwise, and how long to train."""
    parser.add_argument("--engines", nargs="+", default=["ours", "FSDP2"], choices=list(TRAINERS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks (default: 2)")
    parser.add_argument("--steps", type=int, default=600, help="of each engine (default: 600)")
    parser.add_argument("--warmup", type=int, default=50, help="steps before the first reading (default: 50)")


def run(args: argparse.Namespace) -> list[Row]:
    """Train by each engine and return its readings, their growth, and ours over the peers'."""
    shape = Shape(
        args.layers, args.width, args.vocabulary, batch=args.batch, length=args.length, head_width=min(32, args.width)
    )
    case = {"steps": args.steps, "ranks": args.ranks}
    found = {
        engine: largest(run_ranks(args.ranks, train, engine, shape, args.steps, args.warmup, fresh=True, timeout=7200))
        for engine in args.engines
    }
    return resident_rows(case, found)


def train(engine: str, shape: Shape, steps: int, warmup: int) -> list[int]:
    """Return the bytes resident after ``warmup`` steps and ten times until the end, on this rank."""
    step = TRAINERS[engine](shape, Precision(), "cpu")
    generator = torch.Generator().manual_seed(dist.get_rank())
    every = max((steps - warmup) // 10, 1)
    readings = []
    for number in range(1, steps + 1):
        step(torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), generator=generator))
        if number >= warmup and (number - warmup) % every == 0:
            readings.append(int(_STATM.read_text().split()[1]) * resource.getpagesize())
    return readings


def largest(ranks: Sequence[Sequence[int]]) -> Samples:
    """Return what the rank that holds most held at each reading."""
    return Samples(tuple(float(max(at_once)) for at_once in zip(*ranks, strict=True)))


def resident_rows(case: Mapping[str, str | int | float], found: Mapping[str, Samples]) -> list[Row]:
    """Return the readings of each engine, how far they rise above the first, and ours over each peer's."""
    rows = []
    for engine, samples in found.items():
        first = samples.values[0]
        rise = Samples((max(samples.values) / first,))
        rows.append(Row("resident", {**case, "engine": engine}, "resident memory", "B", samples))
        rows.append(Row("resident", {**case, "engine": engine}, "most resident memory over the first", "", rise))
    for peer in [engine for engine in found if engine != "ours" and "ours" in found]:
        values = ratio(found["ours"], found[peer])
        rows.append(Row("resident", {**case, "peer": peer}, "resident memory over peer's", "", values))
    return rows
