"""The optimizer of the example: torch's AdamW or SGD, with weight decay for matrices only."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_fsdp import ConfigError


def build_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return ``--optimizer`` over the model's trainable parameters, in two groups.

    Parameters of one dim (biases, norms) are not decayed, as in Megatron. Call it after the model is sharded, so that
    the optimizer holds the parameters that training updates.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=args.sgd_momentum)
    return torch.optim.AdamW(groups, lr=args.lr, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps)


def write_parameter_groups(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Write ``--dump-param-to-param-group-map``: JSON of each trainable parameter's name and its group's index.

    Raises:
        ConfigError: the file cannot be written.
    """
    groups = {id(one): index for index, group in enumerate(optimizer.param_groups) for one in group["params"]}
    names = {name: groups[id(one)] for name, one in model.named_parameters() if id(one) in groups}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--dump-param-to-param-group-map {path}: cannot be written: {error.strerror}") from error


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Make the next ``optimizer.step()`` use this rate in every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
