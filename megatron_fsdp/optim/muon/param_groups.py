"""Param groups for Muon: decide which parameters are matrices by module type and marks, never by shape alone."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.muon.matrix_views import MatrixView

__all__ = ["OUTER_NAMES", "muon_param_groups"]

OUTER_NAMES = (
    *("*word_embeddings.weight", "*position_embeddings.weight", "*tok_embeddings.weight", "*embed_tokens.weight"),
    *("*wte.weight", "*wpe.weight", "*output_layer.weight", "*lm_head.weight", "*embed_out.weight", "output.weight"),
    *("head.weight", "*score.weight", "*classifier.weight"),
)
"""What embeddings and output layers are called in Megatron, torchtitan, Hugging Face and GPT-2."""

Rule = Callable[[str, torch.Tensor], bool | None]


def muon_param_groups(
    model: nn.Module,
    *,
    views: Mapping[str, MatrixView] | None = None,
    adamw: Sequence[str] = (),
    rule: Rule | None = None,
) -> list[dict[str, Any]]:
    """Return the param groups of a model for ``Muon``: one for each kind of view, and those of AdamW.

    The first of these rules that applies to a parameter decides:

    1. ``rule``;
    2. ``views`` and ``adamw``, by patterns of names;
    3. the parameter's attributes ``use_muon`` and ``is_embedding_or_output_parameter``, which megatron-core sets;
    4. its module: weights of ``nn.Linear`` are matrices. ``nn.Embedding``, weights tied to one, and output layers (by
       their usual names, or ``get_output_embeddings()``) go to AdamW.

    Vectors go to AdamW. A parameter of two or more dims on which nothing decides is an error.

    Args:
        views: how parameters with matching names are seen, such as ``{"*.qkv.weight": MatrixView(...)}``.
        adamw: names, as ``fnmatch`` patterns, that AdamW steps.
        rule: takes name and parameter; True for Muon, False for AdamW, None for the next.
    Returns:
        Dicts with ``params``, ``use_muon`` and, for matrices, ``view``; vectors are not decayed.
    Raises:
        ConfigError: a parameter that no rule covers, a pattern without a match, or no matrix at all.

    Example:
        groups = muon_param_groups(model, adamw=("head.*",))
        optimizer = Muon(groups, lr=0.02, adamw={"lr": 3e-4})
    """
    views = dict(views or {})
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    _refuse_idle(("views", views), named)
    _refuse_idle(("adamw", adamw), named)
    by_modules = _said_by_modules(model)
    muon: dict[MatrixView, list[torch.Tensor]] = {}
    matrices: list[torch.Tensor] = []
    vectors: list[torch.Tensor] = []
    for name, parameter in named:
        view = next((view for pattern, view in views.items() if _matches(name, (pattern,))), None)
        said = None if rule is None else rule(name, parameter)
        if _is_muons(name, parameter, view, adamw, by_modules) if said is None else said:
            muon.setdefault(view or MatrixView(), []).append(parameter)
        else:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
    if not muon:
        raise ConfigError(
            f"muon_param_groups: no parameter of {type(model).__name__} is a matrix for Muon. fix: name some with "
            "views={...}"
        )
    groups = [{"params": found, "use_muon": True, "view": view.to_plain()} for view, found in muon.items()]
    others = [(matrices, {}), (vectors, {"weight_decay": 0.0})]
    return [*groups, *({"params": found, "use_muon": False, **options} for found, options in others if found)]


def _said_by_modules(model: nn.Module) -> dict[int, bool]:
    """Return by id which parameters are weights of linear layers (True) and which embeddings or outputs (False)."""
    said: dict[int, bool] = {}
    for module in model.modules():
        weight = id(module._parameters.get("weight"))
        if isinstance(module, nn.Linear):
            said.setdefault(weight, True)
        if isinstance(module, nn.Embedding):
            said[weight] = False
        finder = getattr(module, "get_output_embeddings", None)
        head = finder() if callable(finder) else None
        if isinstance(head, nn.Module):
            said.update({id(parameter): False for parameter in head.parameters()})
    return said


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_muons(
    name: str, parameter: torch.Tensor, view: MatrixView | None, adamw: Sequence[str], by_modules: Mapping[int, bool]
) -> bool:
    """Return whether a parameter is a matrix, without the user's rules."""
    if view is not None:
        return True
    if parameter.ndim < 2 or _matches(name, adamw) or getattr(parameter, "is_embedding_or_output_parameter", False):
        return False
    said: bool | None = getattr(parameter, "use_muon", None)
    if said is None:
        said = False if _matches(name, OUTER_NAMES) else by_modules.get(id(parameter))
    if said is None:
        raise ConfigError(
            f"muon_param_groups: nothing says whether {name!r} of shape {tuple(parameter.shape)} is a matrix. "
            f"fix: give views={{{name!r}: MatrixView(...)}} (batch_dims for experts), adamw=({name!r},), or set its "
            "attribute use_muon"
        )
    return bool(said)


def _refuse_idle(what: tuple[str, Any], named: Sequence[tuple[str, torch.Tensor]]) -> None:
    argument, patterns = what
    for pattern in patterns:
        if not any(_matches(name, (pattern,)) for name, _ in named):
            raise ConfigError(
                f"muon_param_groups: {argument} has {pattern!r}, which is the name of no trained parameter. fix: "
                "correct the name, or leave it out"
            )
