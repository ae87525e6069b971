"""Sums, means, norms and extremes of sharded tensors: each rank reduces its rows, one all-reduce does the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dbuffer.dtensor.distribution import Distribution
from dbuffer.dtensor.elementwise_ops import accurate, run_by_rows, wrapped
from dbuffer.dtensor.gathered_ops import Arguments, Options, run_on_whole, tensors_in
from dbuffer.dtensor.op_table import Operator
from dbuffer.dtensor.placed_tensor import PlacedTensor, whole_of

__all__ = ["Reduction", "parse_reduction", "run_foreach_norm", "run_reduction"]

# Where the dimensions stand among the arguments.
_DIM_POSITION = {"norm": 2, "vector_norm": 2, "linalg_vector_norm": 2}
_NORMS = frozenset(_DIM_POSITION)
# These have a value of their own for every element along the dimension, or a partner that no all-reduce finds.
_ALONG_ROWS_ONLY = frozenset({"prod", "logsumexp", "softmax", "log_softmax", "cumsum", "cumprod", "argmax", "argmin"})


@dataclass(frozen=True, slots=True)
class Reduction:
    """What one call asks for.

    Attributes:
        dims: the dimensions to reduce, never negative, ascending. keepdim: whether they stay, of size 1.
        dtype: of the result, None for PyTorch's own choice. order: of a norm.
    """

    dims: tuple[int, ...]
    keepdim: bool
    dtype: torch.dtype | None
    order: float


def run_reduction(operator: Operator, args: Arguments, options: Options) -> Any:
    """Reduce a tensor: by rows where the rows stay, else every rank its own rows, then all of them together."""
    source = args[0] if args else None
    reduction = parse_reduction(operator, args, options)
    if operator.name in ("max", "min") and len(list(tensors_in(args, options))) > 1:
        return run_by_rows(operator, args, options)
    if not isinstance(source, PlacedTensor) or source.window is not None or reduction is None:
        return run_on_whole(operator, args, options)
    if operator.name in _NORMS and source.has_exact_norms:
        return run_on_whole(operator, args, options)
    distribution = source.distribution
    if not distribution.is_whole and distribution.ragged is not None and 0 not in reduction.dims:
        return wrapped(operator.function(source._local_tensor, *args[1:], **options), source)
    is_full = len(reduction.dims) == source.ndim
    is_known = operator.name not in _ALONG_ROWS_ONLY and (is_full or distribution.ragged is not None)
    has_values = operator.name not in ("max", "min") or not _asks_for_dims(operator, args, options)
    is_summable = source.dtype.is_floating_point or operator.name in ("sum", "any", "all")
    if distribution.is_whole or not (is_known and has_values and is_summable):
        return run_on_whole(operator, args, options)
    if distribution.is_flattened:
        # Local parts have two dimensions, whatever the tensor has.
        is_known = is_full and not reduction.keepdim and operator.name != "mean"
        reduction = replace(reduction, dims=(0, 1))
    combine = _combination(operator.name, reduction)
    if combine is None or not is_known:
        return run_on_whole(operator, args, options)
    return source.with_whole(combine(source, reduction))


def _asks_for_dims(operator: Operator, args: Arguments, options: Options) -> bool:
    return len(args) > 1 or "dim" in options or "other" in options


def parse_reduction(operator: Operator, args: Arguments, options: Options) -> Reduction | None:
    """Return what a call asks for; None where it is spelled in a way that is left to whole tensors."""
    if options.get("out") is not None or not args or any(isinstance(item, torch.Tensor) for item in args[1:]):
        return None
    if any(isinstance(item, torch.Tensor) for item in options.values()):
        return None
    position = _DIM_POSITION.get(operator.name, 1)
    dims = options.get("dim", options.get("axis", args[position] if len(args) > position else None))
    keepdim = options.get("keepdim", args[position + 1] if len(args) > position + 1 else False)
    order: Any = 2.0
    if operator.name in _NORMS:
        order = options.get("p", options.get("ord", args[1] if len(args) > 1 else 2.0))
        order = 2.0 if order is None or order == "fro" else order
    num_dims = len(args[0].shape)
    is_plain = isinstance(order, (int, float)) and isinstance(keepdim, (bool, int)) and len(args) <= position + 2
    if not is_plain or num_dims == 0 or isinstance(dims, (str, bool)):
        return None
    listed = range(num_dims) if dims is None or dims == () or dims == [] else dims
    listed = (listed,) if isinstance(listed, int) else tuple(listed)
    if any(not isinstance(dim, int) or not -num_dims <= dim < num_dims for dim in listed):
        return None
    return Reduction(tuple(sorted(dim % num_dims for dim in listed)), bool(keepdim), options.get("dtype"), float(order))


Combination = Callable[[PlacedTensor, Reduction], torch.Tensor]


def _combination(name: str, reduction: Reduction) -> Combination | None:
    if name in _NORMS:
        return _norm if reduction.order > 0 else None
    return {
        "sum": _sum, "mean": _mean, "amax": _amax, "max": _amax, "amin": _amin, "min": _amin, "any": _any, "all": _all,
    }.get(name)  # fmt: skip


def _sum(source: PlacedTensor, reduction: Reduction, count: int = 1) -> torch.Tensor:
    dtype = reduction.dtype or (source.dtype if source.dtype.is_floating_point else torch.int64)
    part = torch.sum(source._local_tensor, reduction.dims, reduction.keepdim, dtype=accurate(dtype))
    total = source.distribution.all_reduce(part, "sum")
    return (total if count == 1 else total.div_(count)).to(dtype)


def _mean(source: PlacedTensor, reduction: Reduction) -> torch.Tensor:
    return _sum(source, reduction, math.prod(source.shape[dim] for dim in reduction.dims))


def _amax(source: PlacedTensor, reduction: Reduction) -> torch.Tensor:
    return _extreme(source, source._local_tensor, reduction)


def _amin(source: PlacedTensor, reduction: Reduction) -> torch.Tensor:
    return _extreme(source, source._local_tensor.neg(), reduction).neg_()


def _extreme(source: PlacedTensor, local: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    if local.numel() == 0 and source.shape.numel():
        # A rank without rows takes part with what no value is below.
        local = local.new_full([size or 1 for size in local.shape], float("-inf"))
    part = torch.amax(local, reduction.dims, reduction.keepdim)
    # Not every backend lets a value that is not a number win.
    nan = torch.isnan(part).to(torch.float32)
    part.nan_to_num_(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    source.distribution.all_reduce(part, "max")
    source.distribution.all_reduce(nan, "max")
    return part.masked_fill_(nan.bool(), float("nan"))


def _any(source: PlacedTensor, reduction: Reduction) -> torch.Tensor:
    part = torch.sum(source._local_tensor.bool(), reduction.dims, reduction.keepdim)
    return source.distribution.all_reduce(part, "max").bool()


def _all(source: PlacedTensor, reduction: Reduction) -> torch.Tensor:
    part = torch.sum(source._local_tensor.logical_not(), reduction.dims, reduction.keepdim)
    return source.distribution.all_reduce(part, "max").logical_not()


def _norm(source: PlacedTensor, reduction: Reduction) -> torch.Tensor:
    dtype = reduction.dtype or source.dtype
    if reduction.order == math.inf:
        largest = _extreme(source, source._local_tensor.abs(), reduction)
        return largest.to(dtype)
    part = torch.linalg.vector_norm(
        source._local_tensor, reduction.order, reduction.dims, reduction.keepdim, dtype=accurate(dtype)
    )
    total = source.distribution.all_reduce(part.pow_(reduction.order), "sum")
    return total.pow_(1.0 / reduction.order).to(dtype)


# ---------------------------------------------------------------- one norm per tensor


def run_foreach_norm(operator: Operator, args: Arguments, options: Options) -> Any:
    """Return one norm per tensor of a list, with one all-reduce for all that are spread over the same axes."""
    tensors: Sequence[torch.Tensor] = args[0]
    order = float(options.get("ord", args[1] if len(args) > 1 else 2.0))
    if order <= 0 or any(isinstance(tensor, PlacedTensor) and tensor.has_exact_norms for tensor in tensors):
        # Of a list that is gathered, one tensor at a time takes memory.
        return [_one_norm(tensor, order) for tensor in tensors]
    dtype = options.get("dtype", args[2] if len(args) > 2 else None)
    norms: list[Any] = [None] * len(tensors)
    for positions in _by_axes(tensors).values():
        parts = torch.stack(_parts_of_norms([tensors[position] for position in positions], order))
        first = tensors[positions[0]]
        if order != math.inf:
            parts = parts.pow_(order)
        if isinstance(first, DTensor) and _is_in_parts(first):
            Distribution.of(first).all_reduce(parts, "max" if order == math.inf else "sum")
        totals = parts if order == math.inf else parts.pow_(1.0 / order)
        totals = totals.to(dtype or first.dtype)
        template = first.with_whole(totals[0]) if isinstance(first, PlacedTensor) else None
        for position, total in zip(positions, totals.unbind(), strict=True):
            norms[position] = total if template is None else template.with_local(total)
    return norms


def _one_norm(tensor: torch.Tensor, order: float) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, order)
    return norm


def _by_axes(tensors: Sequence[torch.Tensor]) -> dict[tuple[Any, ...], list[int]]:
    groups: dict[tuple[Any, ...], list[int]] = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault(_reduction_key(tensor), []).append(position)
    return groups


def _reduction_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what tensors have in common whose norms one all-reduce may add up."""
    if not isinstance(tensor, DTensor):
        return (tensor.device, tensor.dtype)
    local = tensor._local_tensor
    if not _is_in_parts(tensor):
        return (local.device, local.dtype, True)
    cuts = tuple(not placement.is_replicate() for placement in tensor._spec.placements)
    return (local.device, local.dtype, True, id(tensor._spec.mesh), cuts)


def _is_in_parts(tensor: DTensor) -> bool:
    # Of partial sums no rank has elements, and a window's local part is a copy.
    is_cut = False
    for placement in tensor._spec.placements:
        if placement.is_partial():
            return False
        is_cut = is_cut or not placement.is_replicate()
    return is_cut


def _parts_of_norms(tensors: Sequence[torch.Tensor], order: float) -> Any:
    """Return each tensor's norm over this rank's part, 0-d."""
    locals_ = [
        (tensor._local_tensor if _is_in_parts(tensor) else whole_of(tensor)) if isinstance(tensor, DTensor) else tensor
        for tensor in tensors
    ]
    if order == math.inf:
        # No element is no reason to complain on a rank without rows.
        locals_ = [
            local.new_zeros(1) if not local.numel() and tensor.shape.numel() else local
            for local, tensor in zip(locals_, tensors, strict=True)
        ]
    return torch._foreach_norm(locals_, order, dtype=accurate(locals_[0].dtype))
