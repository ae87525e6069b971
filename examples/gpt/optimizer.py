"""The optimizer of the example: torch's AdamW or SGD, with weight decay for matrices only."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn


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


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Make the next ``optimizer.step()`` use this rate in every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
