"""The report's content, and the page that it prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fsdp.formatting import Listing, Table, _percent, format_bytes
from megatron_fsdp.planning.group_report import GroupReport

__all__ = [
    "ArenaReport",
    "CollectiveTotal",
    "PeakReport",
    "Report",
    "UnitReport",
    "notes",
    "traffic_table",
    "unit_table",
]

ASSUMPTIONS = (
    "each unit is called once per forward, in the order in which modules are registered, as in the step before",
    "inputs need no gradient, every trainable parameter gets one; no recomputation in backward, no no_sync",
    "the optimizer holds the trainable parameters and went through fully_shard_optimizer",
    "gradients are set to None (zero_grad's default) before the next step's forward",
    "clipping, checkpoints and evaluation are not counted",
    "the workspace of collectives and the allocator's rounding are not counted",
    "nor are activations",
)


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
class PeakReport:
    """The most bytes held in a phase beyond what rests, the gradients among them, and the unit that reached it."""

    num_bytes: int
    unit: str
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class UnitReport:
    """One unit.

    Attributes:
        modules: class names of its modules. is_root: no unit is around it.
        note: says so when it has no parameters of its own, else empty.
        reshards_after_forward: whether units like it give gathered weights back after forward. reason: what becomes of
            them, and why; the last unit that forward uses keeps them though.
        ties: for every parameter that is registered in several places, all of its names.
        num_frozen_groups: groups whose parameters need no gradient.
        replicated: parameters that stay whole on every rank in a model that is sharded (``fsdp_no_shard``).
    """

    name: str
    modules: tuple[str, ...]
    note: str
    reshards_after_forward: bool
    reason: str
    ties: tuple[tuple[str, ...], ...]
    num_frozen_groups: int
    groups: tuple[GroupReport, ...]
    replicated: tuple[str, ...] = ()
    is_root: bool = False

    @property
    def persistent_bytes(self) -> int:
        """Bytes of its buffers at rest; memory that two of them share counts once."""
        return sum(buffer.num_bytes for group in self.groups for buffer in group.resting if not buffer.shares)

    def transient_bytes(self, kind: str) -> int:
        """Return the bytes of its transient buffers of one kind."""
        return sum(buffer.num_bytes for group in self.groups for buffer in group.transient if buffer.kind == kind)


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
        counter_bytes, scratch_bytes: of the peaks, what ``reduction="invariant"`` adds microbatches up in, and what it
            receives in: both stay from the first step on.
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
    forward_peak: PeakReport
    backward_peak: PeakReport
    step_peak: PeakReport
    collectives: tuple[CollectiveTotal, ...]
    unsharded: tuple[str, ...]
    unsharded_bytes: int
    assumptions: tuple[str, ...] = ASSUMPTIONS
    slot_bytes: int = 0
    gradient_bytes: int = 0
    arenas: tuple[ArenaReport, ...] = ()
    counter_bytes: int = 0
    scratch_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dictionaries, lists, strings and numbers, ready for ``json.dumps``."""
        plain = _plain(dataclasses.asdict(self))
        assert isinstance(plain, dict)
        return plain

    def __str__(self) -> str:
        remarks, assumed = notes(self)
        parts = (
            unit_table(self).lines(),
            _total_lines(self),
            traffic_table(self).lines(),
            [*remarks.lines(), *assumed.lines()],
        )
        return "\n\n".join("\n".join(lines) for lines in parts)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


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
    numel = sum(group.numel for group in groups)
    padding = _percent(sum(group.buffer_numel for group in groups) - numel, numel)
    counts = (f"{sum(group.num_parameters for group in groups):,}", f"{numel:,}", padding)
    rows.append(("total", "", "", *counts, format_bytes(report.persistent_bytes), "", "", ""))
    return Table(rows, num_left=3)


def _has_wire(unit: UnitReport, words: str) -> bool:
    return any(group.wire == words for group in unit.groups)


def _unit_row(unit: UnitReport) -> tuple[str, ...]:
    modules = _shortened(list(dict.fromkeys(unit.modules)))
    if not unit.groups:
        return (modules, "-", "none of its own", "", "", "", "", "", "")
    numel = sum(group.numel for group in unit.groups)
    padding = sum(group.buffer_numel for group in unit.groups) - numel
    return (
        modules,
        _shortened(list(dict.fromkeys(_dtype_text(group) for group in unit.groups))),
        f"{sum(group.num_parameters for group in unit.groups):,}",
        f"{numel:,}",
        _percent(padding, numel),
        format_bytes(unit.persistent_bytes),
        format_bytes(unit.transient_bytes("gathered weights")),
        format_bytes(unit.transient_bytes("packed gradients")),
        "released" if unit.reshards_after_forward else "kept",
    )


def _dtype_text(group: GroupReport) -> str:
    """Return compute/main/reduce/main_grad, or the one dtype that they all are."""
    dtypes = [group.compute_dtype, group.main_dtype, group.reduce_dtype, group.main_grad_dtype]
    short = [dtype.replace("float", "fp").replace("bfp", "bf") for dtype in dtypes]
    text = short[0] if len(set(short)) == 1 else "/".join(short)
    return text if group.requires_grad else f"{short[0]} frozen"


def _total_lines(report: Report) -> list[str]:
    largest = report.largest_unit_bytes

    def peak(found: PeakReport) -> tuple[str, str]:
        buffers = found.num_bytes - found.gradient_bytes
        ratio = f"{buffers / largest:.2f} x the largest unit" if largest else ""
        gradients = f" beside {format_bytes(found.gradient_bytes)} of gradients" if found.gradient_bytes else ""
        where = f", reached by {found.unit}" if found.unit else ""
        return format_bytes(buffers), f"{ratio}{gradients}{where}" if found.num_bytes else ""

    peaks = (report.forward_peak, report.backward_peak, report.step_peak)
    highest = max(report.persistent_bytes + report.optimizer_bytes + found.num_bytes for found in peaks)
    rows = [
        ("per rank", "", ""),
        (
            "buffers at rest",
            format_bytes(report.persistent_bytes),
            f"{format_bytes(report.padding_bytes)} of it padding on this rank",
        ),
        ("AdamW state (expected)", format_bytes(report.optimizer_bytes), "two moments and a step count"),
        *[("gradients", format_bytes(report.gradient_bytes), "from a unit's backward until zero_grad()")]
        * bool(report.gradient_bytes),
        ("largest unit, gathered", format_bytes(largest), f"{report.largest_unit}, weights in compute dtype"),
        ("transient, forward", *peak(report.forward_peak)),
        ("transient, backward", *peak(report.backward_peak)),
        ("transient, optimizer step", *peak(report.step_peak)),
        *[("of it slots that stay", format_bytes(report.slot_bytes), "weights and gradients take turns in them")]
        * bool(report.slot_bytes),
        *[
            (
                "of it sums that stay",
                format_bytes(report.counter_bytes),
                'microbatches, added as reduction="invariant"',
            ),
            ("of it scratch that stays", format_bytes(report.scratch_bytes), "one unit after the other receives in it"),
        ]
        * bool(report.counter_bytes),
        *(
            (
                "of it an arena",
                format_bytes(arena.num_bytes),
                f"{format_bytes(arena.lower_bound)} of it held at most, gap {arena.gap:.2%}",
            )
            for arena in report.arenas
        ),
        ("total at the highest", format_bytes(highest), "at rest + AdamW + gradients + transient, without activations"),
    ]
    return [f"{label:<26}{size:>12}  {note}".rstrip() for label, size, note in rows]


def traffic_table(report: Report) -> Table:
    """Return the table of collectives by phase, kind and axis."""
    plural = "" if report.num_microbatches == 1 else "es"
    title = f"collectives per optimizer step of {report.num_microbatches} microbatch{plural}, bytes of the full side"
    rows: list[tuple[str, ...]] = [("phase", "collective", "axis", "ranks", "count", "bytes")]
    for total in report.collectives:
        rows.append(
            (
                total.phase,
                total.kind,
                total.axis,
                f"{total.num_ranks:,}",
                f"{total.count:,}",
                format_bytes(total.num_bytes),
            )
        )
    if report.collectives:
        count = sum(total.count for total in report.collectives)
        num_bytes = sum(total.num_bytes for total in report.collectives)
        rows.append(("all", "", "", "", f"{count:,}", format_bytes(num_bytes)))
    return Table(rows, num_left=3, title=title)


def notes(report: Report) -> tuple[Listing, Listing]:
    """Return what is worth knowing of single units, and what the report assumes."""
    lines = []
    for reason in dict.fromkeys(unit.reason for unit in report.units):
        lines.append(f"{reason}: {_shortened([unit.name for unit in report.units if unit.reason == reason])}")
    if report.num_roots > 1:
        lines.append(
            f"{report.num_roots} units have no unit around them, so nothing is gathered ahead and each keeps its "
            f"weights until its backward; call fully_shard on the outermost module too"
        )
    frozen = [unit.name for unit in report.units if unit.num_frozen_groups]
    if frozen:
        lines.append(f"frozen groups, without gradients: {_shortened(frozen)}")
    lines += [*_reduction_lines(report), *_root_lines(report)]
    for words in dict.fromkeys(group.wire for unit in report.units for group in unit.groups if group.wire):
        lines.append(f"{words}: {_shortened([unit.name for unit in report.units if _has_wire(unit, words)])}")
    replicated = [f"{unit.name}: {name}" for unit in report.units for name in unit.replicated]
    if replicated:
        lines.append(f"whole on every rank, not sharded: {_shortened(replicated)}")
    ties = [" = ".join(names) for unit in report.units for names in unit.ties]
    if ties:
        lines.append(f"tied parameters: {_shortened(ties)}")
    if report.unsharded:
        lines.append(
            f"in no unit, {format_bytes(report.unsharded_bytes)} on every rank, gradients not reduced "
            f"(ignored_params, or no fully_shard of the module around them): {_shortened(report.unsharded)}"
        )
    padded = [(unit.name, group) for unit in report.units for group in unit.groups if group.padding_ratio]
    if padded:
        name, worst = max(padded, key=lambda entry: entry[1].buffer_numel - entry[1].numel)
        lines.append(
            f"most padding: {name}, {worst.buffer_numel - worst.numel:,} elements ({worst.padding_ratio:.2%}; at most "
            f"{worst.gap:.2%} above the optimum); what forces it: {worst.binding}"
        )
    return Listing("notes", lines), Listing("assumed", report.assumptions)


def _reduction_lines(report: Report) -> list[str]:
    """Say where gradients are reduced in more bytes than weights compute in, which a policy that is silent chooses."""
    wide: dict[tuple[str, str], list[str]] = {}
    for unit in report.units:
        for group in unit.groups:
            compute, wire = getattr(torch, group.compute_dtype), getattr(torch, group.reduce_dtype)
            if group.requires_grad and wire.itemsize > compute.itemsize:
                wide.setdefault((group.compute_dtype, group.reduce_dtype), []).append(unit.name)
    return [
        f"gradients of {compute} weights are reduced in {wire}, which is the default (reduce_dtype=None) where that is "
        f"the parameters' grad_dtype, as in PyTorch 2.15; reduce_dtype=torch.{compute} sends "
        f"{getattr(torch, compute).itemsize / getattr(torch, wire).itemsize:.0%} of the bytes: "
        f"{_shortened(list(dict.fromkeys(names)))}"
        for (compute, wire), names in wide.items()
    ]


def _root_lines(report: Report) -> list[str]:
    """Say what it costs that a root owns layers of its own, as large as those of other units or larger."""
    packed = {unit.name: unit.transient_bytes("packed gradients") for unit in report.units}
    lines = []
    for unit in (unit for unit in report.units if unit.is_root):
        others = [num_bytes for name, num_bytes in packed.items() if name != unit.name]
        is_several = sum(group.num_parameters for group in unit.groups if group.requires_grad) > 1
        if is_several and 0 < max(others, default=0) <= packed[unit.name]:
            lines.append(
                f"{unit.name}, the root, owns parameters itself: where forward uses some of them first and some last, "
                f"as an embedding and a head, {format_bytes(packed[unit.name])} of packed gradients stay from the "
                "head's to the end of backward, and nothing hides their reduction; give such layers units: "
                "fully_shard(model.embedding), fully_shard(model.head)"
            )
    return lines


def _shortened(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3:,} more"
