"""Who would own which matrix in a model that is known by shapes alone, for ``megatron-fsdp plan``."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator

from dbuffer import Flat
from megatron_fsdp.optim.matrix_views import MatrixView
from megatron_fsdp.optim.ownership import MatrixWork, Ownership, holders_of, plan_ownership
from megatron_fsdp.optim.param_groups import OUTER_NAMES
from megatron_fsdp.planning.model_spec import GroupFacts, ModelFacts, UnitFacts

__all__ = ["muon_bytes", "planned_ownership"]

# Units of the catalog, and words in names, that stand for embeddings and outputs.
_OUTER_UNITS = ("embedding", "head")
_OUTER_WORDS = ("embed", "lm_head", "pos_emb", "class_token")


def planned_ownership(facts: ModelFacts) -> tuple[Ownership, ...]:
    """Return the ownership of each set of ranks that shares matrices.

    Matrices are the trained parameters of two dims or more that no name calls an embedding or an output; dims before
    the last two count matrices, as of experts. A live model is asked what it says: ``muon_param_groups``.
    """
    works: dict[tuple[int, int], list[MatrixWork]] = {}
    for unit in facts.units:
        for group in unit.groups:
            ranks = _ranks_of(group)
            works.setdefault(ranks, []).extend(_works_of(unit, group, ranks[0]))
    return tuple(plan_ownership(found, *ranks) for ranks, found in works.items() if found)


def muon_bytes(unit: UnitFacts, group: GroupFacts, itemsize: int) -> int:
    """Return what the state of Muon and, beside it, AdamW takes on this rank.

    Args:
        itemsize: of momentum and moments.
    """
    if not group.is_trained:
        return 0
    matrices = _matrices_of(unit, group)
    others = group.owned_numel(group.placements.optimizer, group.frozen | frozenset(matrices))
    num_others = len(group.names) - len(group.frozen) - len(matrices)
    if not matrices:
        return 2 * others * itemsize + 4 * num_others
    # One flat buffer of momentum and first moments, padding included; second moments for what AdamW steps.
    return (group.local_numel(group.placements.optimizer) + others) * itemsize + 4 * len(group.names)


def _ranks_of(group: GroupFacts) -> tuple[int, int]:
    pairs = list(zip(group.axes, group.placements.optimizer, strict=True))
    num_shards = math.prod(axis.size for axis, placement in pairs if isinstance(placement, Flat))
    num_replicas = math.prod(axis.size for axis, placement in pairs if not isinstance(placement, Flat))
    return num_shards, num_replicas


def _matrices_of(unit: UnitFacts, group: GroupFacts) -> list[int]:
    if not group.is_trained or any(word in unit.modules for word in _OUTER_UNITS):
        return []
    return [
        index
        for index, (name, shape) in enumerate(zip(group.names, group.plan.shapes, strict=True))
        if len(shape) >= 2 and index not in group.frozen and not _is_outer(f"{unit.name}.{name}")
    ]


def _is_outer(name: str) -> bool:
    is_named = any(fnmatch.fnmatchcase(name, f"*{pattern.lstrip('*')}") for pattern in OUTER_NAMES)
    return is_named or any(word in name for word in _OUTER_WORDS)


def _works_of(unit: UnitFacts, group: GroupFacts, num_shards: int) -> Iterator[MatrixWork]:
    plan = group.plan
    shard_numel = plan.numel // num_shards
    for index in _matrices_of(unit, group):
        shape, name = plan.shapes[index], f"{unit.name}.{group.names[index]}"
        holders = holders_of(plan.offsets[index], plan.tensor_numel(index), shard_numel)
        first = 0
        matrix_numel = shape[-2] * shape[-1]
        for number, block in enumerate(MatrixView(batch_dims=len(shape) - 2).blocks(shape, name)):
            start, stop = number * matrix_numel, (number + 1) * matrix_numel
            while holders[first][1].stop <= start:
                first += 1
            last = first
            while last + 1 < len(holders) and holders[last + 1][1].start < stop:
                last += 1
            yield MatrixWork(name, block, holders[first : last + 1])
