"""The harness of the benches: measure, and describe results as rows.

A bench is a file ``bench_NAME.py`` in this folder with a docstring, whose first line ``--help`` shows, and

    def add_arguments(parser: argparse.ArgumentParser) -> None       # optional
    def run(args: argparse.Namespace) -> list[Row]
    def rows_text(rows: Sequence[Row]) -> str                        # optional: its own table
    def result_name(args: argparse.Namespace) -> str                 # optional: its own name for --results

``python -m benchmarks NAME`` runs it and prints its rows. ``--out FILE`` writes a summary of each row as JSON (median,
spread and number of rounds), with the machine, the versions and the commit; ``--samples FILE`` writes every sample.

To compare functions, a bench runs them in turn (``interleaved``; ``ranks_in_turn`` on ranks), so that a machine that
warms up or gets busy slows all of them. A claim about speed is a ratio of such samples.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = [
    "Row",
    "Samples",
    "Summary",
    "Times",
    "beside_peers",
    "both",
    "device_seconds",
    "environment",
    "in_turn",
    "interleaved",
    "markdown",
    "named_by_device",
    "ranks_in_turn",
    "ratio",
    "read_rows",
    "table",
    "write_rows",
    "write_samples",
]

Thing = TypeVar("Thing")
Spent = TypeVar("Spent")
_PACKAGES = ("torch", "triton", "numpy")


@dataclass(frozen=True, slots=True)
class Samples:
    """Repeated measurements of one quantity, in order of time."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The lower quartile; of fewer than four values the least."""
        return statistics.quantiles(self.values, n=4)[0] if len(self.values) >= 4 else min(self.values)

    @property
    def high(self) -> float:
        """The upper quartile; of fewer than four values the greatest."""
        return statistics.quantiles(self.values, n=4)[2] if len(self.values) >= 4 else max(self.values)

    @property
    def spread(self) -> float:
        """Quartile distance over the median."""
        return (self.high - self.low) / abs(self.median) if self.median else 0.0

    @property
    def rounds(self) -> int:
        """The number of values."""
        return len(self.values)


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of samples in a file of results: median, spread and number."""

    median: float
    spread: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity.

    Attributes:
        bench: the bench that measured it.
        case: the setting, such as ``{"model": "llama3-8b", "shards": 64}``; with ``metric`` it identifies the row.
        metric: the quantity, such as ``"time"`` or ``"padding"``.
        unit: unit of the values: ``"s"``, ``"B"``, ``"%"``, ``"B/s"``.
        samples: the values; one value if the quantity is exact. A row from a file has a summary instead.
    """

    bench: str
    case: Mapping[str, str | int | float]
    metric: str
    unit: str
    samples: Samples | Summary = Samples(())
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return the row's identity, which is the same in every run."""
        case = ", ".join(f"{name}={value}" for name, value in sorted(self.case.items()))
        return f"{self.bench}: {self.metric} ({case})"


def in_turn(
    things: Mapping[str, Thing], spend: Callable[[Thing], Spent], rounds: int, warmup: int = 2
) -> dict[str, list[Spent]]:
    """Return the results of ``spend`` for each item, in turn; every second round goes through them in reverse."""
    found: dict[str, list[Spent]] = {name: [] for name in things}
    for number in range(-warmup, rounds):
        for name in list(things) if number % 2 else list(things)[::-1]:
            spent = spend(things[name])
            if number >= 0:
                found[name].append(spent)
    return found


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 11,
    warmup: int = 2,
    synchronize: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    stopwatch: Callable[[Callable[[], object]], float] | None = None,
) -> dict[str, Samples]:
    """Return the seconds of each function, called ``in_turn``.

    Args:
        rounds: measured calls, at least 1. warmup: calls that fill caches and compile kernels.
        synchronize: called before each look at the clock, such as ``torch.cuda.synchronize``.
        clock: seconds. stopwatch: calls a function and returns its seconds, instead of a clock.
    """

    wait = synchronize or _nothing

    def timed(function: Callable[[], object]) -> float:
        wait()
        start = clock()
        function()
        wait()
        return clock() - start

    seconds = in_turn(functions, stopwatch or timed, rounds, warmup)
    return {name: Samples(tuple(values)) for name, values in seconds.items()}


Times = dict[str, list[tuple[float, float]]]
"""Name to (wall seconds, processor seconds) of every round, on one rank."""


def ranks_in_turn(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 2,
    synchronize: Callable[[], None] | None = None,
) -> Times:
    """Return the seconds of each call on this rank; all ranks make each call at the same time."""
    wait = synchronize or _nothing

    def spend(call: Callable[[], object]) -> tuple[float, float]:
        dist.barrier()
        wait()
        wall, processor = time.perf_counter(), time.process_time()
        call()
        wait()
        return time.perf_counter() - wall, time.process_time() - processor

    return in_turn(calls, spend, rounds, warmup)


def _nothing() -> None:
    """Return at once: there is no device to wait for."""


def both(ranks: Sequence[Times]) -> dict[str, dict[str, Samples]]:
    """Return by name the wall time of the slowest rank, and the processor time of all, round by round."""
    wall, processor = {}, {}
    for name in ranks[0]:
        rounds = list(zip(*(times[name] for times in ranks), strict=True))
        wall[name] = Samples(tuple(max(spent[0] for spent in one) for one in rounds))
        processor[name] = Samples(tuple(sum(spent[1] for spent in one) for one in rounds))
    return {"wall time": wall, "processor time": processor}


def beside_peers(row: Row, samples: Mapping[str, Samples], mine: str = "ours", key: str = "engine") -> list[Row]:
    """Return one row per name, and rows with the ratios of ``mine`` to the other names.

    Args:
        row: bench, case, metric and unit of the rows.
        key: key of the name in the case.
    """
    rows = [replace(row, case={**row.case, key: name}, samples=values) for name, values in samples.items()]
    for peer in [name for name in samples if name != mine and mine in samples]:
        values, metric = ratio(samples[mine], samples[peer]), f"{row.metric} over peer's"
        rows.append(replace(row, case={**row.case, "peer": peer}, metric=metric, unit="", samples=values))
    return rows


_CALLS = 10
_LEAD_CYCLES = 20_000_000
"""About 10 ms of a GPU's clock: the host issues ten calls meanwhile, so that the device never waits for it."""


def device_seconds(function: Callable[[], object]) -> float:
    """Return the seconds that a call keeps the current CUDA stream busy, by events around ten calls.

    The host's time (launches, allocations, tables) does not count: the device is still busy at the first call.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(_LEAD_CYCLES)
    begin.record()
    for _ in range(_CALLS):
        function()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _CALLS


def ratio(mine: Samples, theirs: Samples) -> Samples:
    """Return the ratio of two sets of samples, round by round; both were taken in the same rounds."""
    return Samples(tuple(a / b for a, b in zip(mine.values, theirs.values, strict=True)))


def environment() -> dict[str, Any]:
    """Return the machine, the versions and the commit; the commit has a mark if files were edited."""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "machine": {"processor": _processor(), "num_cores": os.cpu_count(), "devices": devices},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "commit": _commit(),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def named_by_device(bench: str, device: str) -> str:
    """Return the name of a bench's file of results: on "cuda" with the GPU's name, such as ``gpu-nvidia-h200``."""
    if device != "cuda":
        return bench
    return f"{bench}-{re.sub('[^a-z0-9]+', '-', torch.cuda.get_device_name().lower()).strip('-')}"


def write_rows(path: Path, rows: Iterable[Row], arguments: Mapping[str, Any] | None = None) -> None:
    """Write the summary of each row as JSON, one row per line, with the environment."""
    written = [
        {
            "bench": row.bench,
            "case": dict(row.case),
            "metric": row.metric,
            "unit": row.unit,
            "median": _short(row.samples.median),
            "spread": _short(row.samples.spread),
            "rounds": row.samples.rounds,
            **({"notes": dict(row.notes)} if row.notes else {}),
        }
        for row in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(results_text(environment(), dict(arguments or {}), written), encoding="utf-8")


def results_text(
    environment: Mapping[str, Any], arguments: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> str:
    """Return the text of a file of results: JSON with one row per line."""
    head = json.dumps({"environment": environment, "arguments": arguments}, default=str)
    lines = ",\n".join(json.dumps(row, default=str) for row in rows)
    return f'{head[:-1]},\n"rows": [\n{lines}\n]}}\n'


def _short(value: float) -> float:
    """Return whole numbers unchanged, and other numbers rounded to six digits."""
    return int(value) if float(value).is_integer() else float(f"{value:.6g}")


def write_samples(path: Path, rows: Iterable[Row]) -> None:
    """Write every sample as JSON: a list of values by the key of its row."""
    values = {row.key: row.samples.values for row in rows if isinstance(row.samples, Samples)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read_rows(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Return the environment and the rows of a file that ``write_rows`` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        Row(
            **{name: row[name] for name in ("bench", "case", "metric", "unit")},
            samples=Summary(row["median"], row["spread"], row["rounds"]),
            notes=row.get("notes", {}),
        )
        for row in content["rows"]
    ]
    return content["environment"], rows


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as aligned columns, the first row as their heads."""
    return "\n".join("  ".join(cells) for cells in _aligned(rows))


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as a Markdown table, the first row as its heads; all columns but the first are numbers."""
    texts = ["| " + " | ".join(cells) + " |" for cells in _aligned(rows)]
    rule = "".join(f"|{'-' * (len(cell) + 1)}{':' if column else '-'}" for column, cell in enumerate(_aligned(rows)[0]))
    return "\n".join([texts[0], f"{rule}|", *texts[1:]])


def _aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        for cells in rows
    ]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+edited" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
