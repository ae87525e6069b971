"""Where checkpoints lie, which one is the latest, and what a resumed run continues from."""

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.model_config import GptConfig
from megatron_fsdp import ConfigError
from megatron_fsdp.checkpoint.ranks import checkpoint_ranks
from megatron_fsdp.checkpoint.reader import open_checkpoint
from megatron_fsdp.checkpoint.series import CheckpointSeries

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
        }

    @classmethod
    def of_another_model(cls, extra: dict[str, Any]) -> TrainingState:
        """Return the state that ``to_extra`` described, whatever the model was."""
        return cls(**extra["training"])

    @classmethod
    def from_extra(cls, extra: dict[str, Any], config: GptConfig, path: Path) -> TrainingState:
        """Return the state that ``to_extra`` described.

        Raises:
            ConfigError: the checkpoint's model was built with other flags; each that differs is named. It catches what
                weights of equal shape cannot show, such as another number of attention heads.
        """
        differing = _model_differences(extra, config)
        if differing:
            raise ConfigError(
                f"{path} holds another model: {'; '.join(differing)}. Use its flags, or another --load; "
                "--no-strict-fsdp-dtensor-load takes the weights that both have"
            )
        return cls(**extra["training"])


def _model_differences(extra: dict[str, Any], config: GptConfig) -> list[str]:
    free = ("init_method_std", "moe_aux_loss_coeff")  # they change training, not the model
    shape = {name: value for name, value in dataclasses.asdict(config).items() if name not in free}
    # What did not exist when the checkpoint was saved was as its default is.
    defaults = {field.name: field.default for field in dataclasses.fields(GptConfig)}
    return differences(defaults | extra["model"], shape)


def newest_of_another_model(checkpoints: CheckpointSeries, config: GptConfig) -> Path | None:
    """Return the newest whole checkpoint if its model was built with other flags; every rank calls it."""
    ranks = checkpoint_ranks()
    steps = ranks.agree(f"looking for checkpoints in {checkpoints.folder}", lambda: None, lambda _: checkpoints.steps())
    if not steps:
        return None
    path = checkpoints.path(steps[-1])
    extra = open_checkpoint(path, ranks, verify=False).state.get("extra", {})
    return path if "model" in extra and _model_differences(extra, config) else None


def differences(saved: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return, in words, the flags of ``wanted`` that had another value when the checkpoint was saved."""
    return [
        f"--{name.replace('_', '-')} is {value}, the checkpoint has {saved.get(name)}"
        for name, value in wanted.items()
        if saved.get(name) != value
    ]


def checkpoints_in(root: Path) -> CheckpointSeries:
    """Return the checkpoints of a run's folder, named as Megatron names them: ``iter_0000200`` and a tracker file."""
    return CheckpointSeries(root, prefix="iter_", pointer=TRACKER, is_pointer_bare=True)


def resume_folder(args: argparse.Namespace) -> Path | None:
    """Return where to look for a checkpoint to go on from: ``--load``, or ``--save`` after a restart by torchrun."""
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    folder: Path | None = args.save if args.load is None and is_restart else args.load
    return folder


def check_load(args: argparse.Namespace, folder: Path, found: str) -> None:
    """Refuse to start anew where ``--load`` says to go on; with the same folder as ``--save`` a job may begin, too.

    Args:
        folder: to go on from. found: what is wrong with it.
    Raises:
        ConfigError: it is another one than that of ``--save``.
    """
    if args.save is None or folder.resolve() != args.save.resolve():
        raise ConfigError(
            f"--load {folder}: {found}; wanted the --save folder of an earlier run. Leave --load out to start from new "
            "weights; a job that is to do either, its first time and later, gives --save and --load the same folder"
        )


def check_tracker(checkpoints: CheckpointSeries) -> None:
    """Refuse a folder whose tracker names a checkpoint when there is none: starting anew would hide the loss.

    Raises:
        ConfigError: it does, or holds no number.
    """
    step = checkpoints.latest()
    if step is not None:
        raise ConfigError(
            f"{checkpoints.folder / checkpoints.pointer} names iteration {step}, but there is no whole checkpoint in "
            f"{checkpoints.folder}; bring {checkpoints.path(step).name} back, or delete the file to start anew"
        )
