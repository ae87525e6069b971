"""Which ranks share the matrices of a parameter group: its shards, and their replicas."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import DBuffer
from dbuffer.mesh import MeshAxis, is_alive, new_group
from dbuffer.placements import flat_axes, shard_index
from megatron_fsdp.optim.exchange import OwnerRanks

__all__ = ["owner_ranks"]

_JOINED: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], MeshAxis]] = weakref.WeakKeyDictionary()


def owner_ranks(main: DBuffer, *, shares_replicas: bool) -> OwnerRanks:
    """Return the ranks that share the matrices of a buffer; all ranks of its mesh call it.

    Args:
        main: the main weights.
        shares_replicas: whether ranks that hold the same elements divide the work; else each replica does all of it.
    """
    flat = flat_axes(main.placements)
    others = tuple(axis for axis in range(len(main.axes)) if axis not in flat)
    shards = _joined(main, flat)
    return OwnerRanks(shards, _joined(main, others) if shares_replicas else None)


def _joined(main: DBuffer, axes: tuple[int, ...]) -> MeshAxis | None:
    """Return one axis in place of several, its ranks in the order of the shards that they hold."""
    wide = tuple(axis for axis in axes if main.axes[axis].size > 1)
    if not wide:
        return None
    if len(wide) == 1:
        return main.axes[wide[0]]
    known = _JOINED.setdefault(main.axes[wide[0]].gather_group, {})
    if wide not in known or not is_alive(known[wide].gather_group):
        known[wide] = _make_joined(main.mesh, main.axes, wide)
    return known[wide]


def _make_joined(mesh: DeviceMesh, all_axes: Sequence[MeshAxis], axes: tuple[int, ...]) -> MeshAxis:
    here = [axis.rank for axis in all_axes]
    sizes = [axis.size for axis in all_axes]
    ranks = [0] * math.prod(sizes[axis] for axis in axes)
    for place in itertools.product(*(range(sizes[axis]) for axis in axes)):
        coordinate = list(here)
        for axis, position in zip(axes, place, strict=True):
            coordinate[axis] = position
        ranks[shard_index(axes, coordinate, sizes)] = int(mesh.mesh[tuple(coordinate)])
    name = " x ".join(all_axes[axis].name for axis in axes)
    group = new_group(ranks, f"owners over {name}")
    return MeshAxis(name, len(ranks), shard_index(axes, here, sizes), group, has_separate_reduce_group=False)
