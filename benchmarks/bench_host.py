"""Host: processor time and calls per step that sharding adds to real models, compared with PyTorch FSDP2.

Models are those of benchmarks/host_models.py: Llama, Qwen3 and GPT-2 of transformers (left out where it is not
installed), a layer shaped like Megatron's, one like Llama's, and vectors, in worlds of any size whose collectives do
nothing (benchmarks/null_group.py). A step is forward, backward and zero_grad. The time of the unsharded model in the
same round is subtracted. Rows are microseconds per step, calls of Python and C functions per step, and the ratios of
both to FSDP2's. ``--functions 40`` also prints the functions whose calls this project adds, most first.

These models are narrow, so large weights, kernels and streams cost no time. ``--device cuda`` measures models of
realistic widths, and the processor time of all threads including autograd's. Its rows name the device. If NCCL on the
machine needs no other ranks, ``--group nccl`` measures PyTorch's NCCL group too.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it has it, but untyped

from benchmarks.engines import ENGINES, Precision, world_mesh
from benchmarks.harness import Row, Samples, interleaved, named_by_device, ratio, table
from benchmarks.host_models import MODELS, WIDE_MODELS, NeedsTransformers, Trained
from benchmarks.null_group import null_world

Calls = collections.Counter[str]
PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(),
    "bf16": Precision(torch.bfloat16, torch.bfloat16),
    "bf16, reduced in fp32": Precision(torch.bfloat16, torch.float32),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for models, layers, worlds and rounds."""
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cuda: models of real widths")
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *WIDE_MODELS], help="what to train; all by default")
    parser.add_argument("--layers", type=int, help="sharded layers beside the root; 16 by default, 12 on cuda")
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), help="fp32 by default, all on cuda")
    parser.add_argument("--group", default="null", choices=["null", "nccl"], help="whose collectives are called")
    parser.add_argument("--worlds", type=int, nargs="+", default=[8], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=41, help="measured steps of each engine")
    parser.add_argument("--functions", type=int, default=0, help="print so many functions, by the calls they add")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure every model in every world, or on a CUDA device."""
    if args.device == "cuda":
        return _run_on_cuda(args)
    rows = []
    models, num_layers = args.models or list(MODELS), args.layers or 16
    # Gathered memory is uninitialized, and arithmetic on denormal numbers would take longer than the engines.
    torch.set_flush_denormal(True)
    try:
        for num_ranks in args.worlds:
            with null_world(num_ranks):
                for name in models:
                    case = {"model": name, "layers": num_layers, "ranks": num_ranks}
                    rows += _rows_if_installed(case, args)
    finally:
        torch.set_flush_denormal(False)
    return rows


def result_name(args: argparse.Namespace) -> str:
    """Return the name of the file of results."""
    return named_by_device("host", args.device)


def _rows_if_installed(case: Mapping[str, Any], args: argparse.Namespace) -> list[Row]:
    """Return the rows of one model; without the model's package print that it is left out, and return none."""
    try:
        return measure(case, args.rounds, args.device, args.functions)
    except NeedsTransformers as error:
        print(f"{case['model']} is left out: {error}", file=sys.stderr)
        return []


def _run_on_cuda(args: argparse.Namespace) -> list[Row]:
    rows = []
    # cuDNN's attention asks the GPU for more than its name, which the null device does not have.
    torch.backends.cuda.enable_cudnn_sdp(False)
    for num_ranks in args.worlds:
        with _null_nccl(num_ranks) if args.group == "nccl" else null_world(num_ranks):
            for name in args.models or list(WIDE_MODELS):
                for precision in args.precisions or list(PRECISIONS):
                    case = {"model": name, "layers": args.layers or 12, "ranks": num_ranks, "precision": precision}
                    case |= {"device": torch.cuda.get_device_name(), "group": args.group}
                    rows += _rows_if_installed(case, args)
    return rows


@contextlib.contextmanager
def _null_nccl(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of an NCCL world without other ranks."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=num_ranks, device_id=device)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(case: Mapping[str, Any], rounds: int, device: str = "cpu", num_functions: int = 0) -> list[Row]:
    """Return the rows of one model in the current world.

    Args:
        case: ``model``, of ``MODELS`` or ``WIDE_MODELS``; ``layers``; ``ranks``; ``precision`` other than FP32.
        num_functions: how many of the functions whose calls this project adds to print.
    """
    mesh = world_mesh(device)
    steps = {}
    for name, shard in ENGINES.items():
        trained = {**MODELS, **WIDE_MODELS}[case["model"]](case["layers"], device)
        shard(trained.model, trained.units, mesh, PRECISIONS[case.get("precision", "fp32")])
        steps[name] = functools.partial(step, trained)
    stopwatch = functools.partial(processor_seconds, device)
    seconds = interleaved(steps, rounds=rounds, warmup=5, stopwatch=stopwatch)
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


def processor_seconds(device: str, function: Callable[[], object]) -> float:
    """Return the processor seconds that this process spends in a call; other processes do not count.

    On CUDA the call starts when the GPU has no work left. Otherwise the queue of kernels fills up over several steps,
    and the time in which the host waits for the GPU counts as processor time.
    """
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.process_time()
    function()
    return time.process_time() - start


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
    """Return the calls of each function beyond the plain model's, most first."""
    added = {name: count - plain[name] for name, count in calls.items() if count != plain[name]}
    return sorted(added.items(), key=lambda item: -item[1])


def functions_text(case: Mapping[str, Any], added: list[tuple[str, int]], limit: int) -> str:
    """Return a table of the functions that add most calls, per layer."""
    cells = [[f"calls added in {case['model']}", "a step", "a layer"]]
    cells += [[name, str(count), f"{count / case['layers']:.1f}"] for name, count in added[:limit]]
    return table(cells)
