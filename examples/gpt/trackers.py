"""TensorBoard and Weights & Biases: what else gets the rows of the training log, where flags ask for it."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron_fsdp import ConfigError

# Gets the numbers of a row by Megatron's names for them, and the iteration.
Tracker = Callable[[dict[str, float], int], None]

_NAMES = {
    "lm_loss": "lm loss",
    "validation_loss": "lm loss validation",
    "learning_rate": "learning-rate",
    "grad_norm": "grad-norm",
    "global_batch_size": "batch-size",
    "elapsed_ms": "iteration-time",
    "tokens_per_second": "tokens-per-second",
    "tflops_per_rank": "throughput",
    "mfu": "mfu",
}


def named_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of the log by the names that Megatron gives them; the iteration's time in seconds."""
    found = {name: float(row[key]) for key, name in _NAMES.items() if key in row}
    if "iteration-time" in found:
        found["iteration-time"] /= 1000
    return found


def open_trackers(args: argparse.Namespace, *, is_main: bool) -> list[Tracker]:
    """Return what gets the rows on the main rank, none on others.

    Raises:
        ConfigError: on every rank, a package is missing that a flag asks for.
    """
    found: list[Tracker] = []
    if args.tensorboard_dir is not None:
        board = _imported("torch.utils.tensorboard", "--tensorboard-dir", "tensorboard")
        if is_main:
            found.append(_tensorboard(board.SummaryWriter(log_dir=str(args.tensorboard_dir))))
    if args.wandb_project is not None:
        wandb = _imported("wandb", "--wandb-project", "wandb")
        if is_main:
            folder = None if args.wandb_save_dir is None else str(args.wandb_save_dir)
            settings = {
                name: value if isinstance(value, int | float) else str(value) for name, value in vars(args).items()
            }
            run = wandb.init(project=args.wandb_project, name=args.wandb_exp_name, dir=folder, config=settings)
            found.append(lambda numbers, iteration: run.log(numbers, step=iteration))
    return found


def _tensorboard(writer: Any) -> Tracker:
    def write(numbers: dict[str, float], iteration: int) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, iteration)
        writer.flush()

    return write


def _imported(module: str, flag: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{flag} needs the package {package} ({error}); fix: pip install {package}") from error
