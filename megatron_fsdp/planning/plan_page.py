"""The output of ``megatron-fsdp plan`` for one setup, as tables and as plain data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from megatron_fsdp.formatting import Table, counted, format_bytes, format_count, format_seconds, listing
from megatron_fsdp.planning.estimate import Projection
from megatron_fsdp.planning.report import folded

__all__ = ["FORMAT", "headline", "plan_tables", "to_dict"]

FORMAT = 2
"""Version of the JSON output. It grows by one whenever a key changes its meaning or is removed."""

_MOST_WAITS = 20


def plan_tables(best: Projection, limit_bytes: int | None, stages: Sequence[Projection]) -> Iterator[Table]:
    """Yield the tables of the page in order; ``stages``: the projections of all pipeline stages."""
    report = best.report()
    *tables, notes = report.tables()
    yield _memory_table(best, limit_bytes)
    yield from tables
    if best.transfers:
        yield Table.of(_transfers(best), "sent inside the model in a step")
    yield _time_table(best)
    if len(stages) > 1:
        yield Table.of(map(_stage_dict, stages), "stages, one rank of each")
    yield notes
    if best.subject.notes:
        yield listing("not known of this model", best.subject.notes)


def headline(projection: Projection) -> str:
    """Return the title line: model, mesh and strategy."""
    subject, setup, inside = projection.subject, projection.setup, projection.setup.parallelism
    active = subject.num_active_parameters
    chosen = "" if active == subject.num_parameters else f", {format_count(active)} active"
    axes = " x ".join(f"{axis.size:,}" for axis in setup.sharding.axes)
    ranks = f"{axes} = {setup.sharding.num_ranks:,}" if len(setup.sharding.axes) > 1 else axes
    where = f"on {ranks} rank{'s' if setup.sharding.num_ranks > 1 else ''}, {setup.strategy}"
    if inside.is_any:
        world = setup.sharding.num_ranks * inside.tensor * inside.pipeline
        named = (("dp x cp" if inside.context > 1 else "dp", ranks), ("tp", inside.tensor), ("pp", inside.pipeline))
        sizes = ", ".join(f"{name} {size}" for name, size in named if size != 1)
        where = f"on {world:,} ranks ({sizes}), {setup.strategy}"
    if projection.stage is not None and inside.pipeline > 1:
        where += f", stage {projection.stage.number} of 0 to {inside.pipeline - 1}"
    return f"{subject.name}: {format_count(subject.num_parameters)} parameters{chosen}, {where}"


def _memory_table(projection: Projection, limit_bytes: int | None) -> Table:
    """Return the table of memory, of one rank and of all ranks."""
    total, inside = projection.memory_bytes, projection.setup.parallelism
    num_ranks = projection.setup.sharding.num_ranks * inside.tensor
    ranks = "all_of_the_stage_bytes" if inside.pipeline > 1 else "all_ranks_bytes"
    parts = {**projection.memory, "total": total}
    rows: list[dict[str, Any]] = [
        {"memory": name, "one_rank_bytes": size, ranks: size * num_ranks} for name, size in parts.items()
    ]
    if limit_bytes is not None:
        left = limit_bytes - total
        name = f"limit, {format_bytes(abs(left))} {'left' if left >= 0 else 'too much'}"
        rows.append({"memory": name, "one_rank_bytes": limit_bytes})
    return Table.of(rows)


def _time_table(projection: Projection) -> Table:
    time, workload = projection.time, projection.setup.workload
    hidden = max(time.communication - time.exposed, 0.0)
    share = f"{hidden / time.communication:.0%} of it hidden" if time.communication else "none"
    hardware = projection.setup.hardware
    batches = counted(workload.num_microbatches, "microbatch", "microbatches")
    rate = f", at {hardware.flops / 1e12:,.4g} Tflop/s"
    links = ", ".join(f"{axis} {link.bytes_per_second / 1e9:,.4g} GB/s" for axis, link in hardware.links.items())
    causes = "; ".join(f"{words} {format_seconds(each)}" for words, each in time.causes[:2])
    copied = "of weights and gradients, on the compute stream; the rest is on the lanes"
    rows: list[tuple[str, float | str, str]] = [
        ("one optimizer step", time.total, f"{projection.tokens_per_second:,.0f} tokens/s and rank"),
        ("compute", time.compute, f"{batches} of {workload.tokens:,} tokens{rate}"),
        ("communication", time.communication, f"{share}; {links}"),
        ("not hidden", time.exposed, causes),
        ("copying", time.copying, copied),
        ("AdamW", time.optimizer, "bound by memory"),
        ("inside the model", time.model_parallel, "taken not to be hidden"),
        ("waiting for stages", time.bubble, "one forward, one backward in turn"),
    ]
    errors = _errors()
    compared = f"median of {errors['settings']} steps on CPUs ({errors['clock']} time), worst {errors['worst']:.0f} %"
    error = ("error bar", f"{errors['median']:.0f} %", f"{compared}; never compared with a GPU")
    shown = [*rows[:6], *(row for row in rows[6:] if row[1]), error]
    return Table.of({"time": name, "seconds": seconds, "": words} for name, seconds, words in shown)


def _errors() -> dict[str, Any]:
    """Return the errors of such predictions, in percent, measured on CPUs with measured speeds."""
    text = files("megatron_fsdp.planning").joinpath("error_bar.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def to_dict(projection: Projection, stages: Sequence[Projection] = ()) -> dict[str, Any]:
    """Return the plan as plain data; docs/planning.md describes its keys."""
    report, setup, time, subject = projection.report(), projection.setup, projection.time, projection.subject
    plain = report.to_dict()
    units = []
    for _, positions, _ in folded(report):
        unit = plain["units"][positions[0]]
        del unit["name"]
        units.append({**unit, "count": len(positions), "names": [report.units[at].name for at in positions]})
    names = ("total", "compute", "communication", "exposed", "copying", "optimizer", "model_parallel", "bubble")
    found: dict[str, Any] = {
        "format": FORMAT,
        "model": {each: getattr(subject, each) for each in ("name", "num_parameters", "num_active_parameters")},
        "strategy": setup.strategy,
        "mesh": [{"axis": axis.name, "size": axis.size} for axis in setup.sharding.axes],
        "workload": asdict(setup.workload),
        "memory": {"total_bytes": projection.memory_bytes, "parts": dict(projection.memory)},
        "report": {**plain, "units": units},
        "time": {
            **{f"{name}_seconds": getattr(time, name) for name in names},
            "error_bar": _errors(),
            "waits": dict(time.causes[:_MOST_WAITS]),
            "tokens_per_second": projection.tokens_per_second,
            "links": {axis: asdict(link) for axis, link in setup.hardware.links.items()},
        },
    }
    if projection.stage is not None:
        axes = setup.sharding.expert_axes or setup.sharding.axes
        found["parallelism"] = {
            **asdict(setup.parallelism),
            "stage": projection.stage.number,
            "expert_mesh": [{"axis": axis.name, "size": axis.size} for axis in axes],
            "transfers": _transfers(projection),
        }
        found["stages"] = [_stage_dict(each) for each in stages]
    return found


def _stage_dict(projection: Projection) -> dict[str, Any]:
    stage = projection.stage
    assert stage is not None
    return {
        "number": stage.number,
        "first_layer": stage.layers[0],
        "num_layers": stage.layers[1],
        "num_parameters": stage.architecture.num_parameters,
        "memory_bytes": projection.memory_bytes,
        "busy_seconds": projection.time.total - projection.time.bubble,
    }


def _transfers(projection: Projection) -> list[dict[str, Any]]:
    return [{"what": each.what, **asdict(each.transfer), "count": each.count} for each in projection.transfers]
