"""Muon over the param groups of a Megatron optimizer, with the settings of its config; imports no Megatron."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron_fsdp.optim.muon.matrix_views import MatrixView
from megatron_fsdp.optim.muon.muon import Muon
from megatron_fsdp.optim.muon.param_groups import muon_param_groups

__all__ = ["MUON_NAMES", "megatron_muon"]

MUON_NAMES = ("muon", "dist_muon")
"""What Megatron calls Muon; the work is always shared out over ranks here."""


def megatron_muon(groups: Sequence[Mapping[str, Any]], config: Any, model: nn.Module) -> Muon:
    """Return Muon over Megatron's param groups: each is split into matrices and what AdamW steps.

    Matrices are what Megatron gives to Muon: weights of two dims without ``is_embedding_or_output_parameter``. Queries,
    keys and values of ``linear_qkv`` are three matrices with ``muon_split_qkv``. Multipliers and other keys of a group
    stay in each of its parts, for Megatron's scheduler.

    Args:
        groups: of Megatron's Adam. config: ``OptimizerConfig`` with its ``muon_*`` fields, those of Adam among them.
        model: whose parameters they hold.
    """
    kinds = muon_param_groups(
        model,
        views=dict(_qkv_views(model, config)),
        rule=lambda _, p: p.ndim == 2 and not getattr(p, "is_embedding_or_output_parameter", False),
    )
    views = {id(parameter): group["view"] for group in kinds if group["use_muon"] for parameter in group["params"]}
    device = next(model.parameters()).device
    is_bf16 = getattr(config, "muon_fp32_matmul_prec", "medium") in ("low", "medium") and device.type == "cuda"
    return Muon(
        [part for group in groups for part in _parts(group, views)],
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        nesterov=config.muon_use_nesterov,
        ns_coefficients=getattr(config, "muon_coefficient_type", "quintic"),
        ns_steps=config.muon_num_ns_steps,
        adjust_lr_fn=config.muon_scale_mode,
        extra_scale_factor=config.muon_extra_scale_factor,
        adamw={
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
            "weight_decay": config.weight_decay,
        },
        ns_dtype=torch.bfloat16 if is_bf16 else torch.float32,
    )


def _qkv_views(model: nn.Module, config: Any) -> Iterator[tuple[str, MatrixView]]:
    """Yield how the fused projections of attention are cut, as far as the model has any."""
    if not config.muon_split_qkv or not any(name.endswith("linear_qkv.weight") for name, _ in model.named_parameters()):
        return
    shape: Any = next(module.config for module in model.modules() if hasattr(module, "config"))
    num_groups = shape.num_query_groups or shape.num_attention_heads
    head_dim = shape.kv_channels or shape.hidden_size // shape.num_attention_heads
    queries = shape.num_attention_heads // num_groups * head_dim
    yield "*linear_qkv.weight", MatrixView(row_splits=(queries, head_dim, head_dim), is_joined=True)


def _parts(group: Mapping[str, Any], views: Mapping[int, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a group for each view among a group's parameters, and one of the rest."""
    # Megatron's Adam added its defaults, which differ from Muon's.
    kept = {key: value for key, value in group.items() if key not in ("params", "betas", "eps", "bias_correction")}
    found: dict[str, dict[str, Any]] = {}
    for parameter in group["params"]:
        view = views.get(id(parameter))
        options = {"use_muon": False} if view is None else {"use_muon": True, "view": view}
        found.setdefault(repr(view), {**kept, **options, "params": []})["params"].append(parameter)
    yield from found.values()
