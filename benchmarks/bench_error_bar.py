"""Error bar: predicted and measured times of training steps on this machine's CPU.

The bench trains 24 settings (shapes, strategies, microbatches, dtypes, on 1, 2 and 4 gloo ranks) and predicts each by
running the engine's step on a virtual device. 8 settings calibrate the device (``CpuSpeeds``); the other 16 are never
fitted. ``plan`` prints the error of these 16 next to its times, from the rows in benchmarks/RESULTS.md (copied by
``python -m benchmarks.performance_page``). Other work on the machine makes the errors larger.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import megatron_fsdp
from benchmarks.engines import LEARNING_RATE, Step, make_model
from benchmarks.harness import Row, Samples
from benchmarks.models import Shape
from megatron_fsdp.virtual.device import virtual_device
from megatron_fsdp.virtual.playback import play
from megatron_fsdp.virtual.recording import Item, Work
from tests.harness import run_ranks

BASE = Shape(2, 256, 1024, batch=2, length=64)
SHAPES = {
    "2x256": BASE,
    "4x256": replace(BASE, num_layers=4),
    "2x512": replace(BASE, width=512),
    "6x128": replace(BASE, num_layers=6, width=128, batch=4),
}
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
QUANTITIES = ("product", "memory", "call", "sent", "collective")


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to train; ``compute``: of the weights, while activations are FP32. ``calibrates``: it is fitted."""

    ranks: int
    shape: str
    strategy: str
    microbatches: int
    compute: torch.dtype
    calibrates: bool


def settings() -> list[Setting]:
    """Return 24 settings; every third one calibrates the device."""
    found = []
    for number in range(24):
        ranks, shape = (1, 2, 4)[number // 8], list(SHAPES)[number % 4]
        strategy = STRATEGIES[(number + number // 4) % 4]
        compute = torch.bfloat16 if number % 8 >= 4 else torch.float32
        found.append(Setting(ranks, shape, strategy, 1 + number % 2, compute, number % 3 == 1))
    return found


@dataclass(frozen=True, slots=True)
class CpuSpeeds:
    """Seconds of one rank's CPU: for an operation of a product, a byte moved, a call, a byte sent, a collective.

    ``share``: of a core that a rank has; sharing slows all of it down.
    """

    product: float
    memory: float
    call: float
    sent: float
    collective: float
    share: float
    stream_call: float = 0.0
    launch: float = 0.0

    def seconds(self, work: Work) -> float:
        """Return the seconds that the work takes alone."""
        if work.ranks:
            return (self.collective + self.sent * _sent(work)) / self.share
        return (self.call + self.product * work.flops + self.memory * work.num_bytes) / self.share

    def link(self, work: Work) -> str:
        """Return the shared resource: the one link for collectives, none for kernels."""
        return "gloo" if work.ranks else ""

    def occupied(self, work: Work) -> float:
        """Return 0: gloo's collectives do not slow kernels, and ``share`` counts how ranks slow each other."""
        return 0.0


def _sent(work: Work) -> float:
    once = work.num_bytes * (len(work.ranks) - 1) / len(work.ranks)
    return 2 * once if work.kind == "all_reduce" else once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option for the number of measured steps."""
    parser.add_argument(
        "--blocks", type=int, default=4, help="how often all settings are measured, 1 to 4 ranks in turn"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each setting in a block")
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="processor: of the slowest rank, without what other processes take; with it nobody shares a core",
    )


def run(args: argparse.Namespace) -> list[Row]:
    """Measure and record all settings, calibrate, and predict those that were not fitted."""
    chosen = settings()
    measured = dict.fromkeys(chosen, float("inf"))
    for _, ranks in itertools.product(range(args.blocks), sorted({each.ranks for each in chosen})):
        alike = [each for each in chosen if each.ranks == ranks]
        found = run_ranks(ranks, measure, alike, args.rounds, args.clock, timeout=600.0)
        for number, each in enumerate(alike):
            # A step takes as long as its slowest rank. The shortest step was disturbed least by other processes.
            slowest = (max(seconds) for seconds in zip(*(rank[number] for rank in found), strict=True))
            measured[each] = min(measured[each], *slowest)
    recorded = {each: record(each) for each in chosen}
    coefficients = calibrate([each for each in chosen if each.calibrates], recorded, measured, args.clock)
    rows = []
    for each in chosen:
        predicted = play(recorded[each], speeds_of(coefficients, each, args.clock)).seconds
        case: dict[str, str | int | float] = {
            "ranks": each.ranks,
            "shape": each.shape,
            "strategy": each.strategy,
            "microbatches": each.microbatches,
            "compute": str(each.compute).removeprefix("torch."),
            "fitted": str(each.calibrates),
        }
        for metric, value, unit in (
            ("measured step", measured[each] * 1e3, "ms"),
            ("predicted step", predicted * 1e3, "ms"),
            ("predicted over measured", predicted / measured[each], ""),
        ):
            rows.append(Row("error_bar", case, metric, unit, Samples((value,))))
    errors = [
        abs(row.samples.median - 1) * 100
        for row in rows
        if row.metric == "predicted over measured" and row.case["fitted"] == "False"
    ]
    for metric, value in (("median error", statistics.median(errors)), ("worst error", max(errors))):
        rows.append(Row("error_bar", {"settings": len(errors)}, metric, "%", Samples((value,))))
    return rows


def rows_text(rows: Sequence[Row]) -> str:
    """Return one line for each setting, and the errors of the settings that were not fitted."""
    table: dict[tuple[str, ...], dict[str, float]] = {}
    lines = [
        "| ranks | shape | strategy | microbatches | weights | measured, ms | predicted, ms | error |",
        "|---|" * 8,
    ]
    lines[1] = lines[1].replace("||", "|")
    ends = []
    for row in rows:
        if "shape" not in row.case:
            ends.append(f"{row.metric} of {row.case['settings']} that were not fitted: {row.samples.median:.0f} %")
            continue
        names = ("ranks", "shape", "strategy", "microbatches", "compute", "fitted")
        table.setdefault(tuple(str(row.case[name]) for name in names), {})[row.metric] = row.samples.median
    for (*case, is_fitted), found in table.items():
        mark = " (fitted)" if is_fitted == "True" else ""
        error = abs(found["predicted over measured"] - 1)
        cells = [*case, f"{found['measured step']:.1f}", f"{found['predicted step']:.1f}", f"{error:.0%}{mark}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "; ".join(ends)])


def _step_of(setting: Setting) -> Step:
    shape = SHAPES[setting.shape]
    model = make_model(shape, "cpu")
    placements = getattr(megatron_fsdp.Placements, setting.strategy)(0)
    policy = megatron_fsdp.MixedPrecisionPolicy(setting.compute, torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers, model):
        megatron_fsdp.fully_shard(module, mesh, placements=placements, mp_policy=policy)
    optimizer = megatron_fsdp.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(tokens: torch.Tensor) -> None:
        for number in range(setting.microbatches):
            with megatron_fsdp.microbatch(model, is_last=number == setting.microbatches - 1):
                model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(chosen: Sequence[Setting], rounds: int, clock: str) -> list[list[float]]:
    """Return the seconds of each setting's steps; the settings run in turn."""
    steps = [_step_of(each) for each in chosen]
    given = [torch.zeros(shape.batch, shape.length + 1, dtype=torch.int64) for shape in _shapes(chosen)]
    times: list[list[float]] = [[] for _ in chosen]
    for number in range(-2, rounds):
        for step, tokens, found in zip(steps, given, times, strict=True):
            dist.barrier()
            start = CLOCKS[clock]()
            step(tokens)
            if number >= 0:
                found.append(CLOCKS[clock]() - start)
    return times


def _shapes(chosen: Sequence[Setting]) -> list[Shape]:
    return [SHAPES[each.shape] for each in chosen]


def record(setting: Setting) -> tuple[Item, ...]:
    """Return the work of the setting's step on a CPU."""
    shape = SHAPES[setting.shape]
    with virtual_device(setting.ranks, has_streams=False, collective_calls=1) as device:
        step = _step_of(setting)
        tokens = torch.zeros(shape.batch, shape.length + 1, dtype=torch.int64)
        return tuple(device.record(lambda: step(tokens)).items)


def speeds_of(coefficients: dict[str, float], setting: Setting, clock: str) -> CpuSpeeds:
    """Return the speeds of one rank of the setting. Processor time leaves out waiting for a core."""
    share = (torch.multiprocessing.cpu_count() or 1) / setting.ranks if clock == "wall" else 1.0
    return CpuSpeeds(**coefficients, share=min(1.0, share))


def calibrate(
    chosen: Sequence[Setting], recorded: dict[Setting, tuple[Item, ...]], measured: dict[Setting, float], clock: str
) -> dict[str, float]:
    """Return the seconds of each quantity, none below zero, with the least sum of squared relative errors."""
    rows = []
    for each in chosen:
        parts = []
        for name in QUANTITIES:
            alone = dict.fromkeys(QUANTITIES, 0.0) | {name: 1.0}
            parts.append(play(recorded[each], speeds_of(alone, each, clock)).seconds / measured[each])
        rows.append(parts)
    matrix, wanted = torch.tensor(rows, dtype=torch.float64), torch.ones(len(rows), dtype=torch.float64)
    return dict(zip(QUANTITIES, _nonnegative(matrix, wanted).tolist(), strict=True))


def _nonnegative(matrix: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the least-squares solution without negative entries, by trying which of them are zero."""
    best, least = torch.zeros(matrix.shape[1], dtype=matrix.dtype), float("inf")
    for support in range(1, 1 << matrix.shape[1]):
        chosen = [at for at in range(matrix.shape[1]) if support >> at & 1]
        found = torch.linalg.lstsq(matrix[:, chosen], wanted, driver="gelsd").solution
        residual = float((matrix[:, chosen] @ found - wanted).square().sum())
        if bool((found >= 0).all()) and residual < least - 1e-12:
            least, best = residual, torch.zeros_like(best)
            best[chosen] = found
    return best
