"""The page of ``megatron-fsdp plan``: what one setup takes, as tables and as plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from dbuffer.planner.arena import plan_arena
from megatron_fsdp.formatting import Bar, Span, Table, format_bytes, format_count, format_seconds, listing
from megatron_fsdp.planning.cost_model import played_microbatches
from megatron_fsdp.planning.estimate import MemoryPart, Projection
from megatron_fsdp.planning.report import Report, arena_words, folded

__all__ = ["FORMAT", "headline", "memory_table", "plan_tables", "to_dict"]

FORMAT = 1
"""Of the JSON; it grows by one whenever a key changes its meaning or goes away."""

_MOST_WAITS = 20


def plan_tables(
    best: Projection, decisions: Sequence[str], limit_bytes: int | None, stages: Sequence[Projection]
) -> Iterator[Table]:
    """Yield what a page shows, in order.

    Args:
        decisions: one line per choice, with the option that caused it. stages: of a pipeline.
    """
    report = best.report()
    *tables, notes, assumed = report.tables()
    yield listing("what decided it", decisions)
    yield memory_table(best, limit_bytes)
    yield _unit_chart(report)
    yield from tables
    if lifetimes := best.forecast.lifetimes:
        arena = plan_arena(lifetimes)
        words = f"{arena_words(arena)}: set_slot_pool('static')"
        yield Table.of([{"all that is transient": "as a static arena", "bytes": arena.num_bytes, "": words}])
    for owner in best.played.owners:
        yield Table([(line,) for line in owner.lines()])
    if best.transfers:
        yield Table.of(_transfers(best), "sent inside the model in a step")
    yield _time_table(best)
    if best.time.compute:
        yield _timeline(best)
    # The time of each unit's collectives beside that of its compute.
    times = [(name, asdict(best.time.units[positions[0]])) for name, positions, _ in folded(report)]
    yield Table.of(
        {"per microbatch; tail: per step": name, **{f"{what}_seconds": seconds for what, seconds in each.items()}}
        for name, each in times
        if any(each.values())
    )
    if len(stages) > 1:
        yield Table.of(map(_stage_dict, stages), "stages, one rank of each")
    yield notes
    yield assumed


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


# ---------------------------------------------------------------------- memory


def memory_table(projection: Projection, limit_bytes: int | None) -> Table:
    """Return what a rank takes, and all of them; the bar of each part begins where the one before it ends."""
    total, inside, memory = projection.memory_bytes, projection.setup.parallelism, projection.memory
    num_ranks = projection.setup.sharding.num_ranks * inside.tensor
    ranks = "all_of_the_stage_bytes" if inside.pipeline > 1 else "all_ranks_bytes"
    end, rows = max(total, limit_bytes or 0, 1), list[dict[str, Any]]()
    spans = [*_stacked((part.name, part.num_bytes) for part in memory), *_stacked([("total", total)])]
    for part, span in zip((*memory, MemoryPart("total", total)), spans, strict=True):
        sizes = (part.num_bytes, part.num_bytes * num_ranks) if part.is_known else ("not known", "not known")
        rows.append({"memory": part.name, "one_rank_bytes": sizes[0], ranks: sizes[1], "": Bar((span,), end)})
    if limit_bytes is not None:
        left = limit_bytes - total
        name = f"limit, {format_bytes(abs(left))} {'left' if left >= 0 else 'too much'}"
        rows.append({"memory": name, "one_rank_bytes": limit_bytes, "": Bar(_stacked([(name, limit_bytes)]), end)})
    return Table.of(rows)


def _stacked(parts: Iterable[tuple[str, int]]) -> list[Span]:
    """Return spans of bytes, one behind the other."""
    spans, start = list[Span](), 0
    for name, size in parts:
        spans.append(Span(start, start + size, f"{name}: {format_bytes(size)}", len(spans)))
        start += size
    return spans


def _unit_chart(report: Report) -> Table:
    """Return what each kind of unit takes on one rank."""
    rows = {}
    for name, _, unit in folded(report):
        gathered, packed = (unit.transient_bytes(kind) for kind in ("gathered weights", "packed gradients"))
        sizes = {"at rest": unit.persistent_bytes, "gathered": gathered, "packed": packed}
        rows[name] = _stacked((f"{name}, {kind}", size) for kind, size in sizes.items())
    end = max(1, *(spans[-1].stop for spans in rows.values()))
    head = "at rest, gathered, packed"
    return Table.of({"bytes of each unit": name, head: Bar(spans, end)} for name, spans in rows.items())


# ---------------------------------------------------------------------- time


def _time_table(projection: Projection) -> Table:
    time, workload = projection.time, projection.setup.workload
    hidden = max(time.communication - time.exposed, 0.0)
    share = f"{hidden / time.communication:.0%} of it hidden" if time.communication else "none"
    needed = "" if time.tokens_to_hide is None else f"{time.tokens_to_hide:,} tokens per rank and microbatch hide it"
    errors = _errors()
    rows: list[tuple[str, float, str]] = [
        ("one optimizer step", time.total, f"{projection.tokens_per_second:,.0f} tokens/s and rank"),
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
    compared = f"median of {errors['settings']} steps on CPUs ({errors['clock']} time), worst {errors['worst']:.0f} %"
    texts = ({"time": name, "seconds": seconds, "": words} for name, seconds, words in rows)
    error = {"time": "error bar", "seconds": f"{errors['median']:.0f} %", "": f"{compared}; never compared with a GPU"}
    return Table.of([*texts, error])


def _errors() -> dict[str, Any]:
    """Return how far such predictions were off, in percent, where they were compared: on CPUs, with measured speeds."""
    text = files("megatron_fsdp.planning").joinpath("error_bar.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _timeline(projection: Projection) -> Table:
    """Return the lanes of the engine's step, of at most three microbatches, and what no compute hides."""
    played = played_microbatches(projection.played, projection.setup.workload, projection.setup.hardware)
    lanes: dict[str, list[Span]] = {"gathers": [], "compute": [], "not hidden": [], "reductions": []}
    for run in sorted(played.runs, key=lambda run: run.start):
        if run.end > run.start and run.work.ranks:
            lane, colour = ("gathers", 2) if run.work.kind == "all_gather" else ("reductions", 3)
            lanes[lane].append(Span(run.start, run.end, run.work.label or run.work.name, colour))
        elif run.end > run.start and run.stream == "compute" and run.work.kind != "memory":
            is_forward, spans, start = run.work.name == "forward", lanes["compute"], run.start
            name = f"{run.unit}, {'forward' if is_forward else 'backward'}"
            # What a unit computes without a gap is one piece.
            if spans and spans[-1].title == name and start - spans[-1].stop < 1e-5:
                start = spans.pop().start
            spans.append(Span(start, run.end, name, int(is_forward)))
    total = played.seconds + projection.time.optimizer
    lanes["compute"].append(Span(played.seconds, total, "optimizer", 5))
    for before, after in zip([Span(0, 0, ""), *lanes["compute"]], lanes["compute"], strict=False):
        if after.start - before.stop > 1e-4 * total:
            lanes["not hidden"].append(Span(before.stop, after.start, "not hidden", 4))
    count = min(projection.setup.workload.num_microbatches, 3)
    title = f"timeline of a step of {count} microbatch{'es' * (count > 1)}"
    rows = []
    for lane, spans in lanes.items():
        named = [each._replace(title=f"{each.title}: {format_seconds(each.stop - each.start)}") for each in spans]
        rows.append({title: lane, f"{format_seconds(total)}; none of what is sent inside the model": Bar(named, total)})
    return Table.of(rows)


# ---------------------------------------------------------------------- plain data


def to_dict(projection: Projection, decisions: Sequence[str], stages: Sequence[Projection] = ()) -> dict[str, Any]:
    """Return the plan as plain data; docs/planning.md describes the keys."""
    report, setup, time, subject = projection.report(), projection.setup, projection.time, projection.subject
    plain = report.to_dict()
    units = []
    for _, positions, _ in folded(report):
        unit = plain["units"][positions[0]]
        del unit["name"]
        units.append({**unit, "count": len(positions), "names": [report.units[at].name for at in positions]})
    names = ("total", "compute", "communication", "exposed", "copying", "optimizer")
    found: dict[str, Any] = {
        "format": FORMAT,
        "model": {each: getattr(subject, each) for each in ("name", "num_parameters", "num_active_parameters")},
        "strategy": setup.strategy,
        "mesh": [{"axis": axis.name, "size": axis.size} for axis in setup.sharding.axes],
        "workload": asdict(setup.workload),
        "decisions": list(decisions),
        "memory": {"total_bytes": projection.memory_bytes, "parts": [asdict(part) for part in projection.memory]},
        "report": {**plain, "units": units},
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
    }
    if projection.played.owners:
        found["owners"] = [each.to_dict() for each in projection.played.owners]
    if projection.stage is not None:
        found["parallelism"] = _inside_dict(projection)
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


def _inside_dict(projection: Projection) -> dict[str, Any]:
    assert projection.stage is not None
    sharding = projection.setup.sharding
    expert_axes = sharding.expert_axes or sharding.axes
    return {
        **asdict(projection.setup.parallelism),
        "stage": projection.stage.number,
        "expert_mesh": [{"axis": axis.name, "size": axis.size} for axis in expert_axes],
        "transfers": _transfers(projection),
        "model_parallel_seconds": projection.time.model_parallel,
        "bubble_seconds": projection.time.bubble,
    }


def _transfers(projection: Projection) -> list[dict[str, Any]]:
    return [{"what": each.what, **asdict(each.transfer), "count": each.count} for each in projection.transfers]
