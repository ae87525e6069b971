"""``weight_layout``: where every rank of a sharded model has its weights, as the layout of a transfer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dbuffer import BufferPlacement, Plan
from dbuffer.placements import flat_axes, shard_index
from megatron_fsdp.checkpoint.safetensors_model import NameMap
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.errors import TransferError
from megatron_fsdp.transfer.bucket import BucketEntry
from megatron_fsdp.transfer.catalog import LooseWeight, ShardedWeight, WeightCatalog, check_wire_dtype
from megatron_fsdp.transfer.gather import Piece, own_values
from megatron_fsdp.transfer.layouts import Parts, TransferLayout, box_ranges, place_tensors, size_of

__all__ = ["held_elements", "own_weights", "shards_by_rank", "weight_layout"]


def weight_layout(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    names: Mapping[str, str] | NameMap | None = None,
) -> TransferLayout:
    """Return which rank of a model has which bytes of its weights, of all ranks; nothing is sent.

    If a mesh is a slice of a larger one, plain weights count as equal on all slices, as with tensor parallelism. The
    tensors are those of ``weight_stream(model, dtype=dtype, names=names)``, in its order.

    Raises:
        ConfigError, StateError: as ``weight_stream``.
        TransferError: tensor parallelism cuts a weight into parts of different sizes; or a DTensor that
            ``fully_shard`` did not make.

    Example:
        source = weight_layout(model)
        target = TransferLayout.sliced(source.metadata(), ranks=[0])
        print(plan_transfer(source, target))
    """
    check_wire_dtype(dtype)
    catalog = WeightCatalog.of(model)
    name_map = names if isinstance(names, NameMap) else NameMap(names or {})
    sharded = [(each, weight) for each in catalog.groups for weight in each.weights]
    every = [weight.name for _, weight in sharded] + [weight.name for weight in catalog.loose]
    renamed = name_map.translate(every)
    table = place_tensors(
        [(renamed[weight.name], _wire(each.group, dtype), weight.shape) for each, weight in sharded]
        + [(renamed[weight.name], _loose_wire(weight, dtype), weight.tensor.shape) for weight in catalog.loose]
    )
    ranges: dict[int, list[torch.Tensor]] = {rank: [] for rank in catalog.ranks}
    for (each, weight), entry in zip(sharded, table, strict=False):
        for rank, found in _ranges(each.group, weight, entry):
            ranges.setdefault(rank, []).append(found)
    for loose, entry in zip(catalog.loose, table[len(sharded) :], strict=True):
        if isinstance(loose.tensor, DTensor):
            raise TransferError(
                f"weight {loose.name!r} is a DTensor with placements {tuple(loose.tensor.placements)} that "
                "fully_shard did not make, so its layout is another library's. fix: shard it with fully_shard, or use "
                "weight_stream(model)"
            )
        for rank in catalog.ranks:
            ranges[rank].append(box_ranges(entry, [range(size) for size in entry.shape]))
    parts = {rank: Parts.of(torch.cat(found) if found else []) for rank, found in sorted(ranges.items())}
    return TransferLayout(size_of(table), parts, table)


def own_weights(model: nn.Module, tensors: Sequence[BucketEntry]) -> list[torch.Tensor]:
    """Return this rank's part of each weight: views where no cast is needed, else copies.

    Args:
        tensors: of ``weight_layout(model)``, with the dtypes to send.
    Raises:
        TransferError: ``tensors`` belong to another model.
    """
    catalog, found = WeightCatalog.of(model), []
    shapes = [weight.shape for each in catalog.groups for weight in each.weights]
    shapes += [tuple(weight.tensor.shape) for weight in catalog.loose]
    if shapes != [entry.shape for entry in tensors]:
        raise TransferError(
            f"the model has {len(shapes)} weights, and the plan's source layout has {len(tensors)}, or theirs have "
            "other shapes. fix: plan_transfer(weight_layout(model), ...) with this model"
        )
    left = iter(tensors)
    for each in catalog.groups:
        main, entries = each.group.weights.main, [next(left) for _ in each.weights]
        values = main.local_buffer.detach()
        if entries[0].dtype is not main.dtype or each.group.weights.remainder is not None:
            values = torch.empty(main.layout.numel, dtype=entries[0].dtype, device=main.device)
            own_values(Piece(each.group, (), 0, each.group.plan.numel, entries[0].dtype, {}), values)
        found += [main.layout.piece(weight.index, values) for weight in each.weights]
    return found + [
        w.tensor.detach().to(entry.dtype).contiguous() for w, entry in zip(catalog.loose, left, strict=True)
    ]


def _wire(group: ParameterGroup, dtype: torch.dtype | None) -> torch.dtype:
    values = torch.float32 if group.weights.remainder is not None else group.weights.main.dtype
    return values if dtype is None or not values.is_floating_point else dtype


def _loose_wire(weight: LooseWeight, dtype: torch.dtype | None) -> torch.dtype:
    own = weight.tensor.dtype
    is_kept = weight.is_buffer or dtype is None or not own.is_floating_point
    return own if is_kept or dtype is None else dtype


def shards_by_rank(ranks: torch.Tensor, placements: Sequence[BufferPlacement]) -> dict[int, tuple[int, int]]:
    """Return (shard index, number of shards) of a flat buffer by rank.

    Args:
        ranks: of a mesh, one dimension for each placement.
    """
    flat, sizes = flat_axes(placements), tuple(ranks.shape)
    number = math.prod(sizes[axis] for axis in flat)
    places = itertools.product(*map(range, sizes))
    return {int(ranks[place]): (shard_index(flat, place, sizes), number) for place in places}


def held_elements(plan: Plan, index: int, shard: tuple[int, int]) -> range:
    """Return which elements of a tensor, flattened, one of several shards of a plan has."""
    part, offset, numel = plan.numel // shard[1], plan.offsets[index], plan.tensor_numel(index)
    first = min(max(shard[0] * part - offset, 0), numel)
    return range(first, min(max((shard[0] + 1) * part - offset, first), numel))


def _slices(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Return the ranks of a mesh and of its other slices: tensor-parallel ranks hold the same plain weights."""
    root = mesh._get_root_mesh()
    names, known = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    if root is mesh or not names or not set(names) <= set(known):
        return [mesh.mesh]
    own = [known.index(name) for name in names]
    others = [dim for dim in range(root.ndim) if dim not in own]
    return list(root.mesh.permute(*others, *own).reshape(-1, *mesh.mesh.shape))


def _ranges(group: ParameterGroup, weight: ShardedWeight, entry: BucketEntry) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield what each rank has of one weight."""
    main, plan = group.weights.main, group.plan
    tensor_parallel = group.owned[weight.index].tensor_parallel
    if tensor_parallel is None:
        box = [range(size) for size in entry.shape]
        for ranks in _slices(main.mesh):
            for rank, shard in shards_by_rank(ranks, main.placements).items():
                yield rank, box_ranges(entry, box, held_elements(plan, weight.index, shard))
        return
    parameter = group.fsdp_params.sharded_params[weight.index]
    assert isinstance(parameter, DTensor)
    # The parameter's own axes come first, then those of the buffer, which are one where two of them cut it.
    ranks = parameter.device_mesh.mesh.reshape(*tensor_parallel.mesh.shape, *(axis.size for axis in main.axes))
    for own in itertools.product(*map(range, tensor_parallel.mesh.shape)):
        box = [range(size) for size in entry.shape]
        for place, size, placement in zip(own, tensor_parallel.mesh.shape, tensor_parallel.placements, strict=True):
            if placement.is_shard():
                dim: int = placement.dim  # type: ignore[attr-defined]  # a Shard
                if len(box[dim]) % size:
                    raise TransferError(
                        f"unit {group.name!r}: parameter {weight.name!r} of shape {entry.shape} is cut along dimension "
                        f"{dim} into {size} parts of different sizes, whose layouts this rank does not know. fix: use "
                        "weight_stream(model), or a number of tensor-parallel ranks that divides the dimension"
                    )
                length = len(box[dim]) // size
                box[dim] = range(box[dim].start + place * length, box[dim].start + (place + 1) * length)
        for rank, shard in shards_by_rank(ranks[own], main.placements).items():
            yield rank, box_ranges(entry, box, held_elements(plan, weight.index, shard))
