"""GPU: all measurements that need one GPU, in one run of under eight minutes, with a verdict on each target.

With several GPUs, ``torchrun --nproc-per-node 8 -m benchmarks gpu`` compares whole steps with FSDP2's on real ranks.

Sections: kernels compared with a device copy; the optimizer's step; training steps of a Llama-like model compared with
FSDP2, as rank 0 of worlds whose collectives do nothing; weight gradients multiplied into place; memory by phase
compared with the forecast; a step in a CUDA graph; and host time. An error in one section does not stop the next.

``--device cpu --small`` runs all sections with tiny sizes on a machine without a GPU; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import megatron_fsdp
from benchmarks import bench_host, bench_kernels, bench_memory, bench_step
from benchmarks.allocations import cuda_phases_of, phases_of
from benchmarks.captured_step import captured_rows
from benchmarks.engines import LEARNING_RATE, Precision, fsdp2, make_model, ours, world_mesh
from benchmarks.harness import Row, Samples, interleaved, named_by_device, ratio, table
from benchmarks.models import Shape
from benchmarks.null_group import null_world
from benchmarks.ranked_step import is_ranked, joined, ranked_rows

BF16 = Precision(torch.bfloat16, torch.float32)
LIMIT_S = 450.0


@dataclass(frozen=True, slots=True)
class Setup:
    """The device, and the sizes to measure.

    Attributes:
        device: "cuda" or "cpu". is_small: take tiny sizes. rounds: measured calls of everything.
        worlds: numbers of ranks for whole steps. batches: sequences of 2048 tokens on a rank, for the same.
    """

    device: str
    is_small: bool
    rounds: int
    worlds: tuple[int, ...]
    batches: tuple[int, ...]

    @property
    def synchronize(self) -> Callable[[], None] | None:
        """Return the function that waits for the device."""
        return torch.cuda.synchronize if self.device == "cuda" else None

    @property
    def llama_like(self) -> Shape:
        """A model of 1.3e9 parameters, or a tiny one."""
        small = Shape(2, 32, 64, batch=1, length=8, head_width=8, compute=None)
        return small if self.is_small else bench_step.LLAMA_LIKE


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a metric's rows: a maximum or a minimum."""

    bench: str
    metric: str
    most: float | None = None
    least: float | None = None

    def is_about(self, row: Row) -> bool:
        """Return whether this target applies to a row."""
        return (row.bench, row.metric) == (self.bench, self.metric)

    def is_met_by(self, row: Row) -> bool:
        """Return whether the row's median is within the target."""
        value = row.samples.median
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)

    def __str__(self) -> str:
        return f"<= {self.most:g}" if self.most is not None else f">= {self.least:g}"


TARGETS = (
    Target("kernels", "rate over that of a copy", least=0.9),
    Target("optimizer", "step of the flat AdamW over FSDP2's", most=1.0),
    Target("step", "wall time over peer's", most=0.95),
    # Allocated bytes equal FSDP2's, because activations make the peak. The bytes that the allocator reserves differ. On
    # the null CUDA machine they are 1.002 of FSDP2's at 8,192 tokens on 8 ranks, and less for Llama-3-8B
    # (tests/nullcuda/memory.py). At 2,048 tokens they are 1.03 on 8 ranks and 1.09 on 64, which misses this target: the
    # whole model, which both engines build on the GPU, takes more memory there than a step, and beside it fully_shard
    # allocates each unit's buffers once, to make views (docs/design/storage.md).
    Target("step", "reserved memory over peer's", most=1.02),
    Target("ranked step", "wall time over peer's", most=1.0),
    Target("ranked step", "difference of the loss from peer's", most=0.01),
    Target("fused gradients", "forward and backward, fused over unfused", most=1.0),
    Target("fused gradients", "peak memory, fused over unfused", most=1.0),
    Target("memory", "peak in forward over the forecast", most=1.1),
    Target("memory", "peak in backward over the forecast", most=1.1),
    Target("captured step", "values that differ after replays", most=0.0),
    Target("captured step", "replay over step", most=1.0),
    # 0.47 on a CPU (benchmarks/results/host.json, llama-like); on a GPU both also pay for streams and events.
    Target("host", "host time over FSDP2's", most=0.5),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the device, the sizes and the time limit."""
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="where")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to rehearse")
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS), help="what to measure")
    parser.add_argument("--rounds", type=int, default=11, help="measured calls of everything")
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64], help="for whole steps")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="for whole steps")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which no section is begun")


def run(args: argparse.Namespace) -> list[Row]:
    """Run all sections.

    Raises:
        SystemExit: there is no GPU.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"benchmarks gpu: there is no CUDA device here (torch {torch.__version__}); run it on a machine with one, "
            f"or rehearse with --device cpu --small"
        )
    setup = Setup(args.device, args.small, args.rounds, tuple(args.worlds), tuple(args.batches))
    started, rows = time.monotonic(), []
    if args.device == "cpu":
        rows.append(_note("all", "rehearsal", "what the CPU's numbers miss or meet says nothing about a GPU"))
    if is_ranked():
        found = _ranked(setup)
        return [*rows, *found] if found else []
    if torch.cuda.device_count() > 1:
        again = f"torchrun --nproc-per-node {torch.cuda.device_count()} -m benchmarks gpu"
        rows.append(_note("ranked step", "left out", f"one process; {again} compares steps on real ranks"))
    for name in args.sections:
        if time.monotonic() - started > args.limit:
            rows.append(_note(name, "left out", f"{args.limit:g} s were over (--limit)"))
            continue
        begun = time.monotonic()
        try:
            rows += SECTIONS[name](setup)
        # If a kernel does not compile on this GPU, report it and run the other sections.
        except Exception as error:
            traceback.print_exc()
            rows.append(_note(name, "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        _forget(setup.device)
    return rows


def result_name(args: argparse.Namespace) -> str:
    """Return the name of the file of results: ``gpu-``, the device's and, of several ranks, their number."""
    name = named_by_device("gpu", "cuda") if args.device == "cuda" else "gpu-rehearsal"
    return f"{name}-{os.environ['WORLD_SIZE']}-ranks" if is_ranked() else name


def rows_text(rows: Sequence[Row]) -> str:
    """Return the table of targets: target value, measured value, and whether the target is met."""
    cells = [["what", "wanted", "measured", "spread", "verdict"]]
    for row in rows:
        about = ", ".join(value if isinstance(value, str) else f"{name} {value}" for name, value in row.case.items())
        for target in [target for target in TARGETS if target.is_about(row)][:1]:
            verdict = "met" if target.is_met_by(row) else "MISSED"
            spread = f"{row.samples.spread:.0%}" if row.samples.rounds > 1 else "-"
            measured = f"{row.samples.median:.3f}"
            cells.append([f"{row.bench}: {row.metric} ({about})", str(target), measured, spread, verdict])
        if row.bench == "gpu":
            cells.append([f"{about}: {row.notes['why']}", "", "", "", row.metric.upper()])
    verdicts = [line[-1] for line in cells[1:]]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict.lower()}" for verdict in dict.fromkeys(verdicts))
    return f"{table(cells)}\n{counts or 'no section has run'}"


# ---------------------------------------------------------------------- sections


def kernels(setup: Setup) -> list[Row]:
    """Compare every kernel with a copy; the smallest operand is 512 MiB, far beyond any cache."""
    return bench_kernels.kernel_rows(1 << (12 if setup.is_small else 28), torch.device(setup.device), setup.rounds)


def optimizer(setup: Setup) -> list[Row]:
    """Compare steps of the flat AdamW with those of torch's fused AdamW on FSDP2's parameters."""
    shape = replace(setup.llama_like, batch=1)
    case: dict[str, str | int | float] = {"precision": "bf16", "ranks": 8}
    with null_world(8):
        mine, theirs = (make_model(shape, setup.device) for _ in range(2))
        ours(mine, list(mine.layers), world_mesh(setup.device), BF16)
        fsdp2(theirs, list(theirs.layers), world_mesh(setup.device), BF16)
        flat = megatron_fsdp.AdamW(mine.parameters(), lr=LEARNING_RATE)
        fused = torch.optim.AdamW(theirs.parameters(), lr=LEARNING_RATE, fused=True)
        for model in (mine, theirs):
            model(torch.zeros(1, shape.length + 1, dtype=torch.long, device=setup.device)).backward()
        steps: dict[str, Callable[[], object]] = {"ours, flat AdamW": flat.step, "FSDP2": fused.step}
        seconds = interleaved(steps, rounds=setup.rounds, synchronize=setup.synchronize)
    rows = [Row("optimizer", {**case, "engine": name}, "step", "s", samples) for name, samples in seconds.items()]
    values = ratio(seconds["ours, flat AdamW"], seconds["FSDP2"])
    return [*rows, Row("optimizer", case, "step of the flat AdamW over FSDP2's", "", values)]


def steps(setup: Setup) -> list[Row]:
    """Compare whole training steps."""
    rows = []
    for batch in setup.batches:
        shape = replace(setup.llama_like, batch=batch)
        for num_ranks in setup.worlds:
            rows += bench_step.null_rows(shape, num_ranks, setup.device, setup.rounds)
            _forget(setup.device)
    return rows


# Tokens, width of the input, width of the output.
PRODUCTS = ((2048, 4096, 4096), (8192, 4096, 4096), (2048, 4096, 11008), (2048, 11008, 4096), (8192, 2048, 32000))


def fused_gradients(setup: Setup) -> list[Row]:
    """Compare linear layers whose weight gradients are written into the packed buffer with layers that copy them."""
    rows = []
    for tokens, width, out in ((8, 16, 24), (5, 7, 3)) if setup.is_small else PRODUCTS:
        case = {"tokens": tokens, "width": width, "out": out}
        with null_world(8):
            peaks = {name: Samples((float(_peak_of_products(setup, name, case)),)) for name in ("fused", "unfused")}
            calls = {name: _products(setup, name == "fused", case) for name in ("fused", "unfused")}
            seconds = interleaved(calls, rounds=setup.rounds, synchronize=setup.synchronize)
            del calls
        for what, unit, samples in (("forward and backward", "s", seconds), ("peak memory", "B", peaks)):
            rows += [Row("fused gradients", {**case, "run": name}, what, unit, samples[name]) for name in samples]
            values = ratio(samples["fused"], samples["unfused"])
            rows.append(Row("fused gradients", case, f"{what}, fused over unfused", "", values))
    return rows


def _products(setup: Setup, is_fused: bool, case: Mapping[str, int]) -> Callable[[], None]:
    """Return forward and backward of four units of one linear layer each, in bf16."""
    policy = megatron_fsdp.MixedPrecisionPolicy(
        torch.bfloat16, torch.bfloat16, main_grads_dtype=torch.bfloat16, fuse_weight_gradients=is_fused
    )
    place: dict[str, Any] = {"dtype": torch.bfloat16, "device": setup.device}
    layers = [nn.Linear(case["width"], case["out"], bias=False, **place) for _ in range(4)]
    mesh = world_mesh(setup.device)
    for layer in layers:
        megatron_fsdp.fully_shard(layer, mesh, mp_policy=policy)
    x = torch.ones(case["tokens"], case["width"], requires_grad=True, **place)
    gradient = torch.ones(case["tokens"], case["out"], **place)

    def call() -> None:
        x.grad = None
        for layer in layers:
            layer(x).backward(gradient)
            layer.zero_grad()

    return call


def _peak_of_products(setup: Setup, name: str, case: Mapping[str, int]) -> int:
    def measured(begin: Callable[[str], None]) -> Callable[[], None]:
        call = _products(setup, name == "fused", case)
        # The first call allocates the workspace of matrix products.
        call()
        begin("steady")
        call()
        begin("rest")
        return call

    phases = dict(cuda_phases_of(measured) if setup.device == "cuda" else phases_of(measured))
    return phases["steady"].peak


def memory(setup: Setup) -> list[Row]:
    """Compare the peaks of forward and backward with the forecast of explain() before the first step."""
    sizes = (2, 32, 64) if setup.is_small else (12, 2048, 32000)
    shape = Shape(*sizes, batch=1, length=2, head_width=8 if setup.is_small else 128, compute=None)
    rows = []
    for num_ranks in setup.worlds:
        with null_world(num_ranks):
            case: dict[str, str | int | float] = {"precision": "bf16", "ranks": num_ranks}
            rows += bench_memory.peak_rows(case, shape, bench_memory.PRECISIONS["bf16"], setup.device)
        _forget(setup.device)
    return rows


def host(setup: Setup) -> list[Row]:
    """Compare the host time that the engines add to a step."""
    num_layers = 2 if setup.is_small else 24
    with null_world(8):
        return bench_host.measure({"model": "llama-like", "layers": num_layers, "ranks": 8}, setup.rounds, setup.device)


def captured_step(setup: Setup) -> list[Row]:
    """Compare replays of a captured step with steps."""
    return captured_rows(setup.llama_like, BF16, setup.device, setup.rounds)


SECTIONS: dict[str, Callable[[Setup], list[Row]]] = {
    "kernels": kernels,
    "optimizer": optimizer,
    "step": steps,
    "fused gradients": fused_gradients,
    "memory": memory,
    "captured step": captured_step,
    "host": host,
}


def _ranked(setup: Setup) -> list[Row]:
    """Compare whole steps on the ranks that torchrun has started; on rank 0, rows of all of them."""
    rows = []
    with joined(setup.device):
        for batch in setup.batches:
            shape = replace(setup.llama_like, batch=batch)
            for name in ("bf16", "bf16, reduced in bf16"):
                rows += ranked_rows(shape, bench_step.PRECISIONS[name], setup.device, setup.rounds, name)
                _forget(setup.device)
    return rows


def _note(section: str, what: str, why: str) -> Row:
    return Row("gpu", {"section": section}, what, "", Samples((1.0,)), notes={"why": why})


def _forget(device: str) -> None:
    """Release the memory of a section."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
