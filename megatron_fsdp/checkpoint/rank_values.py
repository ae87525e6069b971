"""What ranks hold under one name and not alike: buffers of norms, and parameters that are not sharded.

A checkpoint has one value for each name, that of the first rank, which is the one that counts by FSDP2's convention.
Where others differ, it has each rank's beside it, for loading on as many ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.checkpoint.manifest import RANK_VALUES
from megatron_fsdp.checkpoint.model_state import ModelView
from megatron_fsdp.checkpoint.ranks import CheckpointRanks

__all__ = ["find_rank_values", "part_rank_values"]


def find_rank_values(view: ModelView, ranks: CheckpointRanks) -> dict[str, int]:
    """Return the names of tensors that ranks hold whole and not alike, each with the first rank that has it.

    Every rank calls it. Sharded tensors are not looked at: their replicas are the engine's to keep alike.
    """
    if ranks.size == 1:
        return {}

    def fingerprints() -> dict[str, str]:
        return {name: _fingerprint(t) for name, t in view.tensors.items() if not isinstance(t, DTensor)}

    return ranks.agree("comparing what ranks hold under one name", fingerprints, _differing)


def part_rank_values(entries: dict[str, Any], owners: Mapping[str, int], rank: int) -> None:
    """Keep under a name what its first rank has, and put this rank's own values of all such names beside it."""
    if not owners:
        return
    tensors, optimizer = entries["model"], entries.get("optimizer", {"state": {}})
    state = optimizer["state"]
    own: dict[str, Any] = {"model": {name: tensors[name] for name in owners if name in tensors}}
    if found := {name: state[name] for name in owners if name in state}:
        own["optimizer"] = {"state": found}
    not_mine = {name for name, owner in owners.items() if owner != rank}
    entries["model"] = {name: value for name, value in tensors.items() if name not in not_mine}
    if "optimizer" in entries:
        kept = {name: values for name, values in state.items() if name not in not_mine}
        entries["optimizer"] = {**optimizer, "state": kept}
    entries[RANK_VALUES] = {f"rank_{rank}": own}


def _differing(by_rank: Sequence[Mapping[str, str]]) -> dict[str, int]:
    first: dict[str, int] = {}
    found: set[str] = set()
    for rank, fingerprints in enumerate(by_rank):
        for name, value in fingerprints.items():
            owner = first.setdefault(name, rank)
            if by_rank[owner][name] != value:
                found.add(name)
    return {name: first[name] for name in sorted(found)}


def _fingerprint(tensor: torch.Tensor) -> str:
    digest = hashlib.blake2b(repr((tensor.dtype, tuple(tensor.shape))).encode(), digest_size=16)
    if not tensor.is_meta:
        values = tensor.detach().to("cpu").contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()
