"""CheckpointSeries: a run's checkpoints in one folder: ``step_0000100`` and so on, and a pointer to the latest."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from megatron_fsdp.checkpoint.api import load_checkpoint, start_save
from megatron_fsdp.checkpoint.async_save import SaveHandle
from megatron_fsdp.checkpoint.manifest import DamagedCheckpointError, is_whole, sync, write_synced
from megatron_fsdp.checkpoint.ranks import checkpoint_ranks
from megatron_fsdp.checkpoint.scratch import (
    delete_folder,
    make_scratch,
    marked_names,
    names_at_rest,
    resting_place,
    sweep,
)
from megatron_fsdp.errors import ConfigError

__all__ = ["CheckpointSeries", "LoadedCheckpoint"]


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """The result of ``CheckpointSeries.load``.

    Attributes:
        step, path: of the loaded checkpoint.
        extra: the ``extra`` that was saved with it.
        damaged: error messages of newer checkpoints that were skipped because they are damaged.
    """

    step: int
    path: Path
    extra: dict[str, Any]
    damaged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckpointSeries:
    """The checkpoints of one run, by step.

    Attributes:
        root: the folder of the checkpoints, on a file system that all ranks share.
        prefix: prefix of their names; "iter_" for Megatron-LM's.
        pointer: name of the file that names the latest checkpoint; it is written when that checkpoint is complete.
        is_pointer_bare: write only the number to the pointer, as in Megatron's tracker file, not the folder's name.
        process_group: as in ``save_checkpoint``.

    Example:
        series = CheckpointSeries("runs/mine")
        series.save(model, optimizer, step=100, keep_last=3)
        latest = series.latest()
    """

    root: str | Path
    prefix: str = "step_"
    pointer: str = "latest"
    is_pointer_bare: bool = False
    process_group: dist.ProcessGroup | None = None

    @property
    def folder(self) -> Path:
        """``root`` as a path."""
        return Path(self.root)

    @property
    def _pattern(self) -> str:
        return re.escape(self.prefix) + r"(\d{7,})"

    def path(self, step: int) -> Path:
        """Return the folder of one step's checkpoint."""
        return self.folder / f"{self.prefix}{step:07d}"

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending. File sizes are checked, contents are not read."""
        if not self.folder.is_dir():
            return []
        found = (re.fullmatch(self._pattern, name) for name in names_at_rest(self.folder))
        return sorted(int(match[1]) for match in found if match and is_whole(resting_place(self.folder / match[0])))

    def resumable_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints up to the one that the pointer names, ascending.

        Later checkpoints belong to an earlier run that got further, in a folder in which a run has started again.
        Without a pointer, all complete checkpoints count.

        Raises:
            ConfigError: the pointer's content is not a step, or all complete checkpoints are of later steps.
        """
        steps, latest = self.steps(), self.latest()
        found = [step for step in steps if latest is None or step <= latest]
        if steps and not found:
            raise ConfigError(
                f"{self.folder / self.pointer} names step {latest}, but the complete checkpoints in {self.folder} are "
                f"of later steps: {steps}. fix: write the step to go on from into the file, or remove it to load the "
                "newest"
            )
        return found

    def latest(self) -> int | None:
        """Return the step that the pointer names; None if there is no pointer.

        Raises:
            ConfigError: the pointer's content is not a step.
        """
        file = self.folder / self.pointer
        if not file.exists():
            return None
        try:
            content = file.read_bytes().strip()
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read ({error}). fix: make it a readable file with a step in it, or remove it"
            ) from None
        number = content.removeprefix(self.prefix.encode())
        if not number.isdigit():
            raise ConfigError(
                f"{file} holds {content[:80].decode(errors='backslashreplace')!r}. fix: write the number of a step "
                f"into it, or a name such as {self.path(100).name}; or remove it"
            )
        return int(number)

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        step: int,
        *,
        extra: Mapping[str, Any] | None = None,
        keep_last: int | None = None,
        asynchronous: bool = False,
    ) -> SaveHandle:
        """Save a step as ``save_checkpoint`` does, then update the pointer, then delete older checkpoints.

        Every rank must call this.

        Args:
            keep_last: how many complete checkpoints to keep, at least 1; None keeps all.
        Raises:
            ConfigError: ``keep_last`` is below 1.
            CheckpointError: as ``save_checkpoint``; the pointer still names the previous checkpoint.
        """
        if keep_last is not None and keep_last < 1:
            raise ConfigError(f"keep_last={keep_last}. fix: give at least 1, or None to keep all")
        # The working directory may change while the save runs in the background.
        series, group = dataclasses.replace(self, root=self.folder.absolute()), self.process_group

        def finish() -> None:
            series.mark_latest(step)
            if keep_last is not None:
                series.prune(keep_last, step)

        return start_save(
            model, optimizer, self.path(step), extra=extra, asynchronous=asynchronous, process_group=group,
            afterwards=finish,
        )  # fmt: skip

    def load(self, model: nn.Module, optimizer: Optimizer | None) -> LoadedCheckpoint | None:
        """Load the newest of ``resumable_steps``; damaged checkpoints are skipped. Every rank must call this.

        Returns:
            The loaded checkpoint; None if there is none.
        Raises:
            CheckpointError: as ``load_checkpoint``. ``DamagedCheckpointError`` if there are checkpoints, but all of
                them are damaged.
            ConfigError: as ``resumable_steps``.
        """
        steps = checkpoint_ranks("calls CheckpointSeries.load", self.process_group).agree(
            f"looking for checkpoints in {self.folder}", lambda: None, lambda _: self.resumable_steps()
        )
        damaged: list[str] = []
        for step in reversed(steps):
            try:
                extra = load_checkpoint(model, optimizer, self.path(step), process_group=self.process_group)
            except DamagedCheckpointError as error:
                damaged.append(str(error))
            else:
                return LoadedCheckpoint(step, self.path(step), extra, tuple(damaged))
        if damaged:
            raise DamagedCheckpointError("\n".join([f"no checkpoint in {self.folder} is whole:", *damaged]))
        return None

    def mark_latest(self, step: int) -> None:
        """Write a step to the pointer file, atomically: a kill leaves the old or the new name. Call it on one rank."""
        target = self.folder / self.pointer
        scratch = make_scratch(target)
        try:
            content = f"{step}\n" if self.is_pointer_bare else f"{self.path(step).name}\n"
            write_synced(scratch.new, content.encode())
            scratch.new.replace(target)
        finally:
            scratch.remove()
        sync(self.folder)

    def prune(self, keep_last: int, newest: int | None = None) -> None:
        """Delete all but the newest complete checkpoints, and leftovers of earlier deletions. Call it on one rank.

        Args:
            newest: the step to count back from. Later steps, left by a run that was restarted at this step, are kept.
        """
        steps = [step for step in self.steps() if newest is None or step <= newest]
        for step in steps[:-keep_last]:
            delete_folder(self.path(step))
        for name in marked_names(self.folder):
            if re.fullmatch(self._pattern, name):
                sweep(self.folder / name)
