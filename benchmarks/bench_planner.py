"""Padding of published models over many shards (writes docs/padding.md), and how long planning takes.

Padding is computed from shapes and is the same on every machine. Times depend on the machine.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Row, Samples, interleaved
from dbuffer import Block, PaddingLimits, plan, plan_regions
from dbuffer import Row as Rows
from megatron_fsdp.planning import catalog
from megatron_fsdp.planning.catalog import Architecture, UnitShapes

SHARDS = (2, 8, 64, 128, 512, 1024, 4096)
DOCUMENT = Path(__file__).parents[1] / "docs" / "padding.md"
# Sixteen bytes of a two-byte dtype, as the planner aligns by default.
ALIGNMENT = 8
# No limits, so that the planner neither raises nor warns: the table shows all paddings.
ANYTHING = PaddingLimits(warn_ratio=math.inf, refuse_ratio=math.inf)

Shape = tuple[int, ...]

INTRODUCTION = """# Padding

This page lists how much padding equal shards add to published models, with this planner and with two other layouts.

The numbers are percentages of a model's parameters, weighted by how often each unit occurs. Units are those of
`megatron_fsdp.planning.catalog`, in bf16 with 16-byte alignment. `python -m benchmarks planner` writes this page, and
`tests/unit/benchmarks/test_bench_planner.py` checks it. [design/planner.md](design/planner.md) explains the planner.

- **rows**: `plan_regions(shapes, shards, granularity=Row())` cuts no row.
- **rows or elements**: `plan_regions(shapes, shards)`, the default. If whole rows would pad a unit by more than 1 %,
  the tensors that cause it are cut between elements. **relaxed** is their share of the parameters.
- **32-row blocks**: `granularity=Block(32)`, for block-scaled formats.
- **dim-0 chunks**: each shard has `ceil(rows / shards)` rows of each tensor's first dimension, as in PyTorch's FSDP2.
- **common multiple**: one buffer per unit, whose shards are a multiple of every row width.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's command-line options."""
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="file for the table (default: docs/padding.md)")
    parser.add_argument("--rounds", type=int, default=5, help="repeats of each timing")
    parser.add_argument("--no-times", action="store_true", help="only write the table")


def run(args: argparse.Namespace) -> list[Row]:
    """Write the table and return its numbers and the times as rows."""
    args.document.write_text(document(), encoding="utf-8")
    print(f"table in {args.document}")
    return [*padding_rows(), *([] if args.no_times else time_rows(args.rounds))]


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding of one model over one number of shards, each a share of its parameters."""

    rows: float
    default: float
    relaxed: float
    blocks: float
    chunks: float
    multiple: float


@functools.cache
def padding_of(name: str, shards: int) -> Padding:
    """Return the padding of a model in the catalog."""
    architecture = catalog.architecture(catalog.load(name))
    return Padding(
        rows=_weighted(architecture, lambda unit: _planned(unit, shards, Rows())),
        default=_weighted(architecture, lambda unit: _planned(unit, shards, None)),
        relaxed=_weighted(architecture, lambda unit: _relaxed(unit, shards)) + 1,
        blocks=_weighted(architecture, lambda unit: _planned(unit, shards, Block(32))),
        chunks=_weighted(architecture, lambda unit: dim_0_numel(unit.shapes, shards)),
        multiple=_weighted(architecture, lambda unit: common_multiple_numel(unit.shapes, shards)),
    )


def dim_0_numel(shapes: Sequence[Shape], shards: int) -> int:
    """Return the elements stored when every tensor is cut on its own into equal chunks of its first dimension."""
    return sum(-(-shape[0] // shards) * shards * math.prod(shape[1:]) for shape in shapes)


def common_multiple_numel(shapes: Sequence[Shape], shards: int) -> int:
    """Return the elements of one buffer whose shards are a multiple of all row widths and of the alignment."""
    multiple = math.lcm(ALIGNMENT, *(shape[-1] for shape in shapes if len(shape) > 1))
    data = sum(-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes)
    return -(-data // (shards * multiple)) * multiple * shards


def _weighted(architecture: Architecture, numel: Callable[[UnitShapes], int]) -> float:
    stored = sum(unit.count * numel(unit) for unit in architecture.units)
    return stored / architecture.num_parameters - 1


def _planned(unit: UnitShapes, shards: int, granularity: Rows | Block | None) -> int:
    regions = plan_regions(unit.shapes, shards, granularity=granularity, limits=ANYTHING)
    return sum(region.plan.numel for region in regions)


def _relaxed(unit: UnitShapes, shards: int) -> int:
    regions = plan_regions(unit.shapes, shards, limits=ANYTHING)
    return sum(math.prod(unit.shapes[tensor]) for region in regions for tensor in region.relaxed)


def document() -> str:
    """Return docs/padding.md."""
    heads = ["model", "shards", "rows", "rows or elements", "relaxed", "32-row blocks", "dim-0 chunks"]
    lines = ["| " + " | ".join([*heads, "common multiple"]) + " |", "|---" + "|---:" * len(heads) + "|"]
    for name in catalog.names():
        for shards in SHARDS:
            found = padding_of(name, shards)
            shares = found.rows, found.default, found.relaxed, found.blocks, found.chunks, found.multiple
            lines.append(f"| {name} | {shards} | " + " | ".join(map(_percent, shares)) + " |")
    return INTRODUCTION + "\n" + "\n".join(lines) + "\n"


def _percent(share: float) -> str:
    percent = 100 * share
    if abs(percent) < 1e-9:
        return "0"
    if percent < 0.001:
        return "<0.001"
    return f"{percent:,.0f}" if percent >= 100 else f"{percent:.3g}"


def padding_rows() -> list[Row]:
    """Return the table as rows of exact percentages."""
    return [
        Row(
            "planner",
            {"model": name, "shards": shards},
            f"padding, {layout}",
            "%",
            Samples((100 * getattr(padding_of(name, shards), layout),)),
        )
        for name in catalog.names()
        for shards in SHARDS
        for layout in Padding.__dataclass_fields__
    ]


def time_rows(rounds: int) -> list[Row]:
    """Return the processor time of planning, which leaves out other programs on the machine."""
    cases: dict[str, Callable[[], object]] = {
        "awkward unit, plan": lambda: [plan(unit, shards, limits=ANYTHING) for unit, shards in awkward],
        "awkward unit, plan_regions": lambda: [
            plan_regions(unit, shards, granularity=Rows(), limits=ANYTHING) for unit, shards in awkward
        ],
        "20,000 shapes": lambda: plan(many, 64, limits=ANYTHING),
        "20,000 experts": lambda: plan(experts, 64, limits=ANYTHING),
        "llama3-405b, every unit, 16,384 shards": lambda: _every_unit("llama3-405b", 16384),
    }
    awkward = awkward_units(20)
    widths = (96, 384, 768, 1152, 2048, 4096, 4304, 33, 57, 7)
    many = [(rows, width) for rows in range(1, 2001) for width in widths]
    experts = [(2048, 7168), (2048, 7168), (7168, 2048)] * 6667
    rows = []
    for case, samples in interleaved(cases, rounds=rounds, warmup=1, clock=time.process_time).items():
        scale = len(awkward) if case.startswith("awkward") else 1
        milliseconds = Samples(tuple(1e3 * value / scale for value in samples.values))
        rows.append(Row("planner", {"case": case}, "time", "ms", milliseconds))
    return rows


def awkward_units(count: int) -> list[tuple[list[Shape], int]]:
    """Return units of 100 tensors whose widths share no small multiple, with a number of shards each."""
    generator = random.Random(0)
    pools = [[96, 384, 1152, 4304, 768], [1024, 4096, 14336], [512, 1536, 2048, 7168], [33, 57, 129, 1000]]
    units = []
    for _ in range(count):
        pool = generator.choice(pools)
        matrices = [(generator.choice([8, 64, 200, 1000]), generator.choice(pool)) for _ in range(6)]
        kinds: list[Shape] = [*matrices, *((width,) for width in pool)]
        units.append(([generator.choice(kinds) for _ in range(100)], generator.choice([8, 32, 128])))
    return units


def _every_unit(name: str, shards: int) -> None:
    for unit in catalog.architecture(catalog.load(name)).units:
        for _ in range(unit.count):
            plan_regions(unit.shapes, shards, limits=ANYTHING)
