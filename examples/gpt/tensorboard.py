"""``--tensorboard-dir``: the log's numbers under Megatron's names."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from megatron_fsdp import ConfigError

_NAMES = {
    "lm_loss": "lm loss",
    "learning_rate": "learning-rate",
    "grad_norm": "grad-norm",
    "elapsed_ms": "iteration-time",
    "tokens_per_second": "tokens-per-second",
    "allocated_memory_mib": "allocated-memory-mib",
    "peak_allocated_memory_mib": "peak-allocated-memory-mib",
    "resident_memory_mib": "resident-memory-mib",
    "peak_resident_memory_mib": "peak-resident-memory-mib",
    "validation_loss": "lm loss validation",
}


def check_tensorboard() -> None:
    """Refuse to start without the package.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        importlib.import_module("tensorboard")
    except ImportError as error:
        raise ConfigError(
            "--tensorboard-dir needs the package tensorboard, which is not installed; pip install tensorboard, or "
            "leave the flag away: log.jsonl and loss.png have the same numbers"
        ) from error


class TensorboardLog:
    """Writes rows of the log as scalars; iteration times in seconds, as in Megatron."""

    def __init__(self, folder: Path) -> None:
        """Open an event file in the folder.

        Raises:
            ConfigError: tensorboard is not installed.
        """
        check_tensorboard()
        self._writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(log_dir=str(folder))

    def keep(self, row: dict[str, Any]) -> None:
        """Write one row of ``log.jsonl``."""
        for key, name in _NAMES.items():
            if key in row:
                value = row[key] / 1000 if key == "elapsed_ms" else row[key]
                self._writer.add_scalar(name, value, row["iteration"])
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
