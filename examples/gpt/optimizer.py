"""The optimizer of the example: torch's AdamW or SGD, or Muon, with weight decay for matrices only."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_fsdp import AdamW, ConfigError, Muon
from megatron_fsdp.muon import MatrixView, muon_param_groups


def build_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return ``--optimizer`` over the parameters of a sharded model; biases and norms are not decayed."""
    if args.optimizer in ("muon", "dist_muon"):
        return build_muon(model, args)
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (args.weight_decay, 0.0)]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[parameter.ndim == 1 or name.endswith("bias")]["params"].append(parameter)
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=args.sgd_momentum)
    betas = (args.adam_beta1, args.adam_beta2)
    if args.adam_moments == "int8":
        return AdamW(groups, lr=args.lr, betas=betas, eps=args.adam_eps, moments="int8")
    return torch.optim.AdamW(groups, lr=args.lr, betas=betas, eps=args.adam_eps)


def build_muon(model: nn.Module, args: argparse.Namespace) -> Muon:
    """Return Muon for the linear layers of the blocks, and AdamW with the flags of Adam for all else.

    Queries, keys and values are three matrices unless ``--muon-no-split-qkv`` is given; a gated MLP's first weight is
    two. Work is always shared out over the ranks.
    """
    views: dict[str, MatrixView] = {}
    if not args.muon_no_split_qkv:
        queries = args.num_attention_heads // args.key_heads * args.head_dim
        views["*linear_qkv.weight"] = MatrixView(row_splits=(queries, args.head_dim, args.head_dim), is_joined=True)
    halves = (args.ffn_hidden_size,) if args.swiglu else ()
    if args.num_experts is not None:
        views["*experts.linear_fc1.weight"] = MatrixView(row_splits=halves, batch_dims=1)
        views["*experts.linear_fc2.weight"] = MatrixView(batch_dims=1)
    elif args.swiglu:
        views["*linear_fc1.weight"] = MatrixView(row_splits=halves)
    has_biases = args.num_experts is not None and not args.disable_bias_linear
    adamw = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_eps, "weight_decay": args.weight_decay}
    is_bf16 = args.muon_fp32_matmul_prec in ("low", "medium") and next(model.parameters()).device.type == "cuda"
    return Muon(
        muon_param_groups(model, views=views, adamw=["*experts.*.bias"] if has_biases else []),
        lr=args.lr,
        weight_decay=args.weight_decay,
        momentum=args.muon_momentum,
        nesterov=args.muon_use_nesterov,
        ns_coefficients=args.muon_coefficient_type,
        ns_steps=args.muon_num_ns_steps,
        adjust_lr_fn=args.muon_scale_mode,
        extra_scale_factor=args.muon_extra_scale_factor,
        adamw=adamw,
        ns_dtype=torch.bfloat16 if is_bf16 else torch.float32,
    )


def write_parameter_groups(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Write JSON of each trainable parameter's name and its group's index, or raise a ConfigError."""
    groups = {id(one): index for index, group in enumerate(optimizer.param_groups) for one in group["params"]}
    names = {name: groups[id(one)] for name, one in model.named_parameters() if id(one) in groups}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--dump-param-to-param-group-map {path}: cannot be written: {error.strerror}. fix: give a path in an "
            "existing folder"
        ) from error


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Make the next ``optimizer.step()`` use this rate in every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def learning_rate(args: argparse.Namespace, iteration: int) -> float:
    """Return the rate of optimizer step ``iteration``, the first is 1, as Megatron's OptimizerParamScheduler has it.

    Linear warm-up from 0, so that no step has rate 0, then ``--lr-decay-style`` down to ``--min-lr``.
    """
    peak, floor, warmup = float(args.lr), float(args.min_lr), args.lr_warmup_iters
    if iteration <= warmup:
        return float(peak * iteration / warmup)
    if args.lr_decay_style == "constant":
        return peak
    if iteration > args.lr_decay_iters:
        return floor
    done = (iteration - warmup) / (args.lr_decay_iters - warmup)
    share = 1.0 - done if args.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return float(floor + share * (peak - floor))
