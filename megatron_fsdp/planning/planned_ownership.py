"""Who would own which matrix in a model that is known by shapes alone, for ``megatron-fsdp plan``."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence

from dbuffer import Flat
from megatron_fsdp.optim.matrix_views import MatrixView
from megatron_fsdp.optim.ownership import MatrixWork, Ownership, holders_of, plan_ownership
from megatron_fsdp.optim.param_groups import OUTER_NAMES
from megatron_fsdp.planning.stand_in import StoodIn
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup

__all__ = ["muon_bytes", "planned_ownership"]

# Units of the catalog, and words in names, that stand for embeddings and outputs.
_OUTER_UNITS = ("embedding", "head")
_OUTER_WORDS = ("embed", "lm_head", "pos_emb", "class_token")


def planned_ownership(units: Sequence[StoodIn]) -> tuple[Ownership, ...]:
    """Return the ownership of each set of ranks that shares matrices.

    Matrices are the trained parameters of two dims or more that no name calls an embedding or an output; dims before
    the last two count matrices, as of experts. A live model is asked what it says: ``muon_param_groups``.
    """
    works: dict[tuple[int, int], list[MatrixWork]] = {}
    for unit in units:
        for group in unit.unit.groups:
            pairs = list(zip(group.main_weight.axes, group.spec.placements.optimizer, strict=True))
            num_shards = math.prod(axis.size for axis, placement in pairs if isinstance(placement, Flat))
            num_ranks = math.prod(axis.size for axis, _ in pairs)
            works.setdefault((num_shards, num_ranks // num_shards), []).extend(_works_of(unit, group, num_shards))
    return tuple(plan_ownership(found, *ranks) for ranks, found in works.items() if found)


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


def _works_of(unit: StoodIn, group: ParameterGroup, num_shards: int) -> Iterator[MatrixWork]:
    plan, names = group.plan, unit.names(group)
    for index in _matrices_of(unit, group):
        shape, name = plan.shapes[index], f"{unit.name}.{names[index]}"
        holders = holders_of(plan.offsets[index], plan.tensor_numel(index), plan.numel // num_shards)
        first, matrix_numel = 0, shape[-2] * shape[-1]
        for number, block in enumerate(MatrixView(batch_dims=len(shape) - 2).blocks(shape, name)):
            start, stop = number * matrix_numel, (number + 1) * matrix_numel
            while holders[first][1].stop <= start:
                first += 1
            last = first
            while last + 1 < len(holders) and holders[last + 1][1].start < stop:
                last += 1
            yield MatrixWork(name, block, holders[first : last + 1])
