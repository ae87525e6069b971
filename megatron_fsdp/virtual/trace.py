"""A played recording as a timeline for Perfetto (https://ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_fsdp.virtual.playback import Playback

__all__ = ["write_trace"]


def write_trace(playback: Playback, path: Path) -> None:
    """Write what runs and what waits, a row for each stream, in the JSON of Chrome's trace events."""
    streams = list(dict.fromkeys(["compute", *(run.stream for run in playback.runs), "host"]))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
        for row, name in enumerate(streams)
    ]
    for run in playback.runs:
        name = run.work.label if run.work.ranks and run.work.label else run.work.name
        event = _event(name, streams.index(run.stream), run.start, run.end - run.start)
        events.append(event | {"args": {"unit": run.unit, "bytes": run.work.num_bytes, "flops": run.work.flops}})
    for stall in playback.stalls:
        if stall.stream in streams:
            event = _event(f"wait for {stall.cause}", streams.index(stall.stream), stall.start, stall.seconds)
            events.append(event | {"args": {"unit": stall.unit}})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _event(name: str, row: int, start: float, seconds: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": 0, "tid": row, "ts": start * 1e6, "dur": seconds * 1e6}
