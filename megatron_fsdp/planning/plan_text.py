"""The page of ``megatron-fsdp plan``: what one setup takes, for a person and for a program."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from dbuffer.planner.arena import Lifetime, plan_arena
from megatron_fsdp.formatting import Listing, Table, format_bytes, format_count, format_seconds
from megatron_fsdp.planning.estimate import MemoryPart, Projection
from megatron_fsdp.planning.report_text import Report, UnitReport, notes, traffic_table, unit_table

__all__ = [
    "FORMAT",
    "Folded",
    "decided",
    "folded",
    "headline",
    "memory_rows",
    "page",
    "stage_dict",
    "stage_table",
    "tables",
    "to_dict",
    "unit_names",
]

_MOST_WAITS = 20
# Of the JSON; it grows by one whenever a key changes its meaning or goes away.
FORMAT = 1

_BAR = 40


@dataclass(frozen=True, slots=True)
class Folded:
    """Units that are alike but for their names, in the order in which the first of each occurs."""

    names: tuple[str, ...]
    positions: tuple[int, ...]
    unit: UnitReport


def folded(report: Report) -> tuple[Folded, ...]:
    """Return the units of a report with equal ones folded into one entry."""
    alike: dict[UnitReport, list[int]] = {}
    for position, unit in enumerate(report.units):
        alike.setdefault(dataclasses.replace(unit, name=""), []).append(position)
    return tuple(
        Folded(tuple(report.units[position].name for position in positions), tuple(positions), unit)
        for unit, positions in alike.items()
    )


def page(projection: Projection, decisions: Sequence[str], limit_bytes: int | None = None) -> str:
    """Return the page to read.

    Args:
        decisions: one line per choice, with the setting that caused it.
        limit_bytes: memory of one accelerator, drawn into the chart.
    """
    report = projection.report()
    remarks, assumed = notes(report)
    units, *others = tables(projection, report)
    parts = (
        [headline(projection)],
        decided(decisions).lines(),
        units.lines(),
        _memory_lines(projection, limit_bytes),
        *(each.lines() for each in projection.owners),
        *(each.lines() for each in others),
        [*remarks.lines(), *assumed.lines()],
    )
    return "\n\n".join("\n".join(lines) for lines in parts)


def tables(projection: Projection, report: Report) -> Iterator[Table]:
    """Yield the tables of a plan: its units, and then all but that of memory."""
    yield unit_table(report)
    yield _peak_table(report, projection.forecast.lifetimes)
    yield _padding_table(report)
    yield traffic_table(report)
    if projection.transfers:
        yield _transfer_table(projection)
    yield _time_table(projection)
    if projection.time.communication:
        yield _hiding_table(projection, report)


def decided(decisions: Sequence[str]) -> Listing:
    """Return the choices, each with the setting that caused it."""
    return Listing("what decided it", decisions)


def headline(projection: Projection) -> str:
    """Return the title: model, mesh, strategy."""
    subject, setup = projection.subject, projection.setup
    active = subject.num_active_parameters
    chosen = "" if active == subject.num_parameters else f", {format_count(active)} active"
    axes = " x ".join(f"{axis.size:,}" for axis in setup.sharding.axes)
    ranks = f"{axes} = {setup.sharding.num_ranks:,}" if len(setup.sharding.axes) > 1 else axes
    parameters = f"{format_count(subject.num_parameters)} parameters{chosen}"
    if not setup.parallelism.is_any:
        return f"{subject.name}: {parameters}, on {ranks} ranks, {setup.strategy}"
    inside = setup.parallelism
    world = setup.sharding.num_ranks * inside.tensor * inside.pipeline
    named = (("dp x cp" if inside.context > 1 else "dp", ranks), ("tp", inside.tensor), ("pp", inside.pipeline))
    sizes = ", ".join(f"{name} {size}" for name, size in named if size != 1)
    stage = (
        f", stage {projection.stage.number} of {inside.pipeline}" if projection.stage and inside.pipeline > 1 else ""
    )
    return f"{subject.name}: {parameters}, on {world:,} ranks ({sizes}), {setup.strategy}{stage}"


def memory_rows(projection: Projection, limit_bytes: int | None) -> list[tuple[str, str, str, str]]:
    """Return the table of memory: what, on one rank, on all of them, and whether the limit holds."""
    total = projection.memory_bytes
    inside = projection.setup.parallelism
    num_ranks = projection.setup.sharding.num_ranks * inside.tensor
    rows = [("memory", "one rank", "all of the stage" if inside.pipeline > 1 else "all ranks", "")]
    rows += [(part.name, *_amounts(part, num_ranks), "") for part in projection.memory]
    rows.append(("total", format_bytes(total), format_bytes(total * num_ranks), ""))
    if limit_bytes is not None:
        left = limit_bytes - total
        verdict = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} too much"
        rows.append(("limit", format_bytes(limit_bytes), "", verdict))
    return rows


def _memory_lines(projection: Projection, limit_bytes: int | None) -> list[str]:
    """Return that table with a bar for each part, which begins where the one before it ends."""
    total = projection.memory_bytes
    scale = max(total, limit_bytes or 0, 1)
    bars = [""]
    drawn = 0
    for part in projection.memory:
        bars.append(_bar(drawn, drawn + part.num_bytes, scale))
        drawn += part.num_bytes
    bars += [_bar(0, total, scale), _bar(0, limit_bytes or 0, scale)]
    rows = memory_rows(projection, limit_bytes)
    drawn_rows = [(*row[:3], f"{bar} {row[3]}".rstrip()) for row, bar in zip(rows, bars, strict=False)]
    return Table(drawn_rows, has_note=True).lines()


def _amounts(part: MemoryPart, num_ranks: int) -> tuple[str, str]:
    if not part.is_known:
        return "not known", "not known"
    return format_bytes(part.num_bytes), format_bytes(part.num_bytes * num_ranks)


def _bar(start: int, stop: int, scale: int) -> str:
    """Draw the piece from ``start`` to ``stop``; what is there at all takes at least one mark."""
    first = min(round(_BAR * start / scale), _BAR - 1)
    length = max(round(_BAR * stop / scale) - first, 1) if stop > start else 0
    return " " * first + "#" * length


def _peak_table(report: Report, lifetimes: Sequence[Lifetime]) -> Table:
    rows: list[tuple[str, ...]] = [("transient peak", "bytes", "reached by")]
    phases = {"forward": report.forward_peak, "backward": report.backward_peak, "optimizer step": report.step_peak}
    for name, peak in phases.items():
        rows.append((name, format_bytes(peak.num_bytes), peak.unit))
    rows.append(("largest unit, gathered", format_bytes(report.largest_unit_bytes), report.largest_unit))
    if lifetimes:
        arena = plan_arena(lifetimes)
        held = f"{format_bytes(arena.lower_bound)} of it held at most, gap {arena.gap:.2%}: set_slot_pool('static')"
        rows.append(("as a static arena", format_bytes(arena.num_bytes), held))
    return Table(rows, has_note=True)


def _padding_table(report: Report) -> Table:
    rows: list[tuple[str, ...]] = [("padding", "of the data", "least possible", "what forces it")]
    seen: dict[tuple[str, ...], list[str]] = {}
    for unit in report.units:
        for group in unit.groups:
            least = max(group.lower_bound_numel / group.numel - 1, 0.0) if group.numel else 0.0
            key = (f"{group.padding_ratio:.3%}", f"{least:.3%}", group.binding)
            if group.padding_ratio:
                seen.setdefault(key, []).append(unit.name)
    rows += [(unit_names(tuple(dict.fromkeys(names))), *key) for key, names in seen.items()]
    return Table(rows, has_note=True)


def unit_names(names: Sequence[str]) -> str:
    """Return units that are alike as the first, the last and how many."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"


def _time_table(projection: Projection) -> Table:
    time, workload = projection.time, projection.setup.workload
    hidden = max(time.communication - time.exposed, 0.0)
    share = f"{hidden / time.communication:.0%} of it hidden" if time.communication else "none"
    needed = "" if time.tokens_to_hide is None else f"{time.tokens_to_hide:,} tokens per rank and microbatch hide it"
    rows = [
        ("time", "", ""),
        ("one optimizer step", format_seconds(time.total), f"{projection.tokens_per_second:,.0f} tokens/s and rank"),
        ("error bar", *_error_bar()),
        (
            "compute",
            format_seconds(time.compute),
            f"{workload.num_microbatches:,} microbatches of {workload.tokens:,} tokens",
        ),
        ("communication", format_seconds(time.communication), f"{share}; {needed}".strip("; ")),
        ("not hidden", format_seconds(time.exposed), "; ".join(_longest(time.causes))),
        ("copying", format_seconds(time.copying), "of weights and gradients, beside compute"),
        ("AdamW", format_seconds(time.optimizer), "bound by memory"),
    ]
    if projection.owners:
        iteration = sum(each.max_flops for each in projection.owners) / projection.setup.hardware.flops
        note = f"of it Newton-Schulz on the rank with most, {format_seconds(iteration)}; its messages are not counted"
        rows[-1] = ("Muon and AdamW", format_seconds(time.optimizer), note)
    if projection.transfers:
        rows.append(("inside the model", format_seconds(time.model_parallel), "taken not to be hidden"))
    if projection.setup.parallelism.pipeline > 1:
        rows.append(("waiting for stages", format_seconds(time.bubble), "one forward, one backward in turn"))
    return Table(rows, has_note=True)


def _transfer_table(projection: Projection) -> Table:
    """Return what is sent over axes that are not data-parallel."""
    rows: list[tuple[str, ...]] = [("inside the model, per step", "collective", "over", "ranks", "count", "bytes each")]
    for each in projection.transfers:
        transfer = each.transfer
        cells = (each.what, transfer.kind, transfer.axis, f"{transfer.num_ranks:,}", f"{each.count:,}")
        rows.append((*cells, format_bytes(transfer.num_bytes)))
    return Table(rows, num_left=3)


def stage_table(stages: Sequence[Projection]) -> Table:
    """Return a table of the stages of a pipeline: layers, memory and time of one rank of each."""
    rows: list[tuple[str, ...]] = [("stage", "layers", "parameters", "activations", "memory", "busy in a step")]
    for each in stages:
        assert each.stage is not None
        first, count = each.stage.layers
        time = each.time
        rows.append(
            (
                str(each.stage.number),
                f"{first} to {first + count - 1}",
                format_count(each.stage.architecture.num_parameters),
                format_bytes(sum(part.num_bytes for part in each.memory if part.name == "activations")),
                format_bytes(each.memory_bytes),
                format_seconds(time.total - time.bubble),
            )
        )
    return Table(rows)


def stage_dict(stage: Projection) -> dict[str, Any]:
    """Return one stage as plain data; docs/planning.md describes the keys."""
    assert stage.stage is not None
    return {
        "number": stage.stage.number,
        "first_layer": stage.stage.layers[0],
        "num_layers": stage.stage.layers[1],
        "num_parameters": stage.stage.architecture.num_parameters,
        "memory_bytes": stage.memory_bytes,
        "busy_seconds": stage.time.total - stage.time.bubble,
    }


def _inside_dict(projection: Projection) -> dict[str, Any]:
    if projection.stage is None:
        return {}
    return {
        "parallelism": {
            **dataclasses.asdict(projection.setup.parallelism),
            "stage": projection.stage.number,
            "expert_mesh": [
                {"axis": axis.name, "size": axis.size}
                for axis in projection.setup.sharding.expert_axes or projection.setup.sharding.axes
            ],
            "transfers": [
                {"what": each.what, **each.transfer._asdict(), "count": each.count} for each in projection.transfers
            ],
            "model_parallel_seconds": projection.time.model_parallel,
            "bubble_seconds": projection.time.bubble,
        }
    }


def _error_bar() -> tuple[str, str]:
    found = _errors()
    words = f"median of {found['settings']} steps on CPUs ({found['clock']} time), worst {found['worst']:.0f} %"
    return f"{found['median']:.0f} %", f"{words}; never compared with a GPU"


def _errors() -> dict[str, Any]:
    """Return how far such predictions were off, in percent, where they were compared: on CPUs, with measured speeds."""
    text = files("megatron_fsdp.planning").joinpath("error_bar.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _longest(causes: Sequence[tuple[str, float]]) -> Iterator[str]:
    """Yield the two longest waits, units of a few layers."""
    return (f"{words} {format_seconds(seconds)}" for words, seconds in causes[:2])


def _hiding_table(projection: Projection, report: Report) -> Table:
    """Return, for each kind of unit, the time of its collectives beside that of its compute."""
    rows: list[tuple[str, ...]] = [
        ("unit, per microbatch", "gather", "forward", "gather again", "reduce", "backward", "per step, at the end")
    ]
    for alike in folded(report):
        time = projection.time.units[alike.positions[0]]
        times = (time.forward_gather, time.forward, time.backward_gather, time.reduce, time.backward, time.tail)
        if any(times):
            rows.append((unit_names(alike.names), *(format_seconds(seconds) if seconds else "-" for seconds in times)))
    return Table(rows)


def to_dict(projection: Projection, decisions: Sequence[str]) -> dict[str, Any]:
    """Return the plan as plain data; docs/planning.md describes the keys."""
    report, setup, time = projection.report(), projection.setup, projection.time
    plain = report.to_dict()
    units = [
        {**unit, "count": len(alike.names), "names": list(alike.names)}
        for alike, unit in ((alike, plain["units"][alike.positions[0]]) for alike in folded(report))
    ]
    for unit in units:
        del unit["name"]
    workload = dataclasses.asdict(setup.workload)
    return {
        "format": FORMAT,
        "model": {
            "name": projection.subject.name,
            "num_parameters": projection.subject.num_parameters,
            "num_active_parameters": projection.subject.num_active_parameters,
        },
        "strategy": setup.strategy,
        "mesh": [{"axis": axis.name, "size": axis.size} for axis in setup.sharding.axes],
        "workload": {**workload, "recompute": setup.workload.recompute.value},
        "decisions": list(decisions),
        **_inside_dict(projection),
        "memory": {
            "total_bytes": projection.memory_bytes,
            "parts": [dataclasses.asdict(part) for part in projection.memory],
        },
        "report": {**plain, "units": units},
        **({"owners": [each.to_dict() for each in projection.owners]} if projection.owners else {}),
        "time": {
            **{
                f"{name}_seconds": getattr(time, name)
                for name in ("total", "compute", "communication", "exposed", "copying", "optimizer")
            },
            "error_bar": _errors(),
            "waits": dict(time.causes[:_MOST_WAITS]),
            "tokens_to_hide": time.tokens_to_hide,
            "tokens_per_second": projection.tokens_per_second,
            "links": {
                axis: {"bytes_per_second": link.bytes_per_second, "latency_seconds": link.latency}
                for axis, link in setup.hardware.links.items()
            },
        },
    }
