"""Step: wall and processor time of training steps on gloo ranks, beside FSDP2, FSDP1, DDP and ZeroRedundancyOptimizer.

A GPT and a mixture of experts are trained by all engines in turn, in one run of the same processes, so that what else
the machine does slows all of them; rows are seconds and ratios, round by round. All have torch's fused AdamW; "ours,
flat AdamW" has this project's. "bare" is the least that a sharded step can cost: local compute, collectives of the
same bytes, and AdamW on this rank's shard.

With ``--device cuda`` a Llama-like model is trained beside FSDP2 on one GPU, as rank 0 of worlds whose collectives
do nothing.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.engines import Precision
from benchmarks.harness import Row, Samples, ratio, samples_of
from benchmarks.models import Shape
from benchmarks.null_group import null_world
from benchmarks.trainers import TRAINERS
from tests.harness import run_ranks

PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(torch.bfloat16, torch.float32),
    "bf16, reduced in bf16": Precision(torch.bfloat16, torch.bfloat16),
}
# They have no FP32 main weights beside bf16 ones.
FP32_ONLY = ("DDP", "DDP, ZeroRedundancyOptimizer")
MODELS = ("2x64", "4x256", "moe")
# Name to [rank][round] of (wall seconds, processor seconds).
Times = dict[str, list[tuple[float, float]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to measure and how often."""
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="batch x length, or experts")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=list(PRECISIONS))
    parser.add_argument("--engines", nargs="+", default=list(TRAINERS), choices=list(TRAINERS))
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each engine (default: 9)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64], help="with cuda (default: 8 64)")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure every model in every precision."""
    if args.device == "cuda":
        return gpu_rows(args)
    rows = []
    for name in args.models:
        for precision in args.precisions:
            shape = shape_of(name, args)
            engines = [engine for engine in args.engines if precision == "fp32" or engine not in FP32_ONLY]
            call = (engines, shape, PRECISIONS[precision], args.rounds)
            ranks = run_ranks(args.ranks, train_interleaved, *call, timeout=3000.0)
            rows += step_rows({"model": name, "precision": precision, "ranks": args.ranks}, ranks)
    return rows


def shape_of(name: str, args: argparse.Namespace) -> Shape:
    """Return the sizes that a name and the options stand for."""
    shape = Shape(args.layers, args.width, args.vocabulary, head_width=min(64, args.width))
    if name == "moe":
        return replace(shape, num_experts=4, hidden_ratio=2.0)
    batch, length = map(int, name.split("x"))
    return replace(shape, batch=batch, length=length)


def train_interleaved(engines: Sequence[str], shape: Shape, precision: Precision, rounds: int) -> Times:
    """Train by all engines in turn, and return what each of their steps took on this rank."""
    steps = {name: TRAINERS[name](shape, precision, "cpu") for name in engines}
    generator = torch.Generator().manual_seed(dist.get_rank())
    times: Times = {name: [] for name in engines}
    for number in range(-2, rounds):
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), generator=generator)
        for name in list(engines) if number % 2 else list(engines)[::-1]:
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            steps[name](tokens)
            spent = time.perf_counter() - wall, time.process_time() - processor
            if number >= 0:
                times[name].append(spent)
    return times


def step_rows(case: Mapping[str, str | int | float], ranks: Sequence[Times]) -> list[Row]:
    """Return seconds of each engine, the wall time of the slowest rank and all ranks' processor time, and ratios."""
    wall, processor = {}, {}
    for name in ranks[0]:
        rounds = list(zip(*(times[name] for times in ranks), strict=True))
        wall[name] = Samples(tuple(max(spent[0] for spent in one) for one in rounds))
        processor[name] = Samples(tuple(sum(spent[1] for spent in one) for one in rounds))
    rows = []
    for what, samples in (("wall time", wall), ("processor time", processor)):
        for name, values in samples.items():
            rows.append(Row("step", {**case, "engine": name}, what, "s", values))
        for peer in [name for name in samples if name != "ours" and "ours" in samples]:
            values = ratio(samples["ours"], samples[peer])
            rows.append(Row("step", {**case, "peer": peer}, f"{what} over peer's", "", values))
    return rows


def gpu_rows(args: argparse.Namespace) -> list[Row]:
    """Train a model of 1.3e9 parameters on one GPU, in worlds whose collectives do nothing.

    Raises:
        SystemExit: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda: there is no CUDA device here; leave the option out to measure on the CPU")
    shape = Shape(24, 2048, 32000, batch=4, length=2048, head_width=128, compute=None)
    rows = []
    for num_ranks in args.worlds:
        case = {"model": "llama-like", "precision": "bf16", "ranks": num_ranks}
        with null_world(num_ranks):
            samples = {}
            for name in ("ours", "FSDP2"):
                samples[name] = _gpu_samples(name, shape, args.rounds)
                # The model is gone with that call; its cycles and blocks must not count for the next.
                gc.collect()
                torch.cuda.empty_cache()
                rows.append(Row("step", {**case, "engine": name}, "wall time", "s", samples[name][0]))
                rows.append(Row("step", {**case, "engine": name}, "peak memory", "B", samples[name][1]))
        for index, what in enumerate(("wall time", "peak memory")):
            values = ratio(samples["ours"][index], samples["FSDP2"][index])
            rows.append(Row("step", {**case, "peer": "FSDP2"}, f"{what} over peer's", "", values))
    return rows


def _gpu_samples(name: str, shape: Shape, rounds: int) -> tuple[Samples, Samples]:
    step = TRAINERS[name](shape, PRECISIONS["bf16"], "cuda")
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), device="cuda")
    step(tokens)
    torch.cuda.reset_peak_memory_stats()
    samples = samples_of(lambda: step(tokens), rounds=rounds, synchronize=torch.cuda.synchronize)
    peak = Samples((float(torch.cuda.max_memory_allocated()),) * rounds)
    return samples, peak
