"""Memory: peaks by phase against FSDP2's and the report's forecast, persistent bytes, and bytes moved by operators.

One process is rank 0 of a world whose collectives do nothing. Peaks are those of PyTorch's CPU allocator in a step of a
GPT on very few tokens, so that almost all memory is weights, gradients and optimizer state. Bytes moved are the bytes
per parameter that operators read and write in forward and backward, without matrix products and collectives, minus
those of a plain model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import torch
from torch import nn

import megatron_fsdp
from benchmarks.allocations import MovedBytes, PhaseMemory, cuda_phases_of, phases_of
from benchmarks.engines import ENGINES, Precision, make_model, world_mesh
from benchmarks.harness import Row, Samples
from benchmarks.models import Model, Shape
from benchmarks.null_group import null_world

PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(torch.bfloat16, torch.bfloat16),
    "bf16, reduced in fp32": Precision(torch.bfloat16, torch.float32),
    "bf16, not fused": Precision(torch.bfloat16, torch.bfloat16, fuses=False),
    "bf16, bf16 gradients": Precision(torch.bfloat16, torch.bfloat16, main_grads=torch.bfloat16),
    "bf16, split main weights": Precision(torch.bfloat16, torch.bfloat16, is_split=True),
}
PHASES = ("forward", "backward", "step")
NUM_STEPS = 3
WHOLE_STEP = "peak of the whole step with what rests"
Case = Mapping[str, str | int | float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for model and worlds."""
    parser.add_argument("--layers", type=int, default=12, help="of the model")
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--vocabulary", type=int, default=1024, help="of the model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64], help="of the worlds")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))


def run(args: argparse.Namespace) -> list[Row]:
    """Measure every precision in every world."""
    # Slow, but casts of weights, kept for backward, would hide the engines' memory.
    sizes = (args.layers, args.width, args.vocabulary)
    shape = Shape(*sizes, batch=1, length=2, head_width=min(args.width, 64), compute=None)
    rows: list[Row] = []
    torch.set_flush_denormal(True)
    try:
        for num_ranks in args.ranks:
            with null_world(num_ranks):
                for name in args.precisions:
                    case = {"precision": name, "ranks": num_ranks}
                    rows += peak_rows(case, shape, PRECISIONS[name]) + moved_rows(case, shape, PRECISIONS[name])
    finally:
        torch.set_flush_denormal(False)
    return rows


def peak_rows(case: Case, shape: Shape, precision: Precision, device: str = "cpu") -> list[Row]:
    """Return the peaks of ours and of FSDP2's third step, their ratios, and ours over the forecast."""
    phases, num_parameters = {}, _num_parameters(shape)
    forecast = _forecast(shape, precision, device)
    measure = cuda_phases_of if device == "cuda" else phases_of
    for engine in ("ours", "FSDP2"):
        phases[engine] = dict(measure(lambda begin, engine=engine: _train(engine, shape, precision, device, begin)))  # type: ignore[misc]
    rows = []
    for engine, found in phases.items():
        rest = found["forward"].start
        for phase in PHASES:
            rows.append(_row({**case, "engine": engine}, f"peak in {phase} above rest", "B", found[phase].peak - rest))
        share = rest * int(case["ranks"]) / num_parameters
        rows.append(_row({**case, "engine": engine}, "bytes at rest per parameter, all ranks", "B", share))
    for phase in PHASES:
        mine, peer = (_above_rest(phases[engine], phase) for engine in ("ours", "FSDP2"))
        rows.append(_row(case, f"peak in {phase} over FSDP2's", "", mine / peer))
        if phase in forecast:
            rows.append(_row(case, f"peak in {phase} over the forecast", "", mine / forecast[phase]))
    mine, peer = (phases[engine]["forward"].start for engine in ("ours", "FSDP2"))
    rows.append(_row(case, "bytes at rest over FSDP2's", "", mine / peer))
    for engine, found in phases.items():
        peak = max(found[phase].peak for phase in PHASES)
        rows.append(_row({**case, "engine": engine}, WHOLE_STEP, "B", peak))
    mine, peer = (max(found[phase].peak for phase in PHASES) for found in phases.values())
    rows.append(_row(case, "peak of the whole step with what rests over FSDP2's", "", mine / peer))
    return rows


def moved_rows(case: Case, shape: Shape, precision: Precision) -> list[Row]:
    """Return the bytes that each engine's operators move per parameter and microbatch beyond the plain model's."""
    moved = {engine: _moved(engine, shape, precision) / _num_parameters(shape) for engine in ENGINES}
    rows = [
        _row({**case, "engine": engine}, "bytes moved per parameter beyond plain", "B", moved[engine] - moved["plain"])
        for engine in ("ours", "FSDP2")
    ]
    mine, peer = (moved[engine] - moved["plain"] for engine in ("ours", "FSDP2"))
    return [*rows, _row(case, "bytes moved over FSDP2's", "", mine / peer)]


def _row(case: Case, metric: str, unit: str, value: float) -> Row:
    return Row("memory", case, metric, unit, Samples((float(value),)))


def _above_rest(phases: Mapping[str, PhaseMemory], phase: str) -> int:
    return phases[phase].peak - phases["forward"].start


def _sharded(engine: str, shape: Shape, precision: Precision, device: str = "cpu") -> nn.Module:
    model = make_model(shape, device)
    return ENGINES[engine](model, list(model.layers), world_mesh(device), precision)


def _num_parameters(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Model(shape).parameters())


def _forecast(shape: Shape, precision: Precision, device: str) -> dict[str, int]:
    report = megatron_fsdp.explain(_sharded("ours", shape, precision, device))
    peaks = (report.forward_peak, report.backward_peak)
    return {phase: peak.num_bytes for phase, peak in zip(PHASES, peaks, strict=False)}


def _train(engine: str, shape: Shape, precision: Precision, device: str, begin: Callable[[str], None]) -> None:
    model = _sharded(engine, shape, precision, device)
    kind = megatron_fsdp.AdamW if engine == "ours" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.zeros(shape.batch, shape.length + 1, dtype=torch.long, device=device)
    for _ in range(NUM_STEPS):
        begin("forward")
        loss = model(tokens)
        begin("backward")
        loss.backward()
        del loss
        begin("step")
        optimizer.step()
        optimizer.zero_grad()
    begin("rest")


def _moved(engine: str, shape: Shape, precision: Precision) -> int:
    model = _sharded(engine, shape, precision)
    tokens = torch.zeros(shape.batch, shape.length + 1, dtype=torch.long)
    moved = MovedBytes()
    for number in range(NUM_STEPS):
        if number < NUM_STEPS - 1:
            model(tokens).backward()
        else:
            with moved.counting():
                model(tokens).backward()
        model.zero_grad()
    return moved.total
