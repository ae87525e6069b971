"""The page of ``megatron-fsdp plan``: what one setup takes, as tables, lists and charts, and as plain data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from dbuffer.planner.arena import plan_arena
from megatron_fsdp.formatting import Listing, Table, format_bytes, format_count, format_seconds
from megatron_fsdp.optim.ownership import OwnershipReport
from megatron_fsdp.planning.charts import Chart, memory_chart, timeline, unit_chart
from megatron_fsdp.planning.estimate import Projection
from megatron_fsdp.planning.report import Report, notes, traffic_table, unit_table
from megatron_fsdp.planning.search import Search, fit_parts
from megatron_fsdp.planning.unit_report import UnitReport

__all__ = ["FORMAT", "Part", "headline", "page_parts", "to_dict"]

FORMAT = 1
"""Of the JSON; it grows by one whenever a key changes its meaning or goes away."""

_MOST_WAITS = 20
_BAR = 40

Part = Table | Listing | Chart | OwnershipReport


def page_parts(
    best: Projection | None, decisions: Sequence[str], found: Search | None, stages: Sequence[Projection]
) -> Iterator[Part]:
    """Yield what a page shows, in order.

    Args:
        best: None where nothing fits. decisions: one line per choice, with the setting that caused it.
        found: the search that the plan is the best of, if any. stages: of a pipeline.
    """
    if found is not None:
        yield from fit_parts(found)
    if best is None:
        return
    limit_bytes = found.limit_bytes if found is not None else None
    report = best.report()
    alike = folded(report)
    yield Listing(headline(best), ())
    yield Listing("what decided it", decisions)
    yield unit_chart([(unit_names(names), unit) for names, _, unit in alike if unit.groups])
    yield unit_table(report)
    yield memory_chart(best.memory, limit_bytes)
    yield _memory_table(best, limit_bytes)
    yield from best.played.owners
    yield _peak_table(best, report)
    yield _padding_table(report)
    yield traffic_table(report)
    if best.transfers:
        yield _transfer_table(best)
    if best.time.compute:
        yield timeline(best)
    yield _time_table(best)
    if best.time.communication:
        yield _hiding_table(best, alike)
    yield from notes(report)
    if len(stages) > 1:
        yield _stage_table(stages)


def headline(projection: Projection) -> str:
    """Return the title: model, mesh, strategy."""
    subject, setup, inside = projection.subject, projection.setup, projection.setup.parallelism
    active = subject.num_active_parameters
    chosen = "" if active == subject.num_parameters else f", {format_count(active)} active"
    axes = " x ".join(f"{axis.size:,}" for axis in setup.sharding.axes)
    ranks = f"{axes} = {setup.sharding.num_ranks:,}" if len(setup.sharding.axes) > 1 else axes
    where = f"on {ranks} ranks, {setup.strategy}"
    if inside.is_any:
        world = setup.sharding.num_ranks * inside.tensor * inside.pipeline
        named = (("dp x cp" if inside.context > 1 else "dp", ranks), ("tp", inside.tensor), ("pp", inside.pipeline))
        sizes = ", ".join(f"{name} {size}" for name, size in named if size != 1)
        where = f"on {world:,} ranks ({sizes}), {setup.strategy}"
    if projection.stage is not None and inside.pipeline > 1:
        where += f", stage {projection.stage.number} of {inside.pipeline}"
    return f"{subject.name}: {format_count(subject.num_parameters)} parameters{chosen}, {where}"


# ---------------------------------------------------------------------- units


def folded(report: Report) -> list[tuple[tuple[str, ...], int, UnitReport]]:
    """Return the units of a report, those that are alike but for their names as one: names, first position, unit."""
    alike: dict[UnitReport, list[int]] = {}
    for position, unit in enumerate(report.units):
        alike.setdefault(dataclasses.replace(unit, name=""), []).append(position)
    return [(tuple(report.units[at].name for at in places), places[0], unit) for unit, places in alike.items()]


def unit_names(names: Sequence[str]) -> str:
    """Return units that are alike as the first, the last and how many."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"


def _padding_table(report: Report) -> Table:
    rows: list[tuple[str, ...]] = [("padding", "of the data", "least possible", "what forces it")]
    seen: dict[tuple[str, ...], list[str]] = {}
    for unit in report.units:
        for group in unit.groups:
            least = max(group.lower_bound_numel / group.numel - 1, 0.0) if group.numel else 0.0
            if group.padding_ratio:
                key = (f"{group.padding_ratio:.3%}", f"{least:.3%}", group.binding)
                seen.setdefault(key, []).append(unit.name)
    rows += [(unit_names(tuple(dict.fromkeys(names))), *key) for key, names in seen.items()]
    return Table(rows, has_note=True)


def _hiding_table(projection: Projection, alike: Sequence[tuple[tuple[str, ...], int, UnitReport]]) -> Table:
    """Return, for each kind of unit, the time of its collectives beside that of its compute."""
    rows: list[tuple[str, ...]] = [
        ("unit, per microbatch", "gather", "forward", "gather again", "reduce", "backward", "per step, at the end")
    ]
    for names, position, _ in alike:
        times: tuple[float, ...] = dataclasses.astuple(projection.time.units[position])
        if any(times):
            rows.append((unit_names(names), *(format_seconds(seconds) if seconds else "-" for seconds in times)))
    return Table(rows)


# ---------------------------------------------------------------------- memory


def _memory_table(projection: Projection, limit_bytes: int | None) -> Table:
    """Return what a rank takes, and all of them; the bar of each part begins where the one before it ends."""
    total, inside = projection.memory_bytes, projection.setup.parallelism
    num_ranks = projection.setup.sharding.num_ranks * inside.tensor
    scale = max(total, limit_bytes or 0, 1)

    def bar(start: int, stop: int) -> str:
        # What is there at all takes at least one mark.
        first = min(round(_BAR * start / scale), _BAR - 1)
        return " " * first + "#" * (max(round(_BAR * stop / scale) - first, 1) if stop > start else 0)

    rows = [("memory", "one rank", "all of the stage" if inside.pipeline > 1 else "all ranks", "")]
    start = 0
    for part in projection.memory:
        sizes = [format_bytes(part.num_bytes * count) if part.is_known else "not known" for count in (1, num_ranks)]
        rows.append((part.name, sizes[0], sizes[1], bar(start, start + part.num_bytes)))
        start += part.num_bytes
    rows.append(("total", format_bytes(total), format_bytes(total * num_ranks), bar(0, total)))
    if limit_bytes is not None:
        left = limit_bytes - total
        verdict = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} too much"
        rows.append(("limit", format_bytes(limit_bytes), "", f"{bar(0, limit_bytes)} {verdict}"))
    return Table(rows, has_note=True)


def _peak_table(projection: Projection, report: Report) -> Table:
    rows: list[tuple[str, ...]] = [("transient peak", "bytes", "reached by")]
    phases = {"forward": report.forward_peak, "backward": report.backward_peak, "optimizer step": report.step_peak}
    rows += [(name, format_bytes(peak.num_bytes), peak.unit) for name, peak in phases.items()]
    rows.append(("largest unit, gathered", format_bytes(report.largest_unit_bytes), report.largest_unit))
    lifetimes = projection.forecast.lifetimes
    if lifetimes:
        arena = plan_arena(lifetimes)
        held = f"{format_bytes(arena.lower_bound)} of it held at most, gap {arena.gap:.2%}: set_slot_pool('static')"
        rows.append(("as a static arena", format_bytes(arena.num_bytes), held))
    return Table(rows, has_note=True)


# ---------------------------------------------------------------------- time


def _time_table(projection: Projection) -> Table:
    time, workload = projection.time, projection.setup.workload
    hidden = max(time.communication - time.exposed, 0.0)
    share = f"{hidden / time.communication:.0%} of it hidden" if time.communication else "none"
    needed = "" if time.tokens_to_hide is None else f"{time.tokens_to_hide:,} tokens per rank and microbatch hide it"
    errors = _errors()
    compared = f"median of {errors['settings']} steps on CPUs ({errors['clock']} time)"
    rows: list[tuple[str, float, str]] = [
        ("compute", time.compute, f"{workload.num_microbatches:,} microbatches of {workload.tokens:,} tokens"),
        ("communication", time.communication, f"{share}; {needed}".strip("; ")),
        ("not hidden", time.exposed, "; ".join(f"{words} {format_seconds(each)}" for words, each in time.causes[:2])),
        ("copying", time.copying, "of weights and gradients, on the compute stream; the rest is on the lanes"),
    ]
    if projection.played.owners:
        spent = sum(each.max_flops for each in projection.played.owners) / projection.setup.hardware.flops
        words = f"of it Newton-Schulz on the rank with most, {format_seconds(spent)}; its messages are not counted"
        rows.append(("Muon and AdamW", time.optimizer, words))
    else:
        rows.append(("AdamW", time.optimizer, "bound by memory"))
    if projection.transfers:
        rows.append(("inside the model", time.model_parallel, "taken not to be hidden"))
    if projection.setup.parallelism.pipeline > 1:
        rows.append(("waiting for stages", time.bubble, "one forward, one backward in turn"))
    head = [
        ("time", "", ""),
        ("one optimizer step", format_seconds(time.total), f"{projection.tokens_per_second:,.0f} tokens/s and rank"),
        (
            "error bar",
            f"{errors['median']:.0f} %",
            f"{compared}, worst {errors['worst']:.0f} %; never compared with a GPU",
        ),
    ]
    return Table([*head, *((name, format_seconds(seconds), words) for name, seconds, words in rows)], has_note=True)


def _errors() -> dict[str, Any]:
    """Return how far such predictions were off, in percent, where they were compared: on CPUs, with measured speeds."""
    text = files("megatron_fsdp.planning").joinpath("error_bar.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _transfer_table(projection: Projection) -> Table:
    """Return what is sent over axes that are not data-parallel."""
    rows: list[tuple[str, ...]] = [("inside the model, per step", "collective", "over", "ranks", "count", "bytes each")]
    for each in projection.transfers:
        kind, axis, num_ranks, num_bytes = dataclasses.astuple(each.transfer)
        rows.append((each.what, kind, axis, f"{num_ranks:,}", f"{each.count:,}", format_bytes(num_bytes)))
    return Table(rows, num_left=3)


def _stage_table(stages: Sequence[Projection]) -> Table:
    """Return a table of the stages of a pipeline: layers, memory and time of one rank of each."""
    rows: list[tuple[str, ...]] = [("stage", "layers", "parameters", "activations", "memory", "busy in a step")]
    for each in stages:
        found = _stage_dict(each)
        first, activations = found["first_layer"], (part for part in each.memory if part.name == "activations")
        rows.append(
            (
                str(found["number"]),
                f"{first} to {first + found['num_layers'] - 1}",
                format_count(found["num_parameters"]),
                format_bytes(sum(part.num_bytes for part in activations)),
                format_bytes(found["memory_bytes"]),
                format_seconds(found["busy_seconds"]),
            )
        )
    return Table(rows)


# ---------------------------------------------------------------------- plain data


def to_dict(projection: Projection, decisions: Sequence[str], stages: Sequence[Projection] = ()) -> dict[str, Any]:
    """Return the plan as plain data; docs/planning.md describes the keys."""
    report, setup, time, subject = projection.report(), projection.setup, projection.time, projection.subject
    plain = report.to_dict()
    units = []
    for names, position, _ in folded(report):
        unit = plain["units"][position]
        del unit["name"]
        units.append({**unit, "count": len(names), "names": list(names)})
    names = ("total", "compute", "communication", "exposed", "copying", "optimizer")
    return {
        "format": FORMAT,
        "model": {each: getattr(subject, each) for each in ("name", "num_parameters", "num_active_parameters")},
        "strategy": setup.strategy,
        "mesh": [{"axis": axis.name, "size": axis.size} for axis in setup.sharding.axes],
        "workload": {**dataclasses.asdict(setup.workload), "recompute": setup.workload.recompute.value},
        "decisions": list(decisions),
        **({"parallelism": _inside_dict(projection)} if projection.stage is not None else {}),
        "memory": {
            "total_bytes": projection.memory_bytes,
            "parts": [dataclasses.asdict(part) for part in projection.memory],
        },
        "report": {**plain, "units": units},
        **({"owners": [each.to_dict() for each in projection.played.owners]} if projection.played.owners else {}),
        "time": {
            **{f"{name}_seconds": getattr(time, name) for name in names},
            "error_bar": _errors(),
            "waits": dict(time.causes[:_MOST_WAITS]),
            "tokens_to_hide": time.tokens_to_hide,
            "tokens_per_second": projection.tokens_per_second,
            "links": {
                axis: {"bytes_per_second": link.bytes_per_second, "latency_seconds": link.latency}
                for axis, link in setup.hardware.links.items()
            },
        },
        **({"stages": [_stage_dict(each) for each in stages]} if stages else {}),
    }


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


def _inside_dict(projection: Projection) -> dict[str, Any]:
    assert projection.stage is not None
    sharding = projection.setup.sharding
    expert_axes = sharding.expert_axes or sharding.axes
    return {
        **dataclasses.asdict(projection.setup.parallelism),
        "stage": projection.stage.number,
        "expert_mesh": [{"axis": axis.name, "size": axis.size} for axis in expert_axes],
        "transfers": [
            {"what": each.what, **dataclasses.asdict(each.transfer), "count": each.count}
            for each in projection.transfers
        ],
        "model_parallel_seconds": projection.time.model_parallel,
        "bubble_seconds": projection.time.bubble,
    }
