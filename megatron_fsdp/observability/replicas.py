"""Replicas: compare weights that several ranks hold in full, by checksums (docs/design/watch.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

import dbuffer_kernels
from dbuffer.collectives.all_gather import all_gather
from dbuffer.mesh import MeshAxis, mesh_axes
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.formatting import rank_list

__all__ = ["Gathered", "find_difference", "gather_checksums"]


@dataclass(frozen=True, slots=True)
class Gathered:
    """Checksums of weights that the same set of ranks replicates.

    ``places`` has each weight's number in the model and its name. ``sums`` is (ranks, 1 + weights) int64, on the
    weights' device; the first column is the rank.
    """

    places: list[tuple[int, str]]
    sums: torch.Tensor


def gather_checksums(units: Iterable[Unit]) -> list[Gathered]:
    """Return the checksums of all replicated main weights, of all ranks that hold them.

    Every rank must call this, between steps or at the end of a backward. It sends 8 bytes per weight and replica, and
    does not wait for the device. Split main weights are joined into an FP32 copy meanwhile.
    """
    by_axes: dict[tuple[int, ...], tuple[list[MeshAxis], list[tuple[int, str]], list[torch.Tensor]]] = {}
    number = 0
    for unit in units:
        for group in unit.groups:
            axes = _replicated_over(group)
            names = [f"parameter {name!r} of unit {group.name!r}" for name in group.parameters]
            places = list(enumerate(names, number))
            number += len(names)
            if axes and names:
                key = tuple(id(axis.gather_group) for axis in axes)
                _, known, sums = by_axes.setdefault(key, (axes, [], []))
                known += places
                sums += _checksums(group)
    return [Gathered(places, _gathered(torch.stack(sums), axes)) for axes, places, sums in by_axes.values()]


def find_difference(found: Iterable[Gathered]) -> tuple[int, str] | None:
    """Return the number of the first weight that differs between replicas, and a description. Waits for the device."""
    differences: list[tuple[int, str]] = []
    for one in found:
        ranks, *columns = one.sums.t().tolist()
        for (number, name), column in zip(one.places, columns, strict=True):
            if len(set(column)) > 1:
                differences.append((number, f"{name}: {_sides(dict(zip(ranks, column, strict=True)))}"))
                break
    return min(differences, default=None)


def _replicated_over(group: ParameterGroup) -> list[MeshAxis]:
    """Return the axes whose ranks hold the same elements of main weights."""
    main = group.main_weight
    spread = {id(axis) for axis in group.spread_over(main.placements)}
    axes = [axis for axis in main.axes if id(axis) not in spread]
    tensor_parallel = group.owned[0].tensor_parallel
    if tensor_parallel is not None:
        placed = zip(mesh_axes(tensor_parallel.mesh), tensor_parallel.placements, strict=True)
        axes += [axis for axis, placement in placed if isinstance(placement, Replicate)]
    return [axis for axis in axes if axis.size > 1]


def _checksums(group: ParameterGroup) -> list[torch.Tensor]:
    values = group.weights.values()
    pieces = (values.layout.piece(index, values.local_buffer) for index in range(len(group.parameters)))
    # Replicated shards start at the same element, so the start need not be part of the checksum.
    return [dbuffer_kernels.checksum(piece, key=0).to(group.spec.device) for piece in pieces]


def _gathered(sums: torch.Tensor, axes: Iterable[MeshAxis]) -> torch.Tensor:
    row = torch.cat([sums.new_tensor([dist.get_rank()]), sums])
    rows = row
    for axis in axes:
        output = rows.new_empty(axis.size * rows.numel())
        all_gather(output, rows, axis)
        rows = output
    return rows.view(-1, row.numel())


def _sides(sums: dict[int, int]) -> str:
    """Describe which ranks hold the same bits, the smallest group first: with three ranks or more, it is wrong."""
    holders: dict[int, list[int]] = {}
    for rank, number in sorted(sums.items()):
        holders.setdefault(number, []).append(rank)
    return " against ".join(rank_list(ranks) for ranks in sorted(holders.values(), key=len))
