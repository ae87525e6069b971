"""Timeline: gathers and reductions in a torch.profiler trace, and how long compute waited for them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from megatron_fsdp.errors import ConfigError

__all__ = ["Interval", "Timeline", "UnitTimes"]

# FSDP2's range names, which the engine uses too: "FSDP::all_gather (blocks.0)".
_RANGE = re.compile(r"FSDP::(all_gather|post_backward_reduce|all_gather_wait|post_backward_rs_wait) \((.*)\)")
_LANES = {"all_gather": "gather", "post_backward_reduce": "reduce"}
_WAITS = {"all_gather_wait": "gather", "post_backward_rs_wait": "reduce"}
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Interval:
    """The time from ``start`` to ``stop``, in seconds since the trace began."""

    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """The communication of one unit. Each interval in ``*_waited`` is time that compute waited for it."""

    unit: str
    gathers: tuple[Interval, ...]
    gather_waited: tuple[Interval, ...]
    reductions: tuple[Interval, ...]
    reduce_waited: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The communication in one rank's trace.

    On CPU, a gather or reduction lasts from its issue to the end of the wait for it, and the exposed time is the time
    of the waits. On CUDA, it lasts as long as its kernels on the lane's stream, and the exposed time is the part that
    no other kernel covers, as in Holistic Trace Analysis.

    Example:
        with torch.profiler.profile() as profiler:
            model(batch).square().mean().backward()
        profiler.export_chrome_trace("trace.json")
        print(Timeline.read("trace.json"))

    Attributes:
        seconds: from the trace's first event to the end of its last.
        units: in the order in which they are first gathered or reduced.
    """

    seconds: float
    units: tuple[UnitTimes, ...]

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Timeline:
        """Read a Chrome trace that torch.profiler exported.

        Raises:
            ConfigError: the file is not a Chrome trace, or no forward of a sharded model ran under the profiler.
        """
        try:
            events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"timeline: {os.fspath(path)} is no Chrome trace: {error!r}. fix: profiler.export_chrome_trace(path)"
            ) from error
        events = sorted((event for event in events if event.get("ph") == "X"), key=lambda event: float(event["ts"]))
        matches = ((event, _RANGE.fullmatch(str(event.get("name")))) for event in events)
        ranges = [(*match.groups(), event) for event, match in matches if match]
        if not ranges:
            fix = "fix: record a whole step of a sharded model, forward included"
            raise ConfigError(f"timeline: {os.fspath(path)} has no range of a gather or a reduction. {fix}")
        on_device = [each for each in ranges if each[2]["cat"] == "gpu_user_annotation"]
        start = min(float(event["ts"]) for event in events)
        seconds = max(_interval(event, start).stop for event in events)
        found = _on_device(events, on_device, start) if on_device else _on_host(ranges, start)
        by_unit: dict[str, dict[tuple[str, bool], list[Interval]]] = {}
        for unit, lane, is_wait, interval in found:
            by_unit.setdefault(unit, {}).setdefault((lane, is_wait), []).append(interval)
        kinds = [(lane, is_wait) for lane in ("gather", "reduce") for is_wait in (False, True)]
        units = [UnitTimes(unit, *(tuple(of.get(kind, ())) for kind in kinds)) for unit, of in by_unit.items()]
        return cls(seconds, tuple(units))

    def waited(self, lane: str | None = None) -> float:
        """Return the seconds that compute waited for "gather", for "reduce", or for both (None)."""
        found: list[Interval] = []
        for unit in self.units:
            found += unit.gather_waited if lane != "reduce" else ()
            found += unit.reduce_waited if lane != "gather" else ()
        return _covered(found)

    @property
    def exposed_share(self) -> float:
        """The share of the time in which compute waited for communication, from 0 to 1."""
        return self.waited() / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        """Return a headline, and one row per unit."""
        lines = [
            f"{1e3 * self.seconds:.1f} ms, exposed communication {self.exposed_share:.1%} (waited "
            f"{1e3 * self.waited('gather'):.1f} ms for gathers, {1e3 * self.waited('reduce'):.1f} ms for reductions)",
            f"{'unit':24}{'gathers':>9}{'ms':>9}{'waited':>9}{'reductions':>12}{'ms':>9}{'waited':>9}",
        ]
        for one in self.units:
            gather, gather_waited, reduce, reduce_waited = (
                f"{1e3 * _covered(each):9.2f}"
                for each in (one.gathers, one.gather_waited, one.reductions, one.reduce_waited)
            )
            counts = f"{len(one.gathers):9}", f"{len(one.reductions):12}"
            lines.append(f"{one.unit[-24:]:24}{counts[0]}{gather}{gather_waited}{counts[1]}{reduce}{reduce_waited}")
        return "\n".join(lines)


_Found = tuple[str, str, bool, Interval]
# (phase, unit, event).
_Range = tuple[Any, ...]


def _interval(event: dict[str, Any], start: float) -> Interval:
    begin = 1e-6 * (float(event["ts"]) - start)
    return Interval(begin, begin + 1e-6 * float(event.get("dur", 0.0)))


def _on_host(ranges: Sequence[_Range], start: float) -> Iterable[_Found]:
    """Pair each wait with the oldest collective of its kind and unit. A wait without an issue is a blocking call."""
    issued: dict[tuple[str, str], list[float]] = {}
    for phase, unit, event in ranges:
        interval = _interval(event, start)
        if phase in _LANES:
            issued.setdefault((unit, _LANES[phase]), []).append(interval.start)
            continue
        lane = _WAITS[phase]
        begun = issued.get((unit, lane))
        yield unit, lane, False, Interval(begun.pop(0) if begun else interval.start, interval.stop)
        yield unit, lane, True, interval


def _on_device(events: Sequence[dict[str, Any]], ranges: Sequence[_Range], start: float) -> Iterable[_Found]:
    """Pair ranges with kernels. Kernels on a stream that no lane uses are compute."""
    issues = [(_LANES[phase], unit, event) for phase, unit, event in ranges if phase in _LANES]
    lanes = {(event["pid"], event["tid"]) for *_, event in issues}
    compute = [
        _interval(event, start)
        for event in events
        if event.get("cat") in _DEVICE_WORK and (event["pid"], event["tid"]) not in lanes
    ]
    for lane, unit, event in issues:
        interval = _interval(event, start)
        yield unit, lane, False, interval
        for exposed in _uncovered(interval, compute):
            yield unit, lane, True, exposed


def _uncovered(interval: Interval, by: Iterable[Interval]) -> Iterable[Interval]:
    """Yield the parts of an interval that no interval in ``by`` covers; ``by`` is sorted by start."""
    at = interval.start
    for other in by:
        if other.stop <= at or other.start >= interval.stop:
            continue
        if other.start > at:
            yield Interval(at, other.start)
        at = max(at, other.stop)
    if at < interval.stop:
        yield Interval(at, interval.stop)


def _covered(intervals: Iterable[Interval]) -> float:
    """Return the seconds that at least one of the intervals covers."""
    total, end = 0.0, float("-inf")
    for one in sorted(intervals, key=lambda one: one.start):
        total += max(one.stop - max(one.start, end), 0.0)
        end = max(end, one.stop)
    return total
