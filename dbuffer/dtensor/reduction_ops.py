"""Sums, means, norms and extremes of sharded tensors: each rank reduces its rows, then one all-reduce combines them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dbuffer.dtensor.distribution import Distribution
from dbuffer.dtensor.elementwise_ops import accurate, first_list, run_by_rows, wrapped
from dbuffer.dtensor.gathered_ops import Arguments, Operator, Options, run_on_whole, tensors_in
from dbuffer.dtensor.placed_tensor import PlacedTensor, whole_of
from dbuffer.dtensor.reads import read_reduce, reduce_norm

_NORMS = frozenset({"norm", "vector_norm", "linalg_vector_norm"})
_EXTREMES = frozenset({"amax", "amin", "max", "min"})
# One all-reduce completes them for integer tensors too.
_OF_INTEGERS = frozenset({"sum", "any", "all"})


@dataclass(frozen=True, slots=True)
class Reduction:
    """The arguments of one reduction.

    Attributes:
        dims: the dimensions to reduce, non-negative and ascending. keepdim: whether they stay, with size 1.
        dtype: dtype of the result; None: PyTorch's default. order: order of a norm.
    """

    dims: tuple[int, ...]
    keepdim: bool
    dtype: torch.dtype | None
    order: float


def run_reduction(operator: Operator, args: Arguments, options: Options) -> Any:
    """Reduce a tensor: each row locally if rows are kept; otherwise each rank's rows, then over the ranks."""
    source, name = args[0] if args else None, operator.name
    if name in ("max", "min") and len(list(tensors_in(args, options))) > 1:
        return run_by_rows(operator, args, options)
    reduction = parse_reduction(operator, args, options)
    if not isinstance(source, PlacedTensor) or source.is_whole or reduction is None:
        return run_on_whole(operator, args, options)
    if name in _NORMS and source.has_exact_norms:
        return run_on_whole(operator, args, options)
    has_rows = source.distribution.ragged is not None
    if has_rows and 0 not in reduction.dims:
        return wrapped(operator.function(source._local_tensor, *args[1:], **options), source)
    local, dims, is_full = source._local_tensor, reduction.dims, len(reduction.dims) == source.ndim
    if is_full and not reduction.keepdim:
        # A local part may have fewer dimensions than the tensor.
        local, dims = local.reshape(-1), (0,)
    elif not has_rows:
        return run_on_whole(operator, args, options)
    # max and min with a dimension also return indices.
    has_one_value = name not in ("max", "min") or (len(args) == 1 and not options)
    if not has_one_value or not (source.dtype.is_floating_point or name in _OF_INTEGERS):
        return run_on_whole(operator, args, options)
    result = _reduced(name, source, local, dims, reduction)
    return run_on_whole(operator, args, options) if result is None else source.with_whole(result)


def _reduced(
    name: str, source: PlacedTensor, local: torch.Tensor, dims: tuple[int, ...], reduction: Reduction
) -> torch.Tensor | None:
    """Return the result, equal on all ranks; None if an all-reduce cannot compute it."""
    keepdim = reduction.keepdim
    all_reduce = functools.partial(source.distribution.all_reduce, of=source)
    dtype = reduction.dtype or (source.dtype if source.dtype.is_floating_point else torch.int64)
    if name in ("sum", "mean"):
        total = all_reduce(torch.sum(local, dims, keepdim, dtype=accurate(dtype)), "sum")
        if name == "mean":
            total.div_(math.prod(source.shape[dim] for dim in reduction.dims))
        return total.to(dtype)
    if name in ("any", "all"):
        # The maximum over the ranks of how many deciding elements each rank has.
        sought = local.bool() if name == "any" else local.logical_not()
        found = all_reduce(torch.sum(sought, dims, keepdim), "max").bool()
        is_true = found if name == "any" else found.logical_not()
        # As PyTorch does for bytes.
        return is_true.to(torch.uint8) if source.dtype is torch.uint8 else is_true
    if name in _EXTREMES:
        if name in ("amax", "max"):
            return _largest(source, local, dims, keepdim)
        return _largest(source, local.neg(), dims, keepdim).neg_()
    if name in _NORMS and reduction.order == math.inf:
        return _largest(source, local.abs(), dims, keepdim).to(dtype)
    if name in _NORMS and reduction.order > 0:
        part = torch.linalg.vector_norm(local, reduction.order, dims, keepdim, dtype=accurate(dtype))
        return all_reduce(part.pow_(reduction.order), "sum").pow_(1.0 / reduction.order).to(dtype)
    return None


def _largest(source: PlacedTensor, local: torch.Tensor, dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    if local.numel() == 0 and source.shape.numel():
        # A rank without rows contributes the smallest value.
        local = local.new_full([size or 1 for size in local.shape], float("-inf"))
    return source.distribution.all_reduce(torch.amax(local, dims, keepdim), "max", source)


def parse_reduction(operator: Operator, args: Arguments, options: Options) -> Reduction | None:
    """Return the arguments of a call as a ``Reduction``; None for call forms that run on whole tensors."""
    rest = (*args[1:], *options.values())
    if not args or options.get("out") is not None or any(isinstance(item, torch.Tensor) for item in rest):
        return None
    position = 2 if operator.name in _NORMS else 1
    dims = options.get("dim", options.get("axis", args[position] if len(args) > position else None))
    keepdim = options.get("keepdim", args[position + 1] if len(args) > position + 1 else False)
    order: Any = options.get("p", options.get("ord", args[1] if position == 2 and len(args) > 1 else 2.0))
    order = 2.0 if order is None or order == "fro" else order
    num_dims = len(args[0].shape)
    is_plain = isinstance(order, (int, float)) and isinstance(keepdim, (bool, int)) and len(args) <= position + 2
    if not is_plain or num_dims == 0 or isinstance(dims, (str, bool)):
        return None
    if operator.name in ("any", "all") and dims is not None and not isinstance(dims, int) and not dims:
        # No dimensions: PyTorch's two functions then reduce none, where all others reduce all.
        return None
    listed = range(num_dims) if dims is None or dims == () or dims == [] else dims
    listed = (listed,) if isinstance(listed, int) else tuple(listed)
    if any(not isinstance(dim, int) or not -num_dims <= dim < num_dims for dim in listed):
        return None
    if len({dim % num_dims for dim in listed}) < len(listed):
        return None
    return Reduction(tuple(sorted(dim % num_dims for dim in listed)), bool(keepdim), options.get("dtype"), float(order))


# ---------------------------------------------------------------- one norm per tensor


def run_foreach_norm(operator: Operator, args: Arguments, options: Options) -> Any:
    """Return one norm per tensor of a list, with one all-reduce for all tensors that are sharded over the same axes."""
    tensors = first_list(args, options)
    order = float(options.get("ord", args[1] if len(args) > 1 else 2.0))
    dtype = options.get("dtype", args[2] if len(args) > 2 else None)
    if order <= 0 or any(isinstance(tensor, PlacedTensor) and tensor.has_exact_norms for tensor in tensors):
        # One tensor at a time, because gathering the whole list takes memory.
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault(_spread(tensor), []).append(position)
    norms: list[Any] = [None] * len(tensors)
    for positions in groups.values():
        first = tensors[positions[0]]
        here = [tensors[position] for position in positions]
        parts = torch.stack(_norms_of_parts(here, order, accurate(dtype or first.dtype)))
        parts = parts if order == math.inf else parts.pow_(order)
        if _is_in_parts(first):
            reduce = reduce_norm if getattr(first, "gradient_of", None) is not None else read_reduce
            for axis in Distribution.of(first).cutting_axes:  # type: ignore[arg-type]
                reduce(parts, axis, "max" if order == math.inf else "sum", first)  # type: ignore[arg-type]
        totals = (parts if order == math.inf else parts.pow_(1.0 / order)).to(dtype or first.dtype)
        template = first.with_whole(totals[0]) if isinstance(first, PlacedTensor) else None
        for position, total in zip(positions, totals.unbind(), strict=True):
            norms[position] = total if template is None else template.with_local(total)
    return norms


def _spread(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key; tensors with equal keys can share one all-reduce of their norms."""
    if not isinstance(tensor, DTensor):
        return (tensor.device, tensor.dtype)
    local, spec = tensor._local_tensor, tensor._spec
    if not _is_in_parts(tensor):
        return (local.device, local.dtype, True)
    return (local.device, local.dtype, id(spec.mesh), *(one.is_replicate() for one in spec.placements))


def _is_in_parts(tensor: torch.Tensor) -> bool:
    # A rank has no elements of a partial sum.
    if not isinstance(tensor, DTensor) or any(one.is_partial() for one in tensor._spec.placements):
        return False
    return not all(one.is_replicate() for one in tensor._spec.placements)


def _norms_of_parts(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype) -> Any:
    """Return each tensor's norm over this rank's part, 0-d, computed in ``dtype``."""
    parts = [
        (tensor._local_tensor if _is_in_parts(tensor) else whole_of(tensor)) if isinstance(tensor, DTensor) else tensor
        for tensor in tensors
    ]
    if order == math.inf:
        # The infinity norm of no elements raises an error; a rank without rows uses 0 instead.
        parts = [
            part.new_zeros(1) if not part.numel() and tensor.shape.numel() else part
            for part, tensor in zip(parts, tensors, strict=True)
        ]
    return torch._foreach_norm(parts, order, dtype=dtype)
