"""Watch: what comparing the ranks' collectives adds to a training step, in blocks of steps with and without it.

A small model on gloo ranks, so that communication and host work are most of the step. Rows are seconds and ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
import torch.distributed as dist

from benchmarks.engines import Precision, ours, world_mesh
from benchmarks.harness import Row, Samples, ratio
from benchmarks.models import Shape
from benchmarks.torch_engines import make_model
from megatron_fsdp import Watch
from tests.harness import run_ranks

_BLOCK = 5
Times = dict[str, list[tuple[float, float]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the model and the number of rounds."""
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256], help="of the model")
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks")
    parser.add_argument("--rounds", type=int, default=15, help=f"blocks of {_BLOCK} steps of each kind")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure each width."""
    rows = []
    for width in args.widths:
        ranks = run_ranks(args.ranks, train, Shape(8, width, 512, head_width=32), args.rounds, timeout=900.0)
        case = {"width": width, "ranks": args.ranks}
        samples: dict[str, tuple[Samples, Samples]] = {}
        for name in ranks[0]:
            rounds = list(zip(*(times[name] for times in ranks), strict=True))
            wall = Samples(tuple(max(spent[0] for spent in one) for one in rounds))
            samples[name] = wall, Samples(tuple(sum(spent[1] for spent in one) for one in rounds))
        for position, what in enumerate(("wall time", "processor time")):
            for name in samples:
                rows.append(Row("watch", {**case, "run": name}, what, "s", samples[name][position]))
            values = ratio(samples["watched"][position], samples["plain"][position])
            rows.append(Row("watch", case, f"{what}, watched over plain", "", values))
    return rows


def train(shape: Shape, rounds: int) -> Times:
    """Return wall and processor seconds of each block of steps on this rank, watched and plain in turn."""
    model = make_model(shape, "cpu")
    ours(model, list(model.layers), world_mesh("cpu"), Precision())
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1))
    times: Times = {"plain": [], "watched": []}
    for number in range(-1, rounds):
        for name in list(times) if number % 2 else list(times)[::-1]:
            with Watch(model) if name == "watched" else contextlib.nullcontext():
                dist.barrier()
                wall, processor = time.perf_counter(), time.process_time()
                for _ in range(_BLOCK):
                    model(tokens).backward()
                    model.zero_grad()
                spent = time.perf_counter() - wall, time.process_time() - processor
            if number >= 0:
                times[name].append(spent)
    return times
