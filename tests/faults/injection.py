"""Faults that can be injected once into a rank of the training script: SIGKILL, a stall, another branch."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pretrain_gpt
from megatron_fsdp.checkpoint import series as checkpoint_series
from megatron_fsdp.checkpoint import writer as checkpoint_writer

# Moments of a save: the function, and whether the rank dies before or after it. Only rank 0 calls the functions of rank
# 0.
SAVE_MOMENTS: dict[str, tuple[Any, str, bool, int]] = {
    "save: folder made": (checkpoint_writer, "_make_folder", True, 0),
    "save: before writing": (checkpoint_writer, "_write_mine", False, 1),
    "save: files written": (checkpoint_writer, "_write_mine", True, 1),
    "save: before the index": (checkpoint_writer, "_finish", False, 0),
    "save: before the manifest": (checkpoint_writer, "write_manifest", False, 0),
    "save: complete, unnamed": (checkpoint_writer, "_publish", False, 0),
    "save: named": (checkpoint_writer, "_publish", True, 0),
    "save: before the tracker": (checkpoint_series.CheckpointSeries, "mark_latest", False, 0),
    "save: tracker written": (checkpoint_series.CheckpointSeries, "mark_latest", True, 0),
    "save: old one deleted": (checkpoint_series.CheckpointSeries, "prune", True, 0),
}
STEP_MOMENTS = ("forward", "backward", "optimizer step")
# The rank stays alive, but stops or runs other code than the other ranks.
STALLS = ("stall: forward", "stall: backward", "stall: optimizer step", "stall: data")
BRANCHES = ("branch: a block left out", "branch: blocks swapped")
_FOREVER_S = 3600.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and the moment at which it happens.

    Attributes:
        moment: of ``STEP_MOMENTS`` or ``SAVE_MOMENTS`` for a kill, or of ``STALLS`` or ``BRANCHES``.
        iteration: number of the iteration, or of the iteration that is saved.
        rank: the rank with the fault.
    """

    moment: str
    iteration: int
    rank: int


class Injector:
    """Kills this rank when the fault's moment comes, in the first run only, and notes when things happened.

    Args:
        notes: file of JSON lines, which survives the process.
    """

    def __init__(self, fault: Fault | None, notes: Path, rank: int) -> None:
        self._fault = fault if fault is not None and fault.rank == rank and not _has_died(notes) else None
        self._notes = notes
        self._rank = rank
        self._iteration = 0

    def install(self) -> None:
        """Put the hooks into the training script and the library."""
        step = pretrain_gpt.train_step

        def train_step(job: Any, state: Any) -> Any:
            self._iteration = state.iteration + 1
            self._arm(job)
            result = step(job, state)
            if self._rank == 0:
                note(self._notes, "stepped", self._iteration)
            return result

        mock.patch.object(pretrain_gpt, "train_step", train_step).start()
        if self._fault is not None and self._fault.moment in SAVE_MOMENTS:
            owner, name, is_after, _ = SAVE_MOMENTS[self._fault.moment]
            mock.patch.object(owner, name, self._around(getattr(owner, name), is_after)).start()

    def _arm(self, job: Any) -> None:
        if self._fault is None or self._iteration != self._fault.iteration:
            return
        kind, _, place = self._fault.moment.rpartition(": ")
        if kind == "branch":
            self._take_another_branch(job.model, place)
            return
        strike = self._stall if kind == "stall" else self._die
        block = job.model.blocks[0]
        if place == "forward":
            block.register_forward_hook(lambda *_: strike())
        elif place == "backward":
            block.register_forward_hook(
                lambda _module, _inputs, output: output.register_hook(lambda _: strike()) and None
            )
        elif place == "optimizer step":
            job.optimizer.register_step_post_hook(lambda *_: strike())
        elif place == "data":
            mock.patch.object(pretrain_gpt, "microbatches", side_effect=lambda *_: strike()).start()

    def _take_another_branch(self, model: Any, which: str) -> None:
        note(self._notes, "died", self._iteration)
        blocks = list(model.blocks)
        others = blocks[1:] if which == "a block left out" else blocks[::-1]
        mock.patch.dict(model.blocks._modules, {}, clear=True).start()
        model.blocks._modules.update({str(index): block for index, block in enumerate(others)})

    def _stall(self) -> None:
        note(self._notes, "died", self._iteration)
        time.sleep(_FOREVER_S)

    def _around(self, function: Callable[..., Any], is_after: bool) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            # An asynchronous save is still under way when the next iterations have begun.
            is_due = self._fault is not None and self._iteration >= self._fault.iteration
            if is_due and not is_after:
                self._die()
            result = function(*args, **options)
            if is_due:
                self._die()
            return result

        return call

    def _die(self) -> None:
        note(self._notes, "died", self._iteration)
        os.kill(os.getpid(), signal.SIGKILL)


def note(notes: Path, event: str, iteration: int) -> None:
    """Append an event with the time of the clock that all processes share."""
    with notes.open("a") as file:
        file.write(json.dumps({"event": event, "iteration": iteration, "time": time.time()}) + "\n")


def read_notes(notes: Path) -> list[dict[str, Any]]:
    """Return the events so far."""
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def _has_died(notes: Path) -> bool:
    return any(event["event"] == "died" for event in read_notes(notes))
