"""Step: wall and processor time of training steps on gloo ranks, compared with FSDP2 and DDP.

All engines train a GPT and a mixture of experts in turn, in the same processes, so that other work on the machine slows
all of them. Rows are seconds and ratios of each round. All engines use torch's fused AdamW, except "ours, flat AdamW",
which uses this project's. "bare" is the minimum of a sharded step: local compute, collectives of the same bytes, and
AdamW on this rank's shard.

``python -m benchmarks gpu`` compares a Llama-like model with FSDP2 on one GPU.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from benchmarks.allocations import cuda_phases_of, phases_of
from benchmarks.engines import Precision, Step, train_in_turn
from benchmarks.harness import Row, Samples, Times, beside_peers, both, interleaved, ratio
from benchmarks.models import Shape
from benchmarks.null_group import null_world
from benchmarks.trainers import TRAINERS
from tests.harness import run_ranks

PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(torch.bfloat16, torch.float32),
    "bf16, reduced in bf16": Precision(torch.bfloat16, torch.bfloat16),
}
# DDP does not keep FP32 main weights of bf16 weights.
FP32_ONLY = ("DDP",)
MODELS = ("2x64", "4x256", "moe")
LLAMA_LIKE = Shape(24, 2048, 32000, batch=4, length=2048, head_width=128, compute=None)
_NUM_STEPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for models, precisions, engines and rounds."""
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="batch x length, or experts")
    parser.add_argument(
        "--precisions", nargs="+", default=["fp32", "bf16"], choices=list(PRECISIONS), help="of compute and reduction"
    )
    parser.add_argument("--engines", nargs="+", default=list(TRAINERS), choices=list(TRAINERS), help="what to measure")
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks")
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each engine")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--width", type=int, default=512, help="of the model")
    parser.add_argument("--vocabulary", type=int, default=8192, help="of the model")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure every model in every precision."""
    rows = []
    for name in args.models:
        for precision in args.precisions:
            shape = shape_of(name, args)
            engines = [engine for engine in args.engines if precision == "fp32" or engine not in FP32_ONLY]
            call = (engines, shape, PRECISIONS[precision], args.rounds)
            ranks = run_ranks(args.ranks, train_interleaved, *call, timeout=3000.0)
            case = {"model": name, "precision": precision, "ranks": args.ranks}
            rows += step_rows(case, ranks)
    return rows


def shape_of(name: str, args: argparse.Namespace) -> Shape:
    """Return the sizes of a named model, with the changes of the options."""
    shape = Shape(args.layers, args.width, args.vocabulary, head_width=min(64, args.width))
    if name == "moe":
        return replace(shape, num_experts=4, hidden_ratio=2.0)
    batch, length = map(int, name.split("x"))
    return replace(shape, batch=batch, length=length)


def train_interleaved(engines: Sequence[str], shape: Shape, precision: Precision, rounds: int) -> Times:
    """Train with all engines in turn, and return the seconds of each of their steps on this rank."""
    steps = {name: TRAINERS[name](shape, precision, "cpu") for name in engines}
    return train_in_turn(steps, shape, rounds)


def step_rows(case: Mapping[str, str | int | float], ranks: Sequence[Times]) -> list[Row]:
    """Return the seconds of each engine, and the ratios of ours to the others."""
    return [row for what, samples in both(ranks).items() for row in beside_peers(Row("step", case, what, "s"), samples)]


def null_rows(shape: Shape, num_ranks: int, device: str, rounds: int) -> list[Row]:
    """Train in bf16 as rank 0 of a world whose collectives do nothing; return time and memory, and both over FSDP2's.

    Times are measured in turn. Memory is measured for one engine at a time: the peak of allocated bytes, and on a GPU
    also the peak of bytes that the allocator has reserved.

    Args:
        device: "cpu" or "cuda".
        rounds: number of measured steps.
    """
    case = null_case(shape, num_ranks)
    engines = ("ours, flat AdamW", "ours", "FSDP2")
    with null_world(num_ranks):
        memory = {name: _memory_of(name, shape, device) for name in engines}
        steps = {name: TRAINERS[name](shape, PRECISIONS["bf16"], device) for name in engines}
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), device=device)
        functions = {name: lambda step=step: step(tokens) for name, step in steps.items()}
        synchronize = torch.cuda.synchronize if device == "cuda" else None
        seconds = interleaved(functions, rounds=rounds, synchronize=synchronize)
        del steps, functions
    rows = []
    peaks, reserved = ({name: Samples((float(memory[name][i]),)) for name in engines} for i in range(2))
    measured = (("wall time", "s", seconds), ("peak memory", "B", peaks), ("reserved memory", "B", reserved))
    for what, unit, samples in measured[: 3 if device == "cuda" else 2]:
        rows += [Row("step", {**case, "engine": name}, what, unit, samples[name]) for name in engines]
        for name in engines[:-1]:
            values = ratio(samples[name], samples["FSDP2"])
            rows.append(Row("step", {**case, "engine": name, "peer": "FSDP2"}, f"{what} over peer's", "", values))
    return rows


def null_case(shape: Shape, num_ranks: int) -> dict[str, str | int | float]:
    """Return the part of the case that these rows share."""
    model = f"llama-like, {shape.num_layers} layers of {shape.width}"
    return {"model": model, "tokens": shape.batch * shape.length, "precision": "bf16", "ranks": num_ranks}


def _memory_of(name: str, shape: Shape, device: str) -> tuple[int, int]:
    """Return the most bytes that were held in the last of several steps, with all that rests, and reserved for them."""
    reserved = 0
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), device=device)

    def run(begin: Callable[[str], None]) -> Step:
        nonlocal reserved
        step = TRAINERS[name](shape, PRECISIONS["bf16"], device)
        for number in range(_NUM_STEPS):
            begin(f"step {number}")
            step(tokens)
        if device == "cuda":
            reserved = torch.cuda.max_memory_reserved()
        begin("rest")
        return step

    phases = dict(cuda_phases_of(run) if device == "cuda" else phases_of(run))
    # The model is free. Free its reference cycles and cached blocks too, so that the next engine does not count them.
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return phases[f"step {_NUM_STEPS - 1}"].peak, reserved
