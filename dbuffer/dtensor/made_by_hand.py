"""DTensors that users make from a sharded tensor's placements: they become ``FlatDTensor`` with the same rows.

``DTensor.from_local(local, p.device_mesh, p.placements)``, ``DTensor(local, p._spec, ...)``, ``redistribute`` and
``zeros(..., placements=...)`` all end in ``DTensor.__new__``. It is replaced, to make a ``FlatDTensor`` if a placement
is a ``RaggedShard``. PyTorch's own operators would lose the rows (docs/design/facade.md, "Made by hand").

``torch.tensor(p)``, ``torch.as_tensor(p, dtype=...)`` and ``torch.asarray(p)`` copy without asking the class of ``p``.
Their two operators get a handler in DTensor's own table of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dbuffer.dtensor.checkpoint_chunks import own_rows
from dbuffer.dtensor.distribution import Distribution, RaggedShard, contiguous_stride
from dbuffer.dtensor.flat_dtensor import FlatDTensor
from dbuffer.dtensor.placed_tensor import PlacedTensor
from dbuffer.errors import PlacementError

_make: Any = PlacedTensor.__new__


def keep_rows_of_placements() -> None:
    """Make ``DTensor`` create a ``FlatDTensor`` for placements with a ``RaggedShard``, from now on."""
    kind: Any = DTensor
    kind.__new__ = staticmethod(_make_by_placements)
    for operator in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
        operator_handlers()[operator] = _copy_rows


def operator_handlers() -> dict[Any, Callable[..., Any]]:
    """Return DTensor's table of operators that a handler runs, instead of DTensor by placements."""
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def _copy_rows(operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Copy a sharded tensor row by row; any other DTensor as DTensor's own dispatch does it."""
    source, *rest = args
    if isinstance(source, PlacedTensor):
        return source.with_local(operator(source._local_tensor, *rest, **options))
    return run_without_handler(operator, args, options)


def run_without_handler(operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run an operator on plain DTensors in the steps that DTensor takes for operators that are not in its table.

    The table does not change, because another thread may be using it.
    """
    dispatcher: Any = DTensor._op_dispatcher
    call = dispatcher.unwrap_to_op_info(operator, args, options)
    dispatcher.sharding_propagator.propagate(call)
    local = dispatcher._dispatch_get_local_results_slow_path(operator, args, call)
    return dispatcher.wrap(local, call.output_sharding.output_spec)


def _make_by_placements(cls: type[DTensor], local_tensor: torch.Tensor, spec: DTensorSpec, **options: Any) -> DTensor:
    """Make a DTensor, or a ``FlatDTensor`` if its placements have a ``RaggedShard``."""
    if cls is DTensor and any(isinstance(placement, RaggedShard) for placement in spec.placements):
        cls, local_tensor = FlatDTensor, _rows_of_slices(local_tensor, spec)
        spec = _spec_with_rows(local_tensor, spec)
    made: DTensor = _make(cls, local_tensor, spec, **options)
    return made


def _rows_of_slices(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Return this rank's own rows of what PyTorch cut; for expert weights PyTorch can only cut whole slices."""
    ragged = next(placement for placement in spec.placements if isinstance(placement, RaggedShard))
    if not ragged.leading or local.ndim != len(ragged.leading) + 1 or local.ndim == 2 or not _is_of_this_rank(spec):
        return local
    return own_rows(local, ragged, Distribution(spec.mesh, spec.placements).rows)


def _is_of_this_rank(spec: DTensorSpec) -> bool:
    """Return whether this rank is part of the mesh."""
    return spec.mesh.get_coordinate() is not None


def _spec_with_rows(local: torch.Tensor, spec: DTensorSpec) -> DTensorSpec:
    """Return the spec with the true global shape; PyTorch assumes that every rank has as many rows as this one.

    Raises:
        PlacementError: the local part does not have the rows that the placement gives this rank, or the global shape
            is wrong.
    """
    meta = spec.tensor_meta
    assert meta is not None
    if not _is_of_this_rank(spec) or not all(type(size) is int for size in (*local.shape, *meta.shape)):
        # Either this rank is not in the mesh, or a compiler uses symbolic sizes.
        return spec
    distribution = Distribution(spec.mesh, spec.placements)
    ragged = next(placement for placement in spec.placements if isinstance(placement, RaggedShard))
    num_rows = len(distribution.rows)
    if not local.ndim or local.shape[0] != num_rows:
        raise PlacementError(
            f"rank {torch.distributed.get_rank()}: found a local part of shape {tuple(local.shape)}, but the placement "
            f"gives this rank {num_rows} rows of {ragged.rows.num_rows}, as in the flat buffer. fix: "
            "distribute_tensor(whole, mesh, [Shard(0)]) for parts of equal size, or a local part like p.to_local()"
        )
    if _fits(distribution, ragged, local, meta.shape):
        return spec
    shape = [*(ragged.leading or (ragged.rows.num_rows,)), *local.shape[1:]]
    guessed = list(local.shape)
    for placement, size in zip(spec.placements, spec.mesh.shape, strict=True):
        if isinstance(placement, Shard):
            guessed[placement.dim] *= size
            shape[placement.dim] *= 1 if placement is ragged else size
    if tuple(meta.shape) != tuple(guessed):
        raise PlacementError(
            f"found shape={tuple(meta.shape)} with placements of a tensor with {ragged.rows.num_rows} rows and a local "
            f"part of shape {tuple(local.shape)}. fix: shape=p.shape, stride=p.stride() of the tensor p that has these "
            "placements"
        )
    changed = copy.copy(spec)
    changed._hash = None
    changed.tensor_meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), meta.dtype)
    return changed


def _fits(distribution: Distribution, ragged: RaggedShard, local: torch.Tensor, shape: torch.Size) -> bool:
    """Return whether this rank's part of a tensor of the global shape would have the shape of ``local``."""
    if len(shape) != len(local.shape) + max(len(ragged.leading) - 1, 0):
        return False
    part = distribution.local_box(shape)[1]
    num_leading = len(ragged.leading) or 1
    return math.prod(part[:num_leading]) == ragged.rows.num_rows and part[num_leading:] == local.shape[1:]
