"""Report: what a sharded model takes, known before it is trained: buffers, padding, transient memory and traffic."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer

from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.formatting import Listing, Table, _percent, format_bytes
from megatron_fsdp.optim.muon import explain_ownership
from megatron_fsdp.optim.ownership import OwnershipReport
from megatron_fsdp.planning.played_step import PlayedStep, play_step
from megatron_fsdp.planning.stand_in import live_stand_ins, unsharded
from megatron_fsdp.planning.step_listener import Forecast, Peak, Phase
from megatron_fsdp.planning.unit_report import CollectiveReport, GroupReport, UnitReport
from megatron_fsdp.runtime.step.unit import units_below

__all__ = ["ArenaReport", "CollectiveTotal", "Report", "explain", "notes", "report_of", "traffic_table", "unit_table"]

_ASSUMPTIONS = (
    "each unit is called once per forward, in the order in which modules are registered, as in the step before",
    "inputs need no gradient, every trainable parameter gets one; no recomputation in backward, no no_sync",
    "the optimizer holds the trainable parameters and went through fully_shard_optimizer",
    "gradients are set to None (zero_grad's default) before the next step's forward",
    "clipping, checkpoints and evaluation are not counted",
    "the workspace of collectives and the allocator's rounding are not counted",
)
_KEPT = "kept after forward: the last that forward uses, its backward is next"


@dataclass(frozen=True, slots=True)
class CollectiveTotal:
    """All collectives of one kind, axis and phase in one optimizer step; ``num_bytes`` sums their full sides."""

    phase: str
    kind: str
    axis: str
    num_ranks: int
    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ArenaReport:
    """A static arena: its bytes, the most that buffers in it hold at once, and how much larger it is, 0 for not."""

    num_bytes: int
    lower_bound: int
    gap: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a sharded model takes. All bytes are one rank's; ``str()`` gives a page to read, ``to_dict`` plain data.

    Attributes:
        persistent_bytes: what the buffers take at rest, as ``dbuffer.memory_meter`` counts it. padding_bytes: the part
            of it that holds no parameter.
        gradient_bytes: what gradients take from a unit's backward until ``zero_grad`` sets them to None.
        optimizer_bytes: what ``torch.optim.AdamW`` will add: two moments, and 4 bytes per parameter for its step count.
        largest_unit, largest_unit_bytes: the unit with most bytes of gathered weights in compute dtype.
        forward_peak, backward_peak, step_peak: the most bytes held beyond ``persistent_bytes``, and at which unit.
        slot_bytes: of these, what is held in all phases once the first step is over: slots (``set_slot_pool``).
        arenas: those among these, of ``set_slot_pool("static")``.
        counter_bytes: of the peaks, what ``reduction="invariant"`` adds microbatches up in, from the first step on.
        num_roots: units with no unit around them; each has a schedule of its own.
        unsharded_bytes: parameters that belong to no unit, named in ``unsharded``.
        assumptions: what the peaks and the collectives rest on.

    Example:
        report = explain(model)
        print(report)
        print(f"{report.persistent_bytes:,} bytes at rest, at most {report.backward_peak.num_bytes:,} more in backward")
    """

    num_microbatches: int
    num_roots: int
    units: tuple[UnitReport, ...]
    persistent_bytes: int
    padding_bytes: int
    optimizer_bytes: int
    largest_unit: str
    largest_unit_bytes: int
    forward_peak: Peak
    backward_peak: Peak
    step_peak: Peak
    collectives: tuple[CollectiveTotal, ...]
    unsharded: tuple[str, ...]
    unsharded_bytes: int
    assumptions: tuple[str, ...]
    slot_bytes: int = 0
    gradient_bytes: int = 0
    arenas: tuple[ArenaReport, ...] = ()
    counter_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dictionaries, lists, strings and numbers, ready for ``json.dumps``."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain

    def __str__(self) -> str:
        remarks, assumed = notes(self)
        parts = (
            unit_table(self).lines(),
            _total_table(self).lines(),
            traffic_table(self).lines(),
            [*remarks.lines(), *assumed.lines()],
        )
        return "\n\n".join("\n".join(lines) for lines in parts)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


# ---------------------------------------------------------------------- the content


@overload
def explain(model: nn.Module, num_microbatches: int = 1) -> Report: ...


@overload
def explain(model: Optimizer, num_microbatches: int = 1) -> tuple[OwnershipReport, ...]: ...


def explain(model: nn.Module | Optimizer, num_microbatches: int = 1) -> Report | tuple[OwnershipReport, ...]:
    """Report on the sharded modules in ``model``: nothing is run, communicated or changed.

    Args:
        model: or a ``Muon`` optimizer, of which every rank asks who owns which matrix (``explain_ownership``).
        num_microbatches: forward and backward passes per optimizer step, each inside ``microbatch(model, is_last)``.
    Raises:
        StateError: ``model`` holds no sharded module.
        ConfigError: ``num_microbatches`` is less than 1.

    Example:
        for block in model.blocks:
            fully_shard(block)
        print(explain(fully_shard(model), num_microbatches=4))
    """
    if isinstance(model, Optimizer):
        return explain_ownership(model)
    if num_microbatches < 1:
        raise ConfigError(f"explain: num_microbatches={num_microbatches}; an optimizer step has at least one")
    units = list(units_below(model))
    if not units:
        raise StateError(
            f"{type(model).__name__} holds no sharded module; call fully_shard on its blocks and on it first"
        )
    played = play_step(partial(live_stand_ins, model, units), [num_microbatches])
    return report_of(played, num_microbatches, left=unsharded(model, units))


def report_of(
    played: PlayedStep,
    num_microbatches: int,
    assumptions: Sequence[str] = ("nor are activations",),
    left: Mapping[str, nn.Parameter] | None = None,
) -> Report:
    """Return the report on a step that was played.

    Args:
        assumptions: more of them. left: parameters that belong to no unit.
    """
    left = left or {}
    forecast = played.forecasts[num_microbatches]
    collectives = _collectives(forecast)
    units = tuple(
        replace(
            unit,
            reason=_KEPT if position in forecast.kept else unit.reason,
            groups=tuple(
                replace(group, collectives=collectives.get((position, number), ()))
                for number, group in enumerate(unit.groups)
            ),
        )
        for position, unit in enumerate(played.units)
    )
    groups = [group for unit in units for group in unit.groups]
    largest = max(units, key=lambda unit: unit.whole_bytes)
    return Report(
        num_microbatches=num_microbatches,
        num_roots=sum(unit.is_root for unit in units),
        units=units,
        persistent_bytes=sum(unit.persistent_bytes for unit in units),
        padding_bytes=sum(group.padding_bytes for group in groups),
        gradient_bytes=sum(unit.transient_bytes("main_grad") for unit in units),
        optimizer_bytes=played.optimizer_bytes,
        largest_unit=largest.name,
        largest_unit_bytes=largest.whole_bytes,
        forward_peak=forecast.peaks[Phase.FORWARD],
        backward_peak=forecast.peaks[Phase.BACKWARD],
        step_peak=forecast.peaks[Phase.STEP],
        collectives=_collective_totals(groups),
        unsharded=tuple(left),
        unsharded_bytes=sum(parameter.nbytes for parameter in left.values()),
        slot_bytes=forecast.slot_bytes,
        counter_bytes=forecast.counter_bytes,
        assumptions=(*_ASSUMPTIONS, *assumptions),
        arenas=tuple(ArenaReport(arena.num_bytes, arena.lower_bound, arena.gap) for arena in played.arenas),
    )


def _collectives(forecast: Forecast) -> dict[tuple[int, int], tuple[CollectiveReport, ...]]:
    """Return what each group issues, by the positions of unit and group."""
    counts: Counter[tuple[int, int, CollectiveReport]] = Counter()
    for issue, count in forecast.issues.items():
        kind, axis, num_ranks, num_bytes = issue.transfer
        counts[issue.unit, issue.group, CollectiveReport(issue.phase.value, kind, axis, num_ranks, 0, num_bytes)] += (
            count
        )
    found: dict[tuple[int, int], list[CollectiveReport]] = {}
    for (unit, group, collective), count in counts.items():
        found.setdefault((unit, group), []).append(replace(collective, count=count))
    return {key: tuple(each) for key, each in found.items()}


def _collective_totals(groups: Iterable[GroupReport]) -> tuple[CollectiveTotal, ...]:
    totals: dict[tuple[str, str, str, int], list[int]] = {}
    for each in (each for group in groups for each in group.collectives):
        total = totals.setdefault((each.phase, each.kind, each.axis, each.num_ranks), [0, 0])
        total[0] += each.count
        total[1] += each.count * each.bytes_each
    phases = [phase.value for phase in Phase]
    ordered = sorted(totals, key=lambda key: (phases.index(key[0]), key))
    return tuple(CollectiveTotal(*key, *totals[key]) for key in ordered)


# ---------------------------------------------------------------------- the page


def unit_table(report: Report) -> Table:
    """Return the table of units, alike ones in one row."""
    rows: list[tuple[str, ...]] = [
        ("unit", "module", "dtype", "params", "elements", "padding", "at rest", "gathered", "packed", "after forward")
    ]
    alike: dict[tuple[str, ...], list[str]] = {}
    for unit in report.units:
        alike.setdefault(_unit_row(unit), []).append(unit.name)
    for row, names in alike.items():
        name = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} alike, each)"
        rows.append((name, *row))
    groups = [group for unit in report.units for group in unit.groups]
    rows.append(("total", "", "", *_amounts(groups), format_bytes(report.persistent_bytes), "", "", ""))
    return Table(rows, num_left=3)


def _unit_row(unit: UnitReport) -> tuple[str, ...]:
    modules = _shortened(list(dict.fromkeys(unit.modules)))
    if not unit.groups:
        return (modules, "-", "none of its own", "", "", "", "", "", "")
    return (
        modules,
        _shortened(list(dict.fromkeys(_dtype_text(group) for group in unit.groups))),
        *_amounts(unit.groups),
        format_bytes(unit.persistent_bytes),
        format_bytes(unit.transient_bytes("gathered weights")),
        format_bytes(unit.transient_bytes("packed gradients")),
        "released" if unit.reshards_after_forward else "kept",
    )


def _amounts(groups: Sequence[GroupReport]) -> tuple[str, str, str]:
    numel = sum(group.numel for group in groups)
    padding = sum(group.buffer_numel for group in groups) - numel
    return f"{sum(group.num_parameters for group in groups):,}", f"{numel:,}", _percent(padding, numel)


def _dtype_text(group: GroupReport) -> str:
    """Return compute/main/reduce/main_grad, or the one dtype that they all are."""
    dtypes = [group.compute_dtype, group.main_dtype, group.reduce_dtype, group.main_grad_dtype]
    short = [dtype.replace("float", "fp").replace("bfp", "bf") for dtype in dtypes]
    text = short[0] if len(set(short)) == 1 else "/".join(short)
    return text if group.requires_grad else f"{short[0]} frozen"


def _total_table(report: Report) -> Table:
    largest = report.largest_unit_bytes

    def peak(found: Peak) -> tuple[int, str]:
        buffers = found.num_bytes - found.gradient_bytes
        ratio = f"{buffers / largest:.2f} x the largest unit" if largest else ""
        gradients = f" beside {format_bytes(found.gradient_bytes)} of gradients" if found.gradient_bytes else ""
        where = f", reached by {found.unit}" if found.unit else ""
        return buffers, f"{ratio}{gradients}{where}" if found.num_bytes else ""

    peaks = (report.forward_peak, report.backward_peak, report.step_peak)
    highest = report.persistent_bytes + report.optimizer_bytes + max(found.num_bytes for found in peaks)
    rows: list[tuple[str, int, str]] = [
        (
            "buffers at rest",
            report.persistent_bytes,
            f"{format_bytes(report.padding_bytes)} of it padding on this rank",
        ),
        ("AdamW state (expected)", report.optimizer_bytes, "two moments and a step count"),
    ]
    if report.gradient_bytes:
        rows.append(("gradients", report.gradient_bytes, "from a unit's backward until zero_grad()"))
    rows.append(("largest unit, gathered", largest, f"{report.largest_unit}, weights in compute dtype"))
    names = ("transient, forward", "transient, backward", "transient, optimizer step")
    rows += [(name, *peak(found)) for name, found in zip(names, peaks, strict=True)]
    if report.slot_bytes:
        rows.append(("of it slots that stay", report.slot_bytes, "weights and gradients take turns in them"))
    if report.counter_bytes:
        rows.append(("of it sums that stay", report.counter_bytes, 'microbatches, added as reduction="invariant"'))
    for arena in report.arenas:
        held = f"{format_bytes(arena.lower_bound)} of it held at most, gap {arena.gap:.2%}"
        rows.append(("of it an arena", arena.num_bytes, held))
    rows.append(("total at the highest", highest, "at rest + AdamW + gradients + transient, without activations"))
    return Table(
        [("per rank", "", ""), *((name, format_bytes(size), note) for name, size, note in rows)], has_note=True
    )


def traffic_table(report: Report) -> Table:
    """Return the table of collectives by phase, kind and axis."""
    plural = "" if report.num_microbatches == 1 else "es"
    title = f"collectives per optimizer step of {report.num_microbatches} microbatch{plural}, bytes of the full side"
    rows: list[tuple[str, ...]] = [("phase", "collective", "axis", "ranks", "count", "bytes")]
    for each in report.collectives:
        counts = (f"{each.num_ranks:,}", f"{each.count:,}", format_bytes(each.num_bytes))
        rows.append((each.phase, each.kind, each.axis, *counts))
    if report.collectives:
        count = sum(total.count for total in report.collectives)
        rows.append(("all", "", "", "", f"{count:,}", format_bytes(sum(each.num_bytes for each in report.collectives))))
    return Table(rows, num_left=3, title=title)


def notes(report: Report) -> tuple[Listing, Listing]:
    """Return what is worth knowing of single units, and what the report assumes."""
    return Listing("notes", [*_unit_notes(report), *_padding_notes(report)]), Listing("assumed", report.assumptions)


def _unit_notes(report: Report) -> Iterator[str]:
    units = report.units

    def grouped(words: Iterable[tuple[str, str]]) -> Iterator[str]:
        """Yield words with the units of which they are said."""
        said: dict[str, dict[str, None]] = {}
        for each, name in words:
            said.setdefault(each, {})[name] = None
        yield from (f"{each}: {_shortened(list(names))}" for each, names in said.items())

    yield from grouped((unit.reason, unit.name) for unit in units)
    if report.num_roots > 1:
        yield (
            f"{report.num_roots} units have no unit around them, so nothing is gathered ahead and each keeps its "
            f"weights until its backward; call fully_shard on the outermost module too"
        )
    frozen = "frozen groups, without gradients"
    yield from grouped((frozen, unit.name) for unit in units if unit.num_frozen_groups)
    yield from grouped((words, unit.name) for unit in units for group in unit.groups for words in _wide(group))
    yield from _root_notes(report)
    yield from grouped((group.wire, unit.name) for unit in units for group in unit.groups if group.wire)
    whole = "whole on every rank, not sharded"
    yield from grouped((whole, f"{unit.name}: {name}") for unit in units for name in unit.replicated)
    yield from grouped(("tied parameters", " = ".join(names)) for unit in units for names in unit.ties)
    hooks = "counted as plain weights in their compute dtype, though all-gather hooks of their own say what travels"
    yield from grouped((hooks, f"{unit.name}: {name}") for unit in units for name in unit.has_hooks)
    if report.unsharded:
        yield (
            f"in no unit, {format_bytes(report.unsharded_bytes)} on every rank, gradients not reduced "
            f"(ignored_params, or no fully_shard of the module around them): {_shortened(report.unsharded)}"
        )


def _padding_notes(report: Report) -> Iterator[str]:
    padded = [(unit.name, group) for unit in report.units for group in unit.groups if group.padding_ratio]
    if padded:
        name, worst = max(padded, key=lambda entry: entry[1].buffer_numel - entry[1].numel)
        yield (
            f"most padding: {name}, {worst.buffer_numel - worst.numel:,} elements ({worst.padding_ratio:.2%}; at most "
            f"{worst.gap:.2%} above the optimum); what forces it: {worst.binding}"
        )


def _wide(group: GroupReport) -> Iterator[str]:
    """Say where gradients are reduced in more bytes than weights compute in, which a policy that is silent chooses."""
    compute, wire = getattr(torch, group.compute_dtype), getattr(torch, group.reduce_dtype)
    if group.requires_grad and wire.itemsize > compute.itemsize:
        yield (
            f"gradients of {group.compute_dtype} weights are reduced in {group.reduce_dtype}, which is the default "
            "(reduce_dtype=None) where that is the parameters' grad_dtype, as in PyTorch 2.15; "
            f"reduce_dtype={compute} sends {compute.itemsize / wire.itemsize:.0%} of the bytes"
        )


def _root_notes(report: Report) -> Iterator[str]:
    """Say what it costs that a root owns layers of its own, as large as those of other units or larger."""
    for unit in (unit for unit in report.units if unit.is_root):
        packed = unit.transient_bytes("packed gradients")
        others = [each.transient_bytes("packed gradients") for each in report.units if each.name != unit.name]
        is_several = sum(group.num_parameters for group in unit.groups if group.requires_grad) > 1
        if is_several and 0 < max(others, default=0) <= packed:
            yield (
                f"{unit.name}, the root, owns parameters itself: where forward uses some of them first and some last, "
                f"as an embedding and a head, {format_bytes(packed)} of packed gradients stay from the "
                "head's to the end of backward, and nothing hides their reduction; give such layers units: "
                "fully_shard(model.embedding), fully_shard(model.head)"
            )


def _shortened(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3:,} more"
