"""Command lines with Megatron's flags, and meshes as a config reads them."""

import argparse
from types import SimpleNamespace
from typing import Any

import torch

from megatron_fsdp.config.flags import add_megatron_fsdp_args
from megatron_fsdp.config.fsdp_config import FsdpConfig


def namespace(line: str) -> argparse.Namespace:
    return add_megatron_fsdp_args(argparse.ArgumentParser()).parse_args(line.split())


def config(line: str) -> FsdpConfig:
    """Return the config of a command line."""
    return FsdpConfig.from_args(namespace(line))


def mesh(*shape: int, device_type: str = "cpu") -> Any:
    """Return the attributes of a device mesh that a config reads."""
    sizes = SimpleNamespace(ndim=len(shape), device_type=device_type)
    sizes.size = lambda axis=None: shape[axis] if axis is not None else torch.Size(shape).numel()
    return sizes
