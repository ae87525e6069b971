"""The log of a run: Megatron-style lines, a JSONL file and the loss curve. Rank 0 writes all of them."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.trackers import Tracker, named_numbers
from megatron_fsdp import ConfigError

try:
    # Imported at the start, not at the first picture, so that resident memory does not grow during the run.
    import matplotlib.backends.backend_agg  # noqa: F401

    # Figure alone, without pyplot: it draws with the Agg renderer and keeps no global state, so no display is needed.
    from matplotlib.figure import Figure
    from PIL import Image

    Image.preinit()
    CAN_DRAW = True
except ImportError:
    CAN_DRAW = False
NO_CHART = "no loss curve is drawn: matplotlib is missing; fix: pip install '.[examples]' in the clone"
Row = dict[str, Any]
LARGE = 10.0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """MiB that a process holds ``now``, and at its ``peak``: "allocated" on a GPU, or "resident" on the host."""

    kind: str
    now: float
    peak: float


def memory_use(device: torch.device) -> MemoryUse:
    """Return the bytes that this process holds on its GPU, or in host memory on a CPU (0 without /proc)."""
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return MemoryUse("allocated", now / 2**20, peak / 2**20)
    status = Path("/proc/self/status")
    found = dict(line.split(":", 1) for line in status.read_text().splitlines()) if status.exists() else {}
    return MemoryUse("resident", *(int(found.get(key, "0").split()[0]) / 2**10 for key in ("VmRSS", "VmHWM")))


class TrainLog:
    """Writes ``log.jsonl`` and ``loss.png`` into a folder and prints; silent on every rank but the main one."""

    def __init__(
        self,
        folder: Path,
        *,
        is_main: bool,
        train_iters: int,
        unit: str = "byte",
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """Create the folder on the main rank, or raise ConfigError; ``unit`` is the name of a token, such as "byte"."""
        self.unit, self._trackers = unit, trackers
        self._is_main, self._train_iters = is_main, train_iters
        self._path, self._picture = folder / "log.jsonl", folder / "loss.png"
        self._rows: list[Row] = []
        self._largest_norm = 0.0
        try:
            if is_main:
                folder.mkdir(parents=True, exist_ok=True)
                self._path.open("a").close()
        except OSError as error:
            raise ConfigError(
                f"--save: cannot write into {folder}: {error.strerror}. fix: name another folder"
            ) from error

    def begin(self, iteration: int) -> None:
        """Keep the rows of an earlier run up to ``iteration``, after which this one goes on; 0 is a new run."""
        if self._is_main:
            self._rows = rows_until(self._path, iteration)
            self._path.write_text("".join(json.dumps(row) + "\n" for row in self._rows))

    def message(self, text: str) -> None:
        """Print a line."""
        if self._is_main:
            print(text, flush=True)

    def iteration(self, row: Row, memory: MemoryUse) -> None:
        """Print one iteration in the shape of Megatron's training log, and keep it.

        ``elapsed_ms`` and ``lm_loss`` (nats per token) of ``row`` are means since the last line, without validation and
        checkpoints; ``grad_norm`` is of this very iteration, before clipping.
        """
        throughput = ""
        if "tflops_per_rank" in row:
            throughput = f" | throughput per rank (TFLOP/s): {row['tflops_per_rank']:.3g}"
            throughput += f" | MFU: {row['mfu']:.1%}" if "mfu" in row else ""
        seconds = (self._train_iters - row["iteration"]) * row["elapsed_ms"] / 1000
        self.message(
            " iteration {iteration:8d}/{total:8d} | consumed samples: {consumed_samples:12d} |"
            " elapsed time per iteration (ms): {elapsed_ms:.1f} | time left: {left} | tokens/s: {tokens_per_second:.0f}"
            " | learning rate: {learning_rate:.6E} | global batch size: {global_batch_size:5d} | lm loss: {lm_loss:.6E}"
            " | grad norm: {grad_norm:.3f} | {memory.kind} memory now (MiB): {memory.now:.1f} |"
            " peak {memory.kind} memory (MiB): {memory.peak:.1f}{throughput}".format(
                **row,
                throughput=throughput,
                total=self._train_iters,
                left=datetime.timedelta(seconds=round(seconds)),
                memory=memory,
            )
        )
        self._keep(row | {f"{memory.kind}_memory_mib": memory.now, f"peak_{memory.kind}_memory_mib": memory.peak})

    def gradient_norm(self, iteration: int, norm: float) -> None:
        """Say where the norm of a step's gradients is far above those before: often the first sign of bad data."""
        if norm > LARGE * self._largest_norm > 0:
            self.message(
                f"warning: iteration {iteration}: gradient norm {norm:.3g} is more than {LARGE:.0f} times the largest "
                f"of the steps before ({self._largest_norm:.3g}), says --check-for-large-grads"
            )
        if math.isfinite(norm):
            self._largest_norm = max(self._largest_norm, norm)

    def validation(self, iteration: int, loss: float) -> None:
        """Print and keep the loss on held-out text, in nats per token."""
        perplexity = math.exp(min(loss, 20.0))  # Megatron's limit: a diverged run must not overflow the log
        self.message(
            f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"
            f" bits per {self.unit}: {loss / math.log(2):.3f}"
        )
        self._keep({"iteration": iteration, "validation_loss": loss})

    def checksum(self, iteration: int, units: dict[str, int], *, keeps_units: bool) -> None:
        """Print and keep the checksum of weights and moments, and if asked that of each unit."""
        total = f"{sum(units.values()) % 2**64:016x}"
        self.message(f" checksum at iteration {iteration}: {total}")
        each = {"unit_checksums": {name: f"{number:016x}" for name, number in units.items()}} if keeps_units else {}
        self._keep({"iteration": iteration, "checksum": total, **each})

    def draw(self) -> None:
        """Write the loss curve so far, if matplotlib is installed."""
        if self._is_main and CAN_DRAW:
            draw_losses({"training": self._rows}, self._picture, unit=self.unit)

    def _keep(self, row: Row) -> None:
        if self._is_main:
            self._rows.append(row)
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            for track in self._trackers:
                track(named_numbers(row), row["iteration"])


class Interval:
    """Averages time and loss between two log lines; a resumed run goes on with the sum that it had gathered."""

    def __init__(self, device: torch.device, *, loss_sum: float = 0.0, loss_count: int = 0) -> None:
        # Kept on the device and read only for a line of the log, because reading waits for the GPU. A sum in fp64 is
        # saved exactly.
        self._loss_sum = torch.tensor(loss_sum, dtype=torch.float64, device=device)
        self.loss_count = loss_count
        self._num_timed, self._excluded, self._start = 0, 0.0, time.perf_counter()

    @property
    def loss_sum(self) -> float:
        """Sum of the ``loss_count`` losses since the last line; on a GPU it waits for them."""
        return self._loss_sum.item()

    def add(self, loss: Tensor | None) -> None:
        """Note one more iteration and its 0-d loss; None does not count."""
        self._num_timed += 1
        if loss is not None:
            self._loss_sum += loss
            self.loss_count += 1

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave the time of the context out."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._excluded += time.perf_counter() - start

    def lap(self) -> tuple[float, float]:
        """Return seconds per iteration and mean loss since the last lap (NaN where none counts), and start anew."""
        loss = self.loss_sum / self.loss_count if self.loss_count else math.nan
        now = time.perf_counter()
        seconds = (now - self._start - self._excluded) / self._num_timed
        self._loss_sum.zero_()
        self.loss_count, self._num_timed, self._excluded, self._start = 0, 0, 0.0, now
        return seconds, loss


def rows_until(path: Path, iteration: int) -> list[Row]:
    """Return the rows of an earlier run up to an iteration, without a last line that a crash has cut off."""
    rows: list[Row] = []
    for line in path.read_text().splitlines() if iteration and path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return [row for row in rows if row["iteration"] <= iteration]


def draw_losses(runs: Mapping[str, Sequence[dict[str, Any]]], path: Path, *, unit: str = "byte") -> None:
    """Write a PNG of training and validation losses, from the rows of each run's JSONL log, by what to call it.

    Raises:
        ConfigError: matplotlib is missing.
    """
    if not CAN_DRAW:
        raise ConfigError(NO_CHART)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, rows in runs.items():
        color = None
        for key, label, style in (("lm_loss", name, "-"), ("validation_loss", f"{name}, held-out text", "o")):
            if points := [(row["iteration"], row[key]) for row in rows if key in row]:
                (line,) = axes.plot(*zip(*points, strict=True), style, label=label, color=color)
                color = line.get_color()
    axes.set(xlabel="iteration", ylabel=f"loss (nats per {unit})", title="GPT language-model loss")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
    figure.savefig(path, dpi=120)
