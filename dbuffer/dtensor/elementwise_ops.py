"""Element-wise functions on sharded tensors: each rank computes its own rows, and the result has them too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dbuffer.dtensor.distribution import Distribution
from dbuffer.dtensor.gathered_ops import Arguments, Options, map_tensors, run_on_whole, tensors_in
from dbuffer.dtensor.op_table import Operator
from dbuffer.dtensor.placed_tensor import PlacedTensor, aligned_local, is_laid_out_like, whole_of
from dbuffer.errors import PlacementError

__all__ = [
    "accurate",
    "find_reference",
    "has_rows_of",
    "operand",
    "run_by_rows",
    "run_cast",
    "run_factory",
    "run_foreach",
    "run_unscale",
    "wrapped",
]


def run_by_rows(operator: Operator, args: Arguments, options: Options) -> Any:
    """Compute the rows of this rank; operands with other rows are brought into them first."""
    reference = find_reference(operator, args, options)
    if reference is None:
        return run_on_whole(operator, args, options)
    located = [operand(item, reference) if isinstance(item, torch.Tensor) else item for item in args]
    named = {
        name: operand(item, reference) if isinstance(item, torch.Tensor) else item for name, item in options.items()
    }
    result = operator.function(*located, **named)
    if named and result is named.get("out"):
        return options["out"]
    if located and result is located[0] and getattr(args[0], "window", None) is None:
        return args[0]
    template = reference if isinstance(reference, PlacedTensor) else _first_placed(args, options)
    return wrapped(result, template)


def wrapped(result: Any, template: PlacedTensor) -> Any:
    """Return tensors in a result as tensors with the rows of ``template``."""
    # A compiler puts tensors of its own in the place of plain ones.
    if type(result) is torch.Tensor or (isinstance(result, torch.Tensor) and not isinstance(result, DTensor)):
        return template.with_whole(result) if template.is_whole else template.with_rows(result)
    if isinstance(result, (tuple, list)):
        return map_tensors(result, lambda tensor: wrapped(tensor, template))
    return result


def _first_placed(args: Sequence[Any], options: Options) -> PlacedTensor:
    return next(tensor for tensor in tensors_in(args, options) if isinstance(tensor, PlacedTensor))


def find_reference(operator: Operator, args: Arguments, options: Options) -> DTensor | None:
    """Return the operand whose rows the result has; None where the result has no operand's rows."""
    operands = [item for item in args if isinstance(item, torch.Tensor)]
    if options.get("out") is not None:
        return _reference_out(options["out"], operands)
    if options:
        operands += [item for item in options.values() if isinstance(item, torch.Tensor)]
    first = operands[0]
    if len(operands) == 1 or operator.is_in_place or options.get("inplace"):
        # In place the first one decides; through a window only whole tensors can be written.
        if not isinstance(first, DTensor):
            return None
        is_seen_through = getattr(first, "window", None) is not None
        return None if is_seen_through or not _fits(first, first.shape, operands[1:]) else first
    shape = first.shape
    if any(other.shape != shape for other in operands[1:]):
        shape = torch.broadcast_shapes(*(other.shape for other in operands))
    placed = [item for item in operands if isinstance(item, PlacedTensor)]
    for candidate in placed:
        if not candidate.is_whole and has_rows_of(candidate, shape) and _fits(candidate, shape, operands):
            return candidate
    are_whole = all(item.is_whole for item in placed) and all(
        item.numel() == 1 for item in operands if not isinstance(item, PlacedTensor)
    )
    return placed[0] if are_whole else None


def _reference_out(out: Any, operands: Sequence[torch.Tensor]) -> DTensor | None:
    """Return the tensor that a function is to write into, where every rank can write its own rows."""
    if not isinstance(out, PlacedTensor) or out.window is not None or not operands:
        return None
    is_alike = torch.broadcast_shapes(*(operand.shape for operand in operands)) == out.shape
    return out if is_alike and _fits(out, out.shape, operands) else None


def accurate(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results are added: FP32 where rounding each rank's would show."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def has_rows_of(tensor: torch.Tensor, shape: torch.Size) -> bool:
    """Whether a tensor has as many dimensions as a shape, and as many rows."""
    return len(tensor.shape) == len(shape) > 0 and tensor.shape[0] == shape[0]


def _fits(reference: DTensor, shape: torch.Size, others: Sequence[torch.Tensor]) -> bool:
    """Whether every other operand has a part for the reference's local part."""
    if all(other.shape == shape for other in others) and reference.shape == shape:
        return True
    distribution = Distribution.of(reference)
    return distribution.is_whole or distribution.ragged is not None or reference.shape == shape


def operand(tensor: torch.Tensor, reference: DTensor) -> torch.Tensor:
    """Return the plain part of one operand that goes with the local part of ``reference``."""
    if tensor is reference:
        return reference._local_tensor if getattr(reference, "window", None) is None else whole_of(reference)
    if tensor.shape == reference.shape:
        return aligned_local(tensor, reference) if isinstance(tensor, DTensor) else _replicated(tensor, reference)
    distribution = Distribution.of(reference)
    if distribution.is_whole or not tensor.shape:
        return whole_of(tensor)
    if distribution.ragged is None:
        return distribution.cut(whole_of(tensor).expand(reference.shape))
    if not has_rows_of(tensor, reference.shape) or not isinstance(tensor, DTensor):
        return whole_of(tensor)
    return aligned_local(tensor, reference)


def _replicated(tensor: torch.Tensor, reference: DTensor) -> torch.Tensor:
    whole = whole_of(tensor)
    return whole if whole.ndim == 0 else Distribution.of(reference).cut(whole)


# ---------------------------------------------------------------- casts and new tensors


def _local(item: Any) -> Any:
    return item._local_tensor if isinstance(item, DTensor) else item


def run_cast(operator: Operator, args: Arguments, options: Options) -> Any:
    """Change dtype or device of the local part; a second tensor only says which."""
    located = [_local(item) for item in args]
    named = {name: _local(item) for name, item in options.items()}
    source = args[0]
    if not isinstance(source, PlacedTensor):
        return operator.function(source, *located[1:], **named)
    if source.window is not None:
        located[0] = source.whole()
    result = operator.function(*located, **named)
    if result is source._local_tensor:
        return source
    return source.with_rows(result) if isinstance(result, torch.Tensor) else result


def run_factory(operator: Operator, args: Arguments, options: Options) -> Any:
    """Make a new tensor: with the rows of the first one where it has that shape, else one that all ranks hold."""
    source = args[0]
    if not isinstance(source, PlacedTensor):
        return operator.function(source, *map_tensors(args[1:], whole_of), **options)
    local, rest = source._local_tensor, args[1:]
    if operator.name in ("new_zeros", "new_ones", "new_empty", "new_full"):
        is_list = bool(rest) and isinstance(rest[0], (tuple, list))
        size = options.get("size", rest[0] if is_list else rest)
        if tuple(size) == source.shape and source.window is None:
            fill = () if operator.name != "new_full" or "size" in options else rest[1:]
            options = {name: value for name, value in options.items() if name != "size"}
            made = source.with_rows(operator.function(local, tuple(local.shape), *fill, **options))
            made.is_unshared = True
            return made
    return source.with_whole(operator.function(local, *map_tensors(rest, whole_of), **options))


# ---------------------------------------------------------------- lists


def run_foreach(operator: Operator, args: Arguments, options: Options) -> Any:
    """Compute element-wise over lists, each position in the rows of its tensor in the first list."""
    references = args[0]
    if any(getattr(tensor, "window", None) is not None for tensor in references):
        return run_on_whole(operator, args, options)
    located = [_located(operator, index, item, references) for index, item in enumerate(args)]
    named = {name: _located(operator, -1, item, references) for name, item in options.items()}
    result = operator.function(*located, **named)
    if operator.is_in_place or result is None:
        return None if result is None else references
    placed = _first_placed(args, {})
    pairs = zip(references, result, strict=True)
    return type(result)(
        wrapped(one, reference if isinstance(reference, PlacedTensor) else placed)
        if isinstance(reference, DTensor)
        else one
        for reference, one in pairs
    )


def _located(operator: Operator, index: int, item: Any, references: Sequence[torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        return whole_of(item)
    if not isinstance(item, (list, tuple)) or not item or not isinstance(item[0], torch.Tensor):
        return item
    # Fused optimizers write into all lists but that of the gradients, and a copy in other rows would be lost.
    must_match = operator.name.startswith("_fused_") and index >= 2
    return [
        tensor._local_tensor
        if isinstance(tensor, PlacedTensor) and _shares_spec(tensor, reference) and tensor.window is None
        else _at_position(tensor, reference, must_match)
        for tensor, reference in zip(item, references, strict=True)
    ]


def _shares_spec(tensor: PlacedTensor, reference: torch.Tensor) -> bool:
    # The case of every optimizer step, and twenty times as fast as a comparison.
    return isinstance(reference, DTensor) and tensor._spec is reference._spec


def _at_position(tensor: torch.Tensor, reference: torch.Tensor, must_match: bool) -> torch.Tensor:
    if not isinstance(reference, DTensor):
        return whole_of(tensor) if isinstance(tensor, DTensor) else tensor
    is_alike = isinstance(tensor, DTensor) and is_laid_out_like(tensor, reference) and tensor.shape == reference.shape
    if is_alike and getattr(tensor, "window", None) is None:
        local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]  # a DTensor
        return local
    if must_match and tensor.ndim:
        raise PlacementError(
            f"a fused optimizer got state of shape {tuple(tensor.shape)} that is not laid out like its parameter of "
            f"shape {tuple(reference.shape)}; make state with torch.zeros_like(p), or use foreach=True"
        )
    return operand(tensor, reference)


def run_unscale(operator: Operator, args: Arguments, options: Options) -> None:
    """Unscale gradients in place and tell every rank whether any rank found a value that is not finite."""
    gradients, found, *rest = args
    operator.function(
        [_local(item) for item in gradients],
        whole_of(found),
        *map_tensors(tuple(rest), whole_of),
        **options,
    )
    spread = [Distribution.of(gradient) for gradient in gradients if isinstance(gradient, DTensor)]
    for distribution in {tuple(map(id, each.cutting_axes)): each for each in spread}.values():
        distribution.all_reduce(whole_of(found), "max")
