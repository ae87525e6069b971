"""Report: memory, padding and communication of a sharded model, predicted before training."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.optim import Optimizer

from megatron_fsdp.engine.unit import Unit, units_below
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.formatting import Table, counted, format_bytes, listing
from megatron_fsdp.optim.muon.muon import explain_ownership
from megatron_fsdp.optim.muon.ownership import OwnershipReport
from megatron_fsdp.planning.cost_model import Hardware, play_in_time
from megatron_fsdp.planning.picture import draw, save, time_line
from megatron_fsdp.planning.played_step import PlayedStep, play_step
from megatron_fsdp.planning.stand_in import live_stand_ins, unsharded
from megatron_fsdp.planning.step_listener import Forecast, Peak, Phase
from megatron_fsdp.planning.transformer import Workload
from megatron_fsdp.planning.unit_report import CollectiveReport, GroupReport, UnitReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Report", "explain", "folded", "report_of", "shortened"]

_OWNING_ROOT = (
    "the root owns parameters itself. If forward uses some of them first and some last, as an embedding and a head, {} "
    "of packed gradients stay allocated from the head's to the end of backward, and nothing hides their reduction. "
    "fix: make such layers units: fully_shard(model.embedding), fully_shard(model.head)"
)


@dataclass(frozen=True, slots=True)
class Report:
    """The memory and communication of a sharded model. All bytes are one rank's.

    ``str(report)`` is a page of tables; ``to_dict`` returns plain data.

    Attributes:
        persistent_bytes: bytes of the buffers at rest, as ``dbuffer.memory_meter`` counts them. padding_bytes: the
            part of them that holds no parameter.
        gradient_bytes: bytes of gradients, from a unit's backward until ``zero_grad`` sets them to None.
        optimizer_bytes: bytes that ``torch.optim.AdamW`` will add: two moments, and 4 bytes per parameter for its step
            count.
        largest_unit, largest_unit_bytes: the unit with the most bytes of gathered weights in compute dtype.
        all_gathered_bytes: bytes that ``unsharded(model)`` adds: the gathered weights of all units at once.
        forward_peak, backward_peak, step_peak: the most bytes held beyond ``persistent_bytes``, and at which unit.
        slot_bytes: the part of the peaks in slots (``set_slot_pool``), which stay allocated after the first step.
        counter_bytes: the part of the peaks in which ``reduction="invariant"`` sums microbatches, from the first step
            on.
        num_roots: units that are inside no other unit; each has a separate schedule.
        unsharded_bytes: bytes of the parameters that belong to no unit, named in ``unsharded``.

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
    collectives: tuple[CollectiveReport, ...]
    unsharded: tuple[str, ...]
    unsharded_bytes: int
    slot_bytes: int = 0
    gradient_bytes: int = 0
    counter_bytes: int = 0
    all_gathered_bytes: int = 0
    _play_on_gpu: Callable[[], PlayedStep] | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[type[Report], tuple[Any, ...]]:
        """Pickle the numbers only. The copy cannot plot, because the model does not travel with it."""
        return type(self), tuple(getattr(self, each.name) for each in fields(self) if each.name != "_play_on_gpu")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dictionaries, lists, strings and numbers, ready for ``json.dumps``."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(replace(self, _play_on_gpu=None))))
        del plain["_play_on_gpu"]
        return plain

    @property
    def memory(self) -> dict[str, int]:
        """The most bytes that one rank holds at once, by category; activations are not included."""
        highest = max(peak.num_bytes for peak in (self.forward_peak, self.backward_peak, self.step_peak))
        return {
            "buffers at rest": self.persistent_bytes,
            "optimizer state": self.optimizer_bytes,
            "gradients": self.gradient_bytes,
            "gathered and packed": highest - self.gradient_bytes,
        }

    def plot(
        self, path: str | PathLike[str] | None = None, *, tokens: int = 4096, hardware: Hardware | None = None
    ) -> Figure:
        """Draw the memory of one rank by category, and the predicted timeline of a step on GPUs.

        The timeline shows the all-gathers, compute and reduce-scatters of at most three microbatches, and where
        compute waits for communication. It is made by running the engine's own step on a virtual device.

        Args:
            path: file to write, such as "plan.png". None: write no file.
            tokens: tokens of one microbatch on one rank.
            hardware: speeds; None: eight H100 in one node, at line rates.
        Returns:
            a matplotlib figure.
        Raises:
            StateError: ``explain(model)`` did not return this report, or the model was deleted.
            ConfigError: matplotlib is not installed, or the file cannot be written.

        Example:
            explain(model).plot("plan.png", tokens=8192)
        """
        if self._play_on_gpu is None:
            raise StateError(
                "plot: this report is not one that explain(model) returned. fix: explain(model).plot(path), or "
                "megatron-fsdp plan --png FILE without a model"
            )
        played = self._play_on_gpu()
        count = self.num_microbatches
        workload = Workload(micro_batch=1, sequence_length=tokens, num_microbatches=count)
        machine = with_links(hardware or Hardware(), played)
        found = play_in_time(played, workload, machine)
        batches = counted(count, "microbatch", "microbatches")
        drawn = "" if count <= 3 else ", three of them drawn"
        title = f"{batches} of {tokens:,} tokens{drawn}, at {machine.flops / 1e12:,.4g} Tflop/s"
        adamw = played.moved_bytes / machine.memory_bandwidth
        figure = draw(title, self.memory, time_line(found), found.seconds, adamw)
        if path is not None:
            save(figure, path)
        return figure

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of the page."""
        return (
            _unit_table(self),
            _total_table(self),
            _padding_table(self),
            _traffic_table(self),
            listing("notes", _notes(self)),
        )

    def __str__(self) -> str:
        return "\n\n".join("\n".join(table.lines()) for table in self.tables())


# ---------------------------------------------------------------------- the content


@overload
def explain(model: nn.Module, num_microbatches: int = 1) -> Report: ...


@overload
def explain(model: Optimizer, num_microbatches: int = 1) -> tuple[OwnershipReport, ...]: ...


def explain(model: nn.Module | Optimizer, num_microbatches: int = 1) -> Report | tuple[OwnershipReport, ...]:
    """Return a report on the sharded modules in ``model``, without running, communicating or changing anything.

    Args:
        model: a sharded model; or a ``Muon`` optimizer, whose report says which rank owns which matrix
            (``explain_ownership``; every rank must call it).
        num_microbatches: forward and backward passes per optimizer step, each inside ``microbatch(model, is_last)``.
    Raises:
        StateError: ``model`` contains no sharded module.
        ConfigError: ``num_microbatches`` is less than 1.

    Example:
        for block in model.blocks:
            fully_shard(block)
        print(explain(fully_shard(model), num_microbatches=4))
    """
    if isinstance(model, Optimizer):
        return explain_ownership(model)
    if num_microbatches < 1:
        raise ConfigError(f"explain: num_microbatches={num_microbatches}. fix: give 1 or more")
    units = list(units_below(model))
    if not units:
        raise StateError(
            f"{type(model).__name__} holds no sharded module. fix: call fully_shard on its blocks and on it first"
        )
    played = play_step(partial(live_stand_ins, model, units), [num_microbatches])
    report = report_of(played, num_microbatches, unsharded(model, units))
    # A weak reference, so that keeping a report does not keep the model alive.
    return replace(report, _play_on_gpu=partial(_play_live, weakref.ref(model), num_microbatches))


def _play_live(model: weakref.ref[nn.Module], num_microbatches: int) -> PlayedStep:
    """Run a step of a live model on a virtual device with streams, whatever device the model is on."""
    found = model()
    if found is None:
        raise StateError("plot: the model of this report is gone. fix: call explain(model).plot(path) while it lives")
    units: list[Unit] = list(units_below(found))
    return play_step(partial(live_stand_ins, found, units, has_streams=True), [num_microbatches])


def with_links(hardware: Hardware, played: PlayedStep) -> Hardware:
    """Return the hardware with a link added for each mesh axis that the step communicates on."""
    links = dict(hardware.links)
    for work in (item.work for items in played.items.values() for item in items):
        if work is not None and work.ranks and work.axis not in links:
            stride = work.ranks[1] - work.ranks[0] if len(work.ranks) > 1 else 1
            links[work.axis] = hardware.link(len(work.ranks), stride)
    return replace(hardware, links=links)


def report_of(played: PlayedStep, num_microbatches: int, left: Mapping[str, nn.Parameter] | None = None) -> Report:
    """Return the report on a step that ``play_step`` ran; ``left``: the parameters that belong to no unit."""
    left = left or {}
    forecast = played.forecasts[num_microbatches]
    units = played.units
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
        collectives=tuple(_collectives(forecast)),
        unsharded=tuple(left),
        unsharded_bytes=sum(parameter.nbytes for parameter in left.values()),
        slot_bytes=forecast.slot_bytes,
        counter_bytes=forecast.counter_bytes,
        all_gathered_bytes=sum(unit.transient_bytes("gathered weights") for unit in units),
    )


def _collectives(forecast: Forecast) -> Iterator[CollectiveReport]:
    """Yield the collectives by phase; equal ones are combined."""
    phases = list(Phase)
    order = sorted(forecast.issues.items(), key=lambda each: (phases.index(each[0][0]), *astuple(each[0][1])))
    for (phase, call), count in order:
        yield CollectiveReport(phase.value, call.kind, call.axis, call.num_ranks, count, count * call.num_bytes)


def folded(report: Report) -> list[tuple[str, list[int], UnitReport]]:
    """Return groups of units that differ only in their names: (first and last name, positions, first unit)."""
    alike: dict[UnitReport, list[int]] = {}
    for position, unit in enumerate(report.units):
        alike.setdefault(replace(unit, name=""), []).append(position)
    found = []
    for places in alike.values():
        first, last = report.units[places[0]], report.units[places[-1]]
        several = f"{first.name} .. {last.name} ({len(places)} alike, each)"
        found.append((first.name if len(places) == 1 else several, places, first))
    return found


# ---------------------------------------------------------------------- the page


def _unit_table(report: Report) -> Table:
    rows = []
    for name, _, unit in folded(report):
        row: dict[str, Any] = {
            "unit": name,
            "module": shortened(unit.modules),
            "dtype": shortened(map(_dtype_text, unit.groups)) or "none of its own",
            **_amounts(unit.groups, unit.persistent_bytes),
            "gathered_bytes": unit.transient_bytes("gathered weights"),
            "packed_bytes": unit.transient_bytes("packed gradients"),
            "after_forward": unit.reason.split()[0].replace("nothing", "-"),
        }
        rows.append(row if unit.groups else dict(list(row.items())[:3]))
    groups = [group for unit in report.units for group in unit.groups]
    return Table.of([*rows, {"unit": "total", **_amounts(groups, report.persistent_bytes)}])


def _amounts(groups: Sequence[GroupReport], persistent_bytes: int) -> dict[str, Any]:
    numel = sum(group.numel for group in groups)
    padding = sum(group.buffer_numel for group in groups) - numel
    number = sum(group.num_parameters for group in groups)
    return {
        "params": number,
        "elements": numel,
        "padding": f"{padding / max(numel, 1):.2%}",
        "at_rest_bytes": persistent_bytes,
    }


def _dtype_text(group: GroupReport) -> str:
    """Return compute/main/reduce/main_grad dtypes, or a single dtype if all are equal."""
    dtypes = [group.compute_dtype, group.main_dtype, group.reduce_dtype, group.main_grad_dtype]
    short = [dtype.replace("float", "fp").replace("bfp", "bf") for dtype in dtypes]
    return f"{short[0]} frozen" if not group.requires_grad else "/".join(short if len(set(short)) > 1 else short[:1])


def _total_table(report: Report) -> Table:
    largest, padding = report.largest_unit_bytes, format_bytes(report.padding_bytes)
    peaks = (report.forward_peak, report.backward_peak, report.step_peak)
    rows: list[tuple[str, int, str]] = [
        ("buffers at rest", report.persistent_bytes, f"{padding} of it padding on this rank"),
        ("optimizer state (expected)", report.optimizer_bytes, "AdamW: two moments and a step count"),
        ("gradients", report.gradient_bytes, "from a unit's backward until zero_grad()"),
        ("largest unit, gathered", largest, f"{report.largest_unit}, weights in compute dtype"),
        ("all units, gathered", report.all_gathered_bytes, "inside unsharded(model)"),
    ]
    for name, peak in zip(("forward", "backward", "optimizer step"), peaks, strict=True):
        buffers = peak.num_bytes - peak.gradient_bytes
        words = (
            f"{buffers / largest:.2f} x the largest unit" if largest and buffers else "",
            f"beside {format_bytes(peak.gradient_bytes)} of gradients" if peak.gradient_bytes else "",
            f"reached by {peak.unit}" if peak.unit else "",
        )
        rows.append((f"transient, {name}", buffers, ", ".join(filter(None, words))))
    stays: list[tuple[str, int, str]] = [
        ("of it slots that stay", report.slot_bytes, "weights and gradients take turns in them"),
        ("of it sums that stay", report.counter_bytes, 'microbatches, added as reduction="invariant"'),
    ]
    rows += [row for row in stays if row[1]]
    highest = report.persistent_bytes + report.optimizer_bytes + max(peak.num_bytes for peak in peaks)
    rows.append(("total at the highest", highest, "all of these, without activations"))
    return Table.of({"per rank": name, "bytes": size, "": note} for name, size, note in rows)


def _padding_table(report: Report) -> Table:
    rows = []
    for name, _, unit in folded(report):
        for group in (group for group in unit.groups if group.padding_ratio):
            least = max(group.lower_bound_numel / group.numel - 1, 0.0)
            shares = {"of the data": f"{group.padding_ratio:.3%}", "least possible": f"{least:.3%}"}
            rows.append({"padding": name, **shares, "what forces it": group.binding})
    return Table.of(rows) if rows else Table([("padding",)])


def _traffic_table(report: Report) -> Table:
    number = report.num_microbatches
    title = f"collectives per optimizer step of {number} microbatch{'es' * (number > 1)}, bytes of the full side"
    return Table.of(map(asdict, report.collectives), title)


def _notes(report: Report) -> Iterator[str]:
    """Yield notes on single units, each followed by the units that it applies to."""
    said: dict[str, list[str]] = {}
    for words, name in _remarks(report):
        said.setdefault(words, []).append(name)
    yield from (f"{words}: {shortened(names)}" for words, names in said.items())
    if report.num_roots > 1:
        yield (
            f"{report.num_roots} units are inside no other unit, so nothing is prefetched and each keeps its weights "
            f"until its backward. fix: call fully_shard on the outermost module too"
        )
    if report.unsharded:
        yield (
            f"in no unit, {format_bytes(report.unsharded_bytes)} on every rank, gradients not reduced "
            f"(ignored_params, or no fully_shard of the module around them): {shortened(report.unsharded)}"
        )


def _remarks(report: Report) -> Iterator[tuple[str, str]]:
    hooks = "counted as plain weights in compute dtype, although their own all-gather hooks decide what is sent"
    is_sharded = any(group.is_cut for unit in report.units for group in unit.groups)
    for unit in report.units:
        for group in unit.groups:
            whole = "parameters whole on every rank, not sharded" if is_sharded and not group.is_cut else ""
            frozen = "" if group.requires_grad else "frozen groups, without gradients"
            yield from ((each, unit.name) for each in (whole, frozen, _wide(group), group.wire) if each)
        yield from ((hooks, f"{unit.name}: {name}") for name in unit.has_hooks)
        packed = unit.transient_bytes("packed gradients")
        is_several = sum(group.num_parameters for group in unit.groups if group.requires_grad) > 1
        if unit.is_root and is_several and packed:
            others = [each.transient_bytes("packed gradients") for each in report.units if each.name != unit.name]
            if 0 < max(others, default=0) <= packed:
                yield _OWNING_ROOT.format(format_bytes(packed)), unit.name


def _wide(group: GroupReport) -> str:
    """Return a note if gradients are reduced in a wider dtype than compute, which is the default of some policies."""
    compute, wire = getattr(torch, group.compute_dtype), getattr(torch, group.reduce_dtype)
    if not group.requires_grad or wire.itemsize <= compute.itemsize:
        return ""
    return (
        f"gradients of {group.compute_dtype} weights are reduced in {group.reduce_dtype}: the default "
        "(reduce_dtype=None) is the parameters' grad_dtype, as in PyTorch 2.15; "
        f"reduce_dtype={compute} sends {compute.itemsize / wire.itemsize:.0%} of the bytes"
    )


def shortened(names: Iterable[str]) -> str:
    """Return the distinct names; of more than three, the first three and the number of the rest."""
    different = list(dict.fromkeys(names))
    shown = ", ".join(different[:3])
    return shown if len(different) <= 3 else f"{shown} and {len(different) - 3:,} more"
