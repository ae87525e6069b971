"""Values of flags: the forms that they come in, and the refusal of those that are wrong."""

from __future__ import annotations

import os

import torch

from megatron_fsdp.config.parser import Flag
from megatron_fsdp.errors import ConfigError, nearest

__all__ = ["DTYPES", "DTYPE_NAMES", "check_connections", "check_value", "normal_value"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Megatron stores FP8 optimizer state as bytes.
DTYPE_NAMES = {**{dtype: name for name, dtype in DTYPES.items()}, torch.uint8: "fp8"}


def normal_value(flag: Flag, value: object) -> object:
    """Return a value as the command line has it: Megatron makes dtypes torch's, and auto None; JSON has lists."""
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    if value is None and "auto" in flag.choices:
        return "auto"
    return tuple(value) if isinstance(value, list) else value


def check_value(flag: Flag, value: object) -> None:
    """Refuse a value of another type, none of the choices, or out of range.

    Raises:
        ConfigError: it is; names the flag and what is legal.
    """
    name = f"{flag.name} ({flag.dest})"
    if value is None and flag.default is None:
        return
    legal_types = (int, float) if flag.kind is float else (flag.kind,)
    if not isinstance(value, legal_types) or (isinstance(value, bool) and flag.kind is not bool):
        raise ConfigError(f"{name}: found {value!r}, wanted {flag.kind.__name__}")
    if flag.choices and value not in flag.choices:
        choices = [str(choice) for choice in flag.choices]
        close = nearest(str(value), choices)
        raise ConfigError(f"{name}: found {value!r}, wanted one of {', '.join(choices)}; the nearest is {close}")
    if flag.kind is int and not flag.choices and isinstance(value, int) and value < 1:
        raise ConfigError(f"{name}: found {value}, wanted a whole number >= 1")
    if flag.kind is float and isinstance(value, (int, float)) and not value >= 0:
        raise ConfigError(f"{name}: found {value}, wanted a number >= 0")


def check_connections() -> None:
    """Refuse an environment in which nothing would overlap on a GPU.

    Raises:
        ConfigError: CUDA_DEVICE_MAX_CONNECTIONS is 1.
    """
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ConfigError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 contradicts --use-megatron-fsdp: with one queue to the GPU gathers and "
            "reductions wait for compute instead of overlapping with it; unset the variable"
        )
