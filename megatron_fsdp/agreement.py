"""Agreement: every rank of a mesh has to lay a unit out alike, or gathers would mix up tensors in silence."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from dbuffer import MeshError
from dbuffer.collectives import all_reduce
from megatron_fsdp.parameter_group import ParameterGroup

__all__ = ["check_agreement"]


def check_agreement(unit: str, groups: Sequence[ParameterGroup]) -> None:
    """Compare the layouts of a unit over the ranks of its mesh: two integers per axis.

    Args:
        unit: its name, for the message. groups: its groups, in order.
    Raises:
        MeshError: on every rank, when any two of them differ.
    """
    if not groups:
        return
    group = groups[0]
    digest = _digest(groups)
    # The largest of x and of -x are the same number but for the sign only where all ranks have one x.
    extremes = torch.tensor([digest, -digest], device=group.spec.device)
    for axis in group.main_weight.axes:
        all_reduce(extremes, axis, "max")
    highest, lowest = extremes.tolist()
    if highest != -lowest:
        shapes = {name: tuple(face.shape) for one in groups for name, face in one.parameters.items()}
        raise MeshError(
            f"unit {unit!r}: the ranks of its mesh lay it out differently. This rank has {len(shapes)} parameters in "
            f"{len(groups)} groups: {shapes}. Look for names, shapes, dtypes, requires_grad, placements or granularity "
            "that depend on the rank."
        )


def _digest(groups: Sequence[ParameterGroup]) -> int:
    described = [
        (
            list(group.parameters),
            group.plan.fingerprint(),
            group.spec.placements,
            group.spec.dtypes,
            group.requires_grad,
        )
        for group in groups
    ]
    return int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[:8], "big") >> 2
