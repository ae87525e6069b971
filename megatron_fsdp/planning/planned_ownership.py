"""Muon for a model that is known by shapes alone, for ``megatron-fsdp plan``."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from megatron_fsdp.optim.matrix_views import MatrixView
from megatron_fsdp.optim.muon import Muon
from megatron_fsdp.optim.param_groups import OUTER_NAMES
from megatron_fsdp.planning.stand_in import StoodIn
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup

__all__ = ["muon_bytes", "planned_muon"]

# Units of the catalog, and words in names, that stand for embeddings and outputs.
_OUTER_UNITS = ("embedding", "head")
_OUTER_WORDS = ("embed", "lm_head", "pos_emb", "class_token")


def planned_muon(units: Sequence[StoodIn]) -> Muon:
    """Return the optimizer, which knows who owns which matrix.

    Matrices are the trained parameters of two dims or more that no name calls an embedding or an output; dims before
    the last two count matrices, as of experts. A live model is asked what it says: ``muon_param_groups``.
    """
    by_dims: defaultdict[int, list[Any]] = defaultdict(list)
    for unit in units:
        for group in unit.unit.groups:
            matrices, parameters = _matrices_of(unit, group), list(group.parameters.values())
            for index, parameter in enumerate(parameters):
                by_dims[len(group.plan.shapes[index]) if index in matrices else 0].append(parameter)
    views = {dims: {"view": MatrixView(batch_dims=dims - 2)} if dims else {"use_muon": False} for dims in by_dims}
    return Muon([{"params": found, **views[dims]} for dims, found in by_dims.items()])


def muon_bytes(unit: StoodIn, group: ParameterGroup, itemsize: int) -> int:
    """Return what the state of Muon and, beside it, AdamW takes on this rank.

    Args:
        itemsize: of momentum and moments.
    """
    trained = [index for index, each in enumerate(group.parameters.values()) if each.requires_grad]
    matrices = _matrices_of(unit, group)
    others = sum(group.main_weight.get_local_tensor(index).numel() for index in trained if index not in matrices)
    if not matrices:
        return 2 * others * itemsize + 4 * len(trained)
    # One flat buffer of momentum and first moments, padding included; second moments for what AdamW steps.
    return (group.main_weight.local_buffer.numel() + others) * itemsize + 4 * len(group.parameters)


def _matrices_of(unit: StoodIn, group: ParameterGroup) -> list[int]:
    if any(word in unit.modules for word in _OUTER_UNITS):
        return []
    described = zip(unit.names(group), group.plan.shapes, group.parameters.values(), strict=True)
    return [
        index
        for index, (name, shape, parameter) in enumerate(described)
        if len(shape) >= 2 and parameter.requires_grad and not _is_outer(f"{unit.name}.{name}")
    ]


def _is_outer(name: str) -> bool:
    is_named = any(fnmatch.fnmatchcase(name, f"*{pattern.lstrip('*')}") for pattern in OUTER_NAMES)
    return is_named or any(word in name for word in _OUTER_WORDS)
