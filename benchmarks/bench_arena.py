"""Arena: how much more the static arena of published models takes than the most bytes held, and how fast it is planned.

A step of every model in the catalog is played by the planner at real sizes, for every strategy, and each gathered,
packed, kept and scratch buffer gets its place in one arena. Bytes are exact; times are of this machine.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.harness import Row, Samples
from dbuffer.planner.arena import ArenaPlan, plan_arena
from megatron_fsdp.planning import catalog
from megatron_fsdp.planning.model_source import named_subject
from megatron_fsdp.planning.options import mesh_axes_of, placements_of
from megatron_fsdp.planning.plan_arguments import HYBRID, STRATEGIES
from megatron_fsdp.planning.played_step import play_step
from megatron_fsdp.planning.stand_in import Sharding
from megatron_fsdp.policy.precision import MixedPrecisionPolicy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which models, strategies and ranks."""
    parser.add_argument("--models", nargs="+", default=list(catalog.names()), choices=list(catalog.names()))
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES], choices=STRATEGIES)
    parser.add_argument("--ranks", type=int, default=64, help="of one axis; two axes have 8 inner ranks")
    parser.add_argument("--microbatches", type=int, default=2, help="of a step")


def run(args: argparse.Namespace) -> list[Row]:
    """Plan the arena of every model and strategy, and return its bytes, its bound, its gap and the time it took."""
    rows, gaps, times = [], [], []
    for model in args.models:
        for strategy in args.strategies:
            plan, seconds, num_buffers = planned(model, strategy, args.ranks, args.microbatches)
            case = {"model": model, "strategy": strategy, "ranks": args.ranks}
            notes = {"buffers": num_buffers}
            for metric, unit, value in (
                ("arena", "B", plan.num_bytes),
                ("most bytes held", "B", plan.lower_bound),
                ("arena over the most bytes held", "", 1 + plan.gap),
            ):
                rows.append(Row("arena", case, metric, unit, Samples((value,)), notes=notes))
            rows.append(Row("arena", case, "time to plan", "s", Samples((seconds,)), notes=notes))
            gaps.append(1 + plan.gap)
            times.append(seconds)
    case = {"model": "all", "strategy": "all", "ranks": args.ranks}
    worst = Samples((max(gaps),))
    rows.append(Row("arena", case, "arena over the most bytes held, worst", "", worst))
    rows.append(Row("arena", case, "time to plan, longest", "s", Samples((max(times),))))
    return rows


def planned(model: str, strategy: str, num_ranks: int, num_microbatches: int) -> tuple[ArenaPlan, float, int]:
    """Return the arena of a model's step, the processor seconds that it took to place it, and the number of buffers."""
    sizes = (num_ranks // 8, 8) if strategy in HYBRID else (num_ranks,)
    sharding = Sharding(mesh_axes_of(sizes), placements_of(strategy, sizes), MixedPrecisionPolicy())
    played = play_step(named_subject(model).stand_ins(sharding, 1), [num_microbatches])
    lifetimes = played.forecasts[num_microbatches].lifetimes
    start = time.process_time()
    plan = plan_arena(lifetimes)
    return plan, time.process_time() - start, len(lifetimes)
