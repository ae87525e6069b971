"""Watch: cost of comparing the ranks' collectives, in blocks of training steps with and without it.

The model is small and runs on gloo ranks, so communication and host work are most of a step. Rows are seconds and
ratios. Another row is the time of one comparison of replicas, over a step of the same model with ZeRO-0.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

from benchmarks.engines import Precision, make_model, ours, world_mesh
from benchmarks.harness import Row, Samples, Times, both, ranks_in_turn, ratio
from benchmarks.models import Shape
from megatron_fsdp import Placements, Watch, fully_shard
from tests.harness import run_ranks

_BLOCK = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for widths and rounds."""
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256], help="of the model")
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks")
    parser.add_argument("--rounds", type=int, default=15, help=f"blocks of {_BLOCK} steps of each kind")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure each width."""
    rows = []
    for width in args.widths:
        ranks = run_ranks(args.ranks, train, _shape(width), args.rounds, timeout=900.0)
        case = {"width": width, "ranks": args.ranks}
        for what, samples in both(ranks).items():
            rows += [Row("watch", {**case, "run": name}, what, "s", values) for name, values in samples.items()]
            values = ratio(samples["watched"], samples["plain"])
            rows.append(Row("watch", case, f"{what}, watched over plain", "", values))
        spent = list(zip(*run_ranks(args.ranks, compare, _shape(width), args.rounds, timeout=900.0), strict=True))
        steps, comparisons = (Samples(tuple(max(times[part] for times in one) for one in spent)) for part in (0, 1))
        rows.append(
            Row("watch", case, "wall time, one comparison of replicas over a step", "", ratio(comparisons, steps))
        )
    return rows


def _shape(width: int) -> Shape:
    return Shape(8, width, 512, head_width=32)


def compare(shape: Shape, rounds: int) -> list[tuple[float, float]]:
    """Return seconds of a step on this rank, and of a comparison of replicas after it, of each round but the first."""
    model = make_model(shape, "cpu")
    for module in (*model.layers, model):
        fully_shard(module, world_mesh("cpu"), Placements.no_shard())
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1))
    times = []
    with Watch(model, replica_interval=1_000_000) as watch:
        for _ in range(rounds + 1):
            dist.barrier()
            start = time.perf_counter()
            model(tokens).backward()
            model.zero_grad()
            middle = time.perf_counter()
            watch.check()
            times.append((middle - start, time.perf_counter() - middle))
    return times[1:]


def train(shape: Shape, rounds: int) -> Times:
    """Return wall and processor seconds of each block of steps on this rank; watched and plain blocks alternate."""
    model = make_model(shape, "cpu")
    ours(model, list(model.layers), world_mesh("cpu"), Precision())
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1))

    def plain() -> None:
        for _ in range(_BLOCK):
            model(tokens).backward()
            model.zero_grad()

    def watched() -> None:
        with Watch(model):
            plain()

    return ranks_in_turn({"plain": plain, "watched": watched}, rounds, warmup=1)
