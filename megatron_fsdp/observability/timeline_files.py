"""Files of a timeline: the page, the picture, and events of a Chrome trace, from which the other two can be made."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.observability.timeline_chart import draw_png
from megatron_fsdp.observability.timeline_page import html_page
from megatron_fsdp.observability.timeline_record import LANES, RECORDING, Span, TimelineRecord

__all__ = ["add_to_trace", "read_record", "write_record"]


def write_record(record: TimelineRecord, path: str | PathLike[str]) -> None:
    """Write a recording as a page (.html), a picture (.png, by matplotlib) or a Chrome trace (.json).

    Raises:
        ConfigError: another suffix, the file cannot be written, or matplotlib is not installed.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".html", ".png", ".json"):
        raise ConfigError(f"timeline: found the suffix {suffix!r} in {os.fspath(path)!r}; wanted .html, .png or .json")
    try:
        if suffix == ".png":
            draw_png(record, path)
        elif suffix == ".html":
            Path(path).write_text(html_page(record), encoding="utf-8")
        else:
            Path(path).write_text(json.dumps({"traceEvents": _events(record, 0.0)}), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"timeline: {error}; give a file that can be written") from error


def add_to_trace(record: TimelineRecord, path: str | PathLike[str]) -> None:
    """Add the lanes to the Chrome trace that torch.profiler wrote around the recording, as a process of their own.

    Raises:
        ConfigError: the profiler saw no recording.
    """
    trace = _load(path)
    starts = [event["ts"] for event in trace["traceEvents"] if event.get("name") == RECORDING and "ts" in event]
    if not starts:
        raise ConfigError(
            f"timeline: the trace {os.fspath(path)} has no range {RECORDING!r}; record inside the profiler"
        )
    trace["traceEvents"] += _events(record, min(starts))
    Path(path).write_text(json.dumps(trace), encoding="utf-8")


def read_record(path: str | PathLike[str]) -> TimelineRecord:
    """Return the recording in a Chrome trace that ``write_record`` or ``add_to_trace`` wrote.

    Raises:
        ConfigError: it is no such file.
    """
    events = [event for event in _load(path)["traceEvents"] if event.get("cat") == RECORDING and event["ph"] == "X"]
    whole = next((event for event in events if event["name"] == RECORDING), None)
    if whole is None:
        raise ConfigError(
            f"timeline: {os.fspath(path)} has no bars of a recording; wanted a trace of Timeline.write('trace.json') "
            "or of the training script's --profile"
        )
    spans = tuple(_span(event, whole["ts"]) for event in events if event is not whole)
    facts = whole["args"]
    return TimelineRecord(facts["rank"], tuple(facts["units"]), whole["dur"] * 1e-6, facts["num_steps"], spans)


def _load(path: str | PathLike[str]) -> dict[str, Any]:
    try:
        trace = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
            raise ValueError("no traceEvents in it")
    except (OSError, ValueError) as error:
        raise ConfigError(f"timeline: {os.fspath(path)} is no Chrome trace: {error}") from error
    return trace


def _events(record: TimelineRecord, start_us: float) -> list[dict[str, Any]]:
    process = f"{RECORDING} of rank {record.rank}"
    names = ("recording", *LANES)
    events = [_metadata("process_name", process, process, "recording")]
    for order, lane in enumerate(names):
        events.append(_metadata("thread_name", lane, process, lane))
        events.append({**_metadata("thread_sort_index", "", process, lane), "args": {"sort_index": order}})
    facts = {"rank": record.rank, "units": list(record.units), "num_steps": record.num_steps}
    events.append(_event(RECORDING, (process, "recording"), (start_us, record.seconds * 1e6), facts))
    for span in record.spans:
        facts = {"action": span.action, "unit": span.unit, "num_bytes": span.num_bytes}
        events.append(_event(span.name, (process, span.lane), (start_us + span.start * 1e6, span.seconds * 1e6), facts))
    return events


def _metadata(kind: str, name: str, process: str, thread: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _event(name: str, place: Sequence[str], time_us: Sequence[float], facts: Mapping[str, Any]) -> dict[str, Any]:
    process, thread = place
    start, duration = time_us
    return {
        "ph": "X", "cat": RECORDING, "name": name, "pid": process, "tid": thread, "ts": start, "dur": duration,
        "args": dict(facts),
    }  # fmt: skip


def _span(event: Mapping[str, Any], start_us: float) -> Span:
    facts, start = event["args"], (event["ts"] - start_us) * 1e-6
    return Span(event["tid"], facts["action"], facts["unit"], start, start + event["dur"] * 1e-6, facts["num_bytes"])
