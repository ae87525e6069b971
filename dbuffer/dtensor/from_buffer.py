"""Make the DTensors that users see, over a flat buffer's own memory."""

from __future__ import annotations

import functools
import math
import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils.dlpack import from_dlpack

from dbuffer.dtensor.c10d_operators import refuse_sharded_tensors
from dbuffer.dtensor.distribution import Distribution, FlatRows, contiguous_stride, ragged_shard
from dbuffer.dtensor.flat_dtensor import FlatDTensor
from dbuffer.dtensor.made_by_hand import keep_rows_of_placements
from dbuffer.dtensor.sharding_rules import refuse_rules_of_slices
from dbuffer.errors import LayoutError, PlacementError
from dbuffer.layout import Layout, cuts_inside_slices, first_dimension_granularity
from dbuffer.mesh import flattened_mesh, mesh_axes
from dbuffer.placements import flat_axes

# The dtypes that every DLPack version supports. Tensors of other dtypes (float8, bool) keep a view of the buffer.
_DLPACK_DTYPES = frozenset(
    getattr(torch, name) for name in "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8".split()
)

# Here, because only this file creates placements with rows.
keep_rows_of_placements()
refuse_sharded_tensors()
refuse_rules_of_slices()


def buffer_dtensor(
    local: torch.Tensor, layout: Layout, index: int, mesh: DeviceMesh, name: str, *, is_view: bool = False
) -> FlatDTensor:
    """Wrap this rank's part of a buffer's tensor as a DTensor that shares its memory; see ``DBuffer.get_dtensor``."""
    wrap = functools.partial(_wrap, is_view=is_view)
    sizes = tuple(axis.size for axis in mesh_axes(mesh))
    shape = torch.Size(layout.plan.shapes[index])
    axes = flat_axes(layout.placements)
    if any(isinstance(placement, Partial) for placement in layout.placements) or 1 < len(axes) < len(sizes):
        raise PlacementError(
            f"{name}: no DTensor describes the placements {layout.placements}. fix: reduce Partial first; of "
            "several axes, make one or all Flat"
        )
    if not axes:
        return wrap(local, mesh, tuple(Replicate() for _ in sizes), shape)
    is_flattened = cuts_inside_slices(shape, layout.plan.granularities[index])
    if is_flattened and layout.plan.granularities[index].unit_numel(shape) % shape[-1]:
        raise LayoutError(
            f"{name}: tensor {index} of shape {tuple(shape)} may be cut inside a row, by "
            f"{layout.plan.granularities[index]}, which no DTensor can describe. fix: plan it with granularity=Row() "
            f"or {first_dimension_granularity(shape)}"
        )
    row_numel, num_rows = math.prod(shape[1:]), shape[0]
    leading = tuple(shape[:-1]) if is_flattened else ()
    if is_flattened:
        local, row_numel, num_rows = local.reshape(-1, shape[-1]), shape[-1], math.prod(shape[:-1])
    rows = FlatRows(layout.plan.offsets[index], layout.numel, row_numel, num_rows)
    if len(axes) > 1:
        return wrap(local, flattened_mesh(mesh), (ragged_shard(rows, sizes, leading),), shape)
    ragged = ragged_shard(rows, (), leading)
    return wrap(local, mesh, tuple(ragged if axis in axes else Replicate() for axis in range(len(sizes))), shape)


def _wrap(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, *, is_view: bool
) -> FlatDTensor:
    distribution = Distribution(mesh, placements)
    if not shape.numel() and not distribution.is_whole:
        # A buffer cannot say which rank has rows without elements; the placement does.
        local = local.new_empty((len(distribution.rows), *local.shape[1:]))
    rows = local if is_view else _standalone(local)
    return FlatDTensor(rows, _spec_of(mesh, placements, shape, local.dtype), requires_grad=False)


_SPECS: weakref.WeakValueDictionary[tuple[Any, ...], DTensorSpec] = weakref.WeakValueDictionary()


def _spec_of(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    # The same object for the weights, gradients and optimizer state of a plan, so that foreach compares by identity.
    key = (id(mesh), placements, tuple(type(placement) for placement in placements), shape, dtype)
    spec = _SPECS.get(key)
    if spec is None:
        spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, contiguous_stride(shape), dtype))
        _SPECS[key] = spec
    return spec


def _standalone(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the memory of ``view`` whose storage covers only that memory.

    Pickling a view would pickle the whole flat buffer.
    """
    if view.numel() == 0 or view.is_meta:
        return torch.empty_like(view)
    if view.dtype not in _DLPACK_DTYPES:
        return view
    # PyTorch exports only from the current GPU.
    with torch.cuda.device(view.device) if view.is_cuda else nullcontext():
        return from_dlpack(view)
