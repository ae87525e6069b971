"""Host: processor time and calls per step that sharding adds to real models, beside PyTorch FSDP2.

Models are those of benchmarks/host_models.py: Llama, Qwen3 and GPT-2 of transformers (left out where it is not
installed), a layer shaped like Megatron's, one like Llama's, and vectors, in worlds of any size whose collectives do
nothing (benchmarks/null_group.py). A step is forward, backward and zero_grad. What a step of the unsharded model takes
in the same round is subtracted; rows are microseconds per step, calls of Python and C functions per step, and both over
FSDP2's. ``--functions 40`` also prints the functions whose calls this project adds, most first.
"""

from __future__ import annotations

import argparse
import collections
import functools
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch

from benchmarks.engines import ENGINES, Precision, world_mesh
from benchmarks.harness import Row, Samples, interleaved, ratio, table
from benchmarks.host_models import MODELS, NeedsTransformers, Trained
from benchmarks.null_group import null_world

Calls = collections.Counter[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the models, their number of layers, the worlds and the number of rounds."""
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="what to train")
    parser.add_argument("--layers", type=int, default=16, help="sharded layers beside the root")
    parser.add_argument("--worlds", type=int, nargs="+", default=[8], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=41, help="measured steps of each engine")
    parser.add_argument("--functions", type=int, default=0, help="print so many functions, by the calls they add")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure every model in every world."""
    rows = []
    # Gathered memory holds anything, and arithmetic on denormal numbers would take longer than the engines.
    torch.set_flush_denormal(True)
    try:
        for num_ranks in args.worlds:
            with null_world(num_ranks):
                for name in args.models:
                    case = {"model": name, "layers": args.layers, "ranks": num_ranks}
                    try:
                        rows += measure(case, args.rounds, num_functions=args.functions)
                    except NeedsTransformers as error:
                        print(f"{name} is left out: {error}", file=sys.stderr)
    finally:
        torch.set_flush_denormal(False)
    return rows


def measure(case: Mapping[str, Any], rounds: int, device: str = "cpu", num_functions: int = 0) -> list[Row]:
    """Return the rows of one model in the world that there is.

    Args:
        case: ``model``, one of ``MODELS``; ``layers``; ``ranks``.
        num_functions: print so many of the functions whose calls this project adds.
    """
    mesh = world_mesh(device)
    steps = {}
    for name, shard in ENGINES.items():
        trained = MODELS[case["model"]](case["layers"], device)
        shard(trained.model, trained.units, mesh, Precision())
        steps[name] = functools.partial(step, trained)
    # The host's own seconds: what other processes take does not count.
    seconds = interleaved(steps, rounds=rounds, warmup=5, clock=time.process_time)
    calls = {name: calls_of(run_step) for name, run_step in steps.items()}
    if num_functions:
        print(functions_text(case, added_calls(calls["ours"], calls["plain"]), num_functions))
    rows = []
    engines = [name for name in steps if name != "plain"]
    times = {name: added_microseconds(seconds[name], seconds["plain"]) for name in engines}
    counts = {name: Samples((float(calls[name].total() - calls["plain"].total()),)) for name in engines}
    for what, unit, added in (("host time", "us", times), ("calls", "", counts)):
        rows += [
            Row("host", {**case, "engine": name}, f"{what} added to a step", unit, added[name]) for name in engines
        ]
        rows.append(Row("host", case, f"{what} over FSDP2's", "", ratio(added["ours"], added["FSDP2"])))
    return rows


def step(trained: Trained) -> None:
    """Run the model forward and backward, and drop the gradients."""
    trained.loss().backward()
    trained.model.zero_grad()


def added_microseconds(seconds: Samples, plain: Samples) -> Samples:
    """Return, round by round, the microseconds that a step takes beyond the plain model's."""
    pairs = zip(seconds.values, plain.values, strict=True)
    return Samples(tuple(1e6 * (value - without) for value, without in pairs))


def calls_of(function: Callable[[], object]) -> Calls:
    """Return how often each function of Python and of C is called while ``function`` runs, in this thread."""
    calls: Calls = collections.Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            calls[f"{'/'.join(code.co_filename.split('/')[-2:])}:{code.co_qualname}"] += 1
        elif event == "c_call":
            calls[f"C: {getattr(argument, '__qualname__', argument)}"] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    # The call that ends the count.
    calls["C: setprofile"] -= 1
    return +calls


def added_calls(calls: Calls, plain: Calls) -> list[tuple[str, int]]:
    """Return functions with the calls of them beyond the plain model's, most first."""
    added = {name: count - plain[name] for name, count in calls.items() if count != plain[name]}
    return sorted(added.items(), key=lambda item: -item[1])


def functions_text(case: Mapping[str, Any], added: list[tuple[str, int]], limit: int) -> str:
    """Return a table of the functions that add most calls, per layer."""
    cells = [[f"calls added in {case['model']}", "a step", "a layer"]]
    cells += [[name, str(count), f"{count / case['layers']:.1f}"] for name, count in added[:limit]]
    return table(cells)
