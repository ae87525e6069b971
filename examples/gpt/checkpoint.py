"""Where checkpoints lie, which one is the latest, and what a resumed run continues from."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpt.model import GptConfig
from megatron_fsdp import ConfigError

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, slots=True)
class TrainingState:
    """How far training has come.

    Attributes:
        iteration: optimizer steps done.
        consumed_samples: samples seen by them; the number of the next sample.
        loss_sum, loss_count: of the iterations since the last log line.
    """

    iteration: int = 0
    consumed_samples: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0

    def after_step(self, global_batch_size: int) -> TrainingState:
        """Return the state one optimizer step later."""
        return TrainingState(self.iteration + 1, self.consumed_samples + global_batch_size)

    def to_extra(self, config: GptConfig, data: dict[str, Any]) -> dict[str, Any]:
        """Return what goes into the checkpoint beside weights and optimizer: plain numbers and strings only.

        Args:
            data: what decides which text the samples are, by flag name without dashes.
        """
        return {
            "training": dataclasses.asdict(self),
            "model": dataclasses.asdict(config),
            "data": data,
            "random_state": torch.get_rng_state().numpy().tobytes().hex(),
        }

    @classmethod
    def from_extra(cls, extra: dict[str, Any], config: GptConfig, path: Path) -> TrainingState:
        """Return the state that ``to_extra`` described, and restore torch's CPU random state.

        Raises:
            ConfigError: the checkpoint's model was built with other flags; each that differs is named. It catches what
                weights of equal shape cannot show, such as another number of attention heads.
        """
        shape = {name: value for name, value in dataclasses.asdict(config).items() if name != "init_method_std"}
        differing = differences(extra["model"], shape)
        if differing:
            raise ConfigError(f"{path} holds another model: {'; '.join(differing)}. Use its flags, or another --load")
        random_state = bytearray.fromhex(extra["random_state"])
        torch.set_rng_state(torch.frombuffer(random_state, dtype=torch.uint8))
        return cls(**extra["training"])


def differences(saved: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return, in words, the flags of ``wanted`` that had another value when the checkpoint was saved."""
    return [
        f"--{name.replace('_', '-')} is {value}, the checkpoint has {saved.get(name)}"
        for name, value in wanted.items()
        if saved.get(name) != value
    ]


def checkpoint_path(root: Path, iteration: int) -> Path:
    """Return the folder of one iteration's checkpoint, Megatron's ``iter_0000200``."""
    return root / f"iter_{iteration:07d}"


def find_latest(root: Path) -> Path | None:
    """Return the folder of the latest complete checkpoint under ``root``, None when there is none.

    Raises:
        ConfigError: the tracker file is there but names no checkpoint.
    """
    tracker = root / TRACKER
    if not tracker.exists():
        return None
    content = tracker.read_text().strip()
    if not content.isdecimal():
        raise ConfigError(f"--load: {tracker} holds {content[:80]!r}; wanted the number of an iteration")
    path = checkpoint_path(root, int(content))
    if not path.is_dir():
        raise ConfigError(f"--load: {tracker} names iteration {content}, but {path} is missing; correct the file")
    return path


def mark_latest(root: Path, iteration: int) -> None:
    """Record that the checkpoint of ``iteration`` is complete; call on one rank, after all have written.

    The tracker is replaced in one step: a run that is killed meanwhile leaves the old or the new number, never none.
    """
    temporary = root / f"{TRACKER}.tmp"
    with temporary.open("w") as file:
        file.write(f"{iteration}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(root / TRACKER)
