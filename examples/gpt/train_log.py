"""What a run shows and keeps: Megatron-style lines, a progress bar, a JSONL file and the loss curve; rank 0 only."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from gpt.loss_curve import draw_loss_curve
from gpt.memory import MemoryUse
from gpt.tensorboard import TensorboardLog
from megatron_fsdp import ConfigError


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """One logged iteration.

    Attributes:
        elapsed_ms: mean wall-clock time of an iteration since the last line, without validation and checkpoints.
        tokens_per_second: of all ranks together.
        lm_loss: nats per token, the mean over the iterations since the last line and all ranks, as Megatron prints it.
        grad_norm: global norm before clipping, of this very iteration.
        memory: of rank 0.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    elapsed_ms: float
    tokens_per_second: float
    learning_rate: float
    global_batch_size: int
    lm_loss: float
    grad_norm: float
    memory: MemoryUse

    @property
    def time_left(self) -> str:
        """At this pace until the last iteration, as hours:minutes:seconds."""
        return str(datetime.timedelta(seconds=round((self.train_iters - self.iteration) * self.elapsed_ms / 1000)))

    def line(self) -> str:
        """Return the line in the shape of Megatron's training log."""
        return (
            f" iteration {self.iteration:8d}/{self.train_iters:8d} | consumed samples: {self.consumed_samples:12d} |"
            f" elapsed time per iteration (ms): {self.elapsed_ms:.1f} | time left: {self.time_left} |"
            f" tokens/s: {self.tokens_per_second:.0f} |"
            f" learning rate: {self.learning_rate:.6E} | global batch size: {self.global_batch_size:5d} |"
            f" lm loss: {self.lm_loss:.6E} | grad norm: {self.grad_norm:.3f} |"
            f" {self.memory}"
        )

    def row(self) -> dict[str, Any]:
        """Return the record's entry in the JSONL file."""
        memory = self.memory
        numbers = {name: getattr(self, name) for name in self.__slots__ if name not in ("train_iters", "memory")}
        return {**numbers, f"{memory.kind}_memory_mib": memory.now, f"peak_{memory.kind}_memory_mib": memory.peak}


class TrainLog:
    """Writes ``log.jsonl`` and ``loss.png`` into a folder and prints; silent on every rank but the main one."""

    def __init__(self, folder: Path, *, is_main: bool, train_iters: int, unit: str = "byte") -> None:
        """Make the folder, on the main rank; ``unit`` is what a token is.

        Raises:
            ConfigError: it cannot be made or written to.
        """
        if is_main:
            _make_writable(folder)
        self.unit = unit
        self._is_main = is_main
        self._train_iters = train_iters
        self._picture = folder / "loss.png"
        self._path = folder / "log.jsonl"
        self._rows: list[dict[str, Any]] = []
        self._bar = self._new_bar("training", train_iters, is_hidden=True)
        self._tensorboard: TensorboardLog | None = None

    def open_tensorboard(self, folder: Path) -> None:
        """Write into an event file in the folder too, on the main rank; raises as ``TensorboardLog``."""
        if self._is_main:
            self._tensorboard = TensorboardLog(folder)

    def begin(self, iteration: int) -> None:
        """Open the files and show the bar of a run that goes on after ``iteration``; 0 is a new run.

        A new run replaces an old log. A resumed one keeps its rows up to ``iteration`` and writes the later ones anew.
        """
        if self._is_main:
            self._rows = _rows_until(self._path, iteration)
            self._path.write_text("".join(json.dumps(row) + "\n" for row in self._rows))
        self._bar = self._new_bar("training", self._train_iters, initial=iteration)

    def message(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self._is_main:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def step(self) -> None:
        """Move the progress bar one iteration on."""
        _advance(self._bar)

    def iteration(self, record: IterationRecord) -> None:
        """Print and keep one iteration."""
        self.message(record.line())
        self._bar.set_postfix(lm_loss=f"{record.lm_loss:.3f}", refresh=False)
        self._keep(record.row())

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
        row: dict[str, Any] = {"iteration": iteration, "checksum": total}
        if keeps_units:
            row["unit_checksums"] = {name: f"{number:016x}" for name, number in units.items()}
        self._keep(row)

    def draw(self) -> Path:
        """Write the loss curve so far, and return where it lies."""
        if self._is_main:
            draw_loss_curve(self._rows, self._picture, unit=self.unit)
        return self._picture

    def end(self) -> None:
        """Leave the progress bar as it stands; lines that follow go below it."""
        self._bar.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    @contextlib.contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a bar for a task beside training; yields the function that moves it one on."""
        bar = self._new_bar(what, total)
        try:
            yield lambda: _advance(bar)
        finally:
            bar.close()

    def _new_bar(self, what: str, total: int, *, initial: int = 0, is_hidden: bool = False) -> tqdm[Any]:
        # disable=None: no bar where stderr is no terminal; the lines of the log are the progress there.
        disable = True if is_hidden or not self._is_main else None
        # Not tqdm's own measurement: a container's terminal may say that it has 0 columns and rows, and then tqdm
        # draws nothing; shutil falls back to 80 x 24.
        columns, rows = shutil.get_terminal_size()
        leave = what == "training"
        return tqdm(total=total, initial=initial, desc=what, leave=leave, ncols=columns, nrows=rows, disable=disable)

    def _keep(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if self._is_main:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if self._tensorboard is not None:
            self._tensorboard.keep(row)


@dataclass(frozen=True, slots=True)
class IntervalMeans:
    """Means over the iterations since the last log line: wall-clock seconds per iteration, and loss."""

    seconds: float
    loss: float


class Interval:
    """Averages time and loss between two log lines.

    Args:
        loss_sum, loss_count: what a resumed run had gathered when it was saved, so that its next line is the same as
            without the interruption.
    """

    def __init__(self, device: torch.device, *, loss_sum: float = 0.0, loss_count: int = 0) -> None:
        # On the device, read only when a line is due: reading waits for a GPU. In fp64 the sum saves exactly.
        self._loss_sum = torch.tensor(loss_sum, dtype=torch.float64, device=device)
        self._loss_count = loss_count
        self._num_timed = 0
        self._excluded = 0.0
        self._start = time.perf_counter()

    @property
    def loss_sum(self) -> float:
        """Sum of the losses since the last line; on a GPU it waits for them."""
        return self._loss_sum.item()

    @property
    def loss_count(self) -> int:
        """Number of losses in the sum."""
        return self._loss_count

    def add(self, loss: Tensor) -> None:
        """Note one more iteration and its 0-d loss."""
        self._loss_sum += loss
        self._loss_count += 1
        self._num_timed += 1

    def add_skipped(self) -> None:
        """Note one more iteration whose loss does not count."""
        self._num_timed += 1

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave the time of the context out."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._excluded += time.perf_counter() - start

    def lap(self) -> IntervalMeans:
        """Return the means since the last lap (or the start), and start anew; at least one iteration must be in.

        The loss is NaN where every iteration was skipped.
        """
        loss = self.loss_sum / self._loss_count if self._loss_count else math.nan
        now = time.perf_counter()
        means = IntervalMeans((now - self._start - self._excluded) / self._num_timed, loss)
        self._loss_sum.zero_()
        self._loss_count = self._num_timed = 0
        self._start, self._excluded = now, 0.0
        return means


def _make_writable(folder: Path) -> None:
    reason = "it is not writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"--save: cannot write log and checkpoints into {folder}: {reason}; name another folder")


def _advance(bar: tqdm[Any]) -> None:
    bar.update()


def _rows_until(path: Path, iteration: int) -> list[dict[str, Any]]:
    """Return the rows of an earlier run up to an iteration; a last line cut off by a crash is left out."""
    if iteration == 0 or not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if row["iteration"] <= iteration:
            rows.append(row)
    return rows
