"""``local_shards``: this rank's elements of each weight, their place, and the ranks with the same elements."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from dbuffer.placements import flat_axes
from megatron_fsdp.build.tensor_parallel import TensorParallel
from megatron_fsdp.errors import TransferError
from megatron_fsdp.transfer.catalog import CatalogGroup, LooseWeight, ShardedWeight, WeightCatalog

__all__ = ["LocalShard", "local_shards"]


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """This rank's part of one weight.

    Elements are counted in the part of the weight that tensor parallelism gives this rank (``part_shape``, which begins
    at ``part_offsets`` of the whole one), flattened; without tensor parallelism that is the whole weight.

    Attributes:
        name: of the weight. aliases: its other names.
        local: 1-D view of the memory that the optimizer updates; empty if this rank has no element of the weight. With
            split main weights it is the bf16 plane.
        shape: of the whole weight. offset: of the first element of ``local``.
        part_shape, part_offsets: see above.
        replica_ranks: the ranks with exactly these elements, including this one, ascending.
        sender: the one of them that sends the elements if each is to be sent once; spread over the replicas.
        mesh, placements: of the sharded parameter, a DTensor; None for a plain tensor.

    Example:
        for name, shard in local_shards(model).items():
            print(name, shard.shape, shard.offset, shard.local.numel(), shard.replica_ranks)
    """

    name: str
    aliases: tuple[str, ...]
    local: torch.Tensor
    shape: tuple[int, ...]
    offset: int
    part_shape: tuple[int, ...]
    part_offsets: tuple[int, ...]
    replica_ranks: tuple[int, ...]
    sender: int
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] | None = None

    @property
    def contributes(self) -> bool:
        """Return whether this rank sends elements: it is their sender, and the shard is not empty."""
        return self.local.numel() > 0 and self.sender == (dist.get_rank() if dist.is_initialized() else 0)


def local_shards(model: nn.Module) -> dict[str, LocalShard]:
    """Return this rank's part of each weight by name, in the order of ``weight_stream``; no copy, no collective.

    The addresses stay until the model is sharded or materialized again or moved to another device, so an RDMA engine
    may register them once; the values change with each step.

    Raises:
        ConfigError, StateError: as ``weight_stream``.
        TransferError: a loose DTensor that ``fully_shard`` did not make.

    Example:
        for name, shard in local_shards(model).items():
            if shard.contributes:
                print(name, shard.local.data_ptr(), shard.offset, shard.local.numel())
    """
    catalog = WeightCatalog.of(model)
    found = [_shard(each, weight) for each in catalog.groups for weight in each.weights]
    found += [_loose(weight, number, catalog.ranks) for number, weight in enumerate(catalog.loose)]
    return {shard.name: shard for shard in found}


def _shard(each: CatalogGroup, weight: ShardedWeight) -> LocalShard:
    group = each.group
    main, owned = group.weights.main, group.owned[weight.index]
    parameter = group.fsdp_params.sharded_params[weight.index]
    assert isinstance(parameter, DTensor)
    tensor_parallel, cut = owned.tensor_parallel, set(flat_axes(main.placements))
    if tensor_parallel is None:
        replicas = _alike(main.mesh, cut)
    else:
        # A tensor-parallel parameter's own axes come first, then the buffer's (two axes that cut the buffer count as
        # one).
        own = {axis for axis, placement in enumerate(tensor_parallel.placements) if placement.is_shard()}
        mesh = parameter.device_mesh
        is_one = mesh.ndim < tensor_parallel.mesh.ndim + len(main.placements)
        replicas = _alike(
            mesh, own | ({mesh.ndim - 1} if is_one else {tensor_parallel.mesh.ndim + axis for axis in cut})
        )
    held = main.layout.held(weight.index)
    shape, offsets = _part(weight, tensor_parallel)
    return LocalShard(
        weight.name, weight.aliases, main.layout.piece(weight.index, main.local_buffer.detach()), weight.shape,
        held.start, shape, offsets, replicas, replicas[weight.index % len(replicas)],
        parameter.device_mesh,        tuple(parameter.placements),
    )  # fmt: skip


def _alike(mesh: DeviceMesh, cut: set[int]) -> tuple[int, ...]:
    """Return the ranks at this rank's place on the axes that cut a buffer, anywhere on the others."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    place = tuple(coordinate[axis] if axis in cut else slice(None) for axis in range(mesh.ndim))
    return tuple(sorted(mesh.mesh[place].reshape(-1).tolist()))


def _part(weight: ShardedWeight, tensor_parallel: TensorParallel | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape, and the place in the whole weight, of what tensor parallelism gives this rank."""
    shape, offsets = list(weight.shape), [0] * len(weight.shape)
    if tensor_parallel is None:
        return tuple(shape), tuple(offsets)
    coordinate = tensor_parallel.mesh.get_coordinate()
    assert coordinate is not None
    for place, size, placement in zip(coordinate, tensor_parallel.mesh.shape, tensor_parallel.placements, strict=True):
        if placement.is_shard():
            dim: int = placement.dim  # type: ignore[attr-defined]  # a Shard
            length = -(-shape[dim] // size)
            start = min(place * length, shape[dim])
            offsets[dim] += start
            shape[dim] = min(length, shape[dim] - start)
    return tuple(shape), tuple(offsets)


def _loose(weight: LooseWeight, number: int, ranks: tuple[int, ...]) -> LocalShard:
    if isinstance(weight.tensor, DTensor):
        raise TransferError(
            f"weight {weight.name!r} is a DTensor with placements {tuple(weight.tensor.placements)} that "
            "fully_shard did not make, so its layout is another library's. fix: shard it with fully_shard, or "
            "use weight_stream(model)"
        )
    shape = tuple(weight.tensor.shape)
    flat = weight.tensor.detach().reshape(-1) if math.prod(shape) else weight.tensor.detach().new_empty(0)
    return LocalShard(
        weight.name, weight.aliases, flat, shape, 0, shape, (0,) * len(shape), ranks, ranks[number % len(ranks)]
    )
