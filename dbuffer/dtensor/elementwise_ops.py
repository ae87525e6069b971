"""Element-wise functions on sharded tensors: each rank computes its rows, and the result has the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dbuffer.dtensor.distribution import Distribution
from dbuffer.dtensor.gathered_ops import Arguments, Operator, Options, map_tensors, run_on_whole, tensors_in
from dbuffer.dtensor.placed_tensor import PlacedTensor, is_laid_out_like, is_replication_implied, whole_of
from dbuffer.errors import PlacementError


def run_by_rows(operator: Operator, args: Arguments, options: Options) -> Any:
    """Compute this rank's rows. Operands with other rows are gathered and cut to these rows first."""
    reference = find_reference(operator, args, options)
    if reference is None:
        return run_on_whole(operator, args, options)
    located = [part_of(item, reference) if isinstance(item, torch.Tensor) else item for item in args]
    named = {
        name: part_of(item, reference) if isinstance(item, torch.Tensor) else item for name, item in options.items()
    }
    result = operator.function(*located, **named)
    if named and result is named.get("out"):
        return options["out"]
    if located and result is located[0]:
        return args[0]
    template = reference if isinstance(reference, PlacedTensor) else _first_placed(args, options)
    return wrapped(result, template)


def find_reference(operator: Operator, args: Arguments, options: Options) -> DTensor | None:
    """Return the operand whose rows the result has; None if the result follows no operand."""
    if operator.name == "where" and len(args) + len(options) == 1:
        # The positions of the non-zero elements.
        return None
    operands = [item for item in (*args, *options.values()) if isinstance(item, torch.Tensor)]
    shape = operands[0].shape
    if any(other.shape != shape for other in operands):
        shape = torch.broadcast_shapes(*(other.shape for other in operands))
    candidates: Sequence[Any] = operands
    if options.get("out") is not None:
        candidates = [options["out"]]
    elif operator.is_in_place or options.get("inplace"):
        candidates = operands[:1]
    else:
        placed = [item for item in operands if isinstance(item, PlacedTensor)]
        candidates = [item for item in placed if not item.is_whole]
        plain_numel = max((item.numel() for item in operands if not isinstance(item, PlacedTensor)), default=1)
        candidates = candidates or (placed if plain_numel == 1 else [])
        is_own = any(item.numel() > 1 for item in operands if not isinstance(item, DTensor))
        if is_own and not is_replication_implied() and all(item.shape != shape for item in placed):
            # Activations combined with weights: the result belongs to this rank alone.
            return None
    for candidate in candidates:
        # A tensor with a window is only read or written as a whole.
        if isinstance(candidate, DTensor) and getattr(candidate, "window", None) is None:
            distribution = Distribution.of(candidate)
            has_rows = distribution.is_whole or (distribution.ragged is not None and has_rows_of(candidate, shape))
            if has_rows or candidate.shape == shape:
                return candidate
    return None


def part_of(tensor: torch.Tensor, reference: DTensor) -> torch.Tensor:
    """Return the plain part of an operand that matches the local part of ``reference``.

    Communicates only if the operand has other rows.
    """
    if tensor is reference:
        return reference._local_tensor
    is_alike = tensor.shape == reference.shape or has_rows_of(tensor, reference.shape)
    if is_alike and isinstance(tensor, DTensor) and is_laid_out_like(tensor, reference):
        return tensor._local_tensor if getattr(tensor, "window", None) is None else whole_of(tensor)
    whole, distribution = whole_of(tensor, reference), Distribution.of(reference)
    if distribution.is_whole or not whole.ndim:
        return whole
    if distribution.ragged is None:
        return distribution.cut(whole.expand(reference.shape))
    return distribution.cut(whole) if has_rows_of(whole, reference.shape) else whole


def has_rows_of(tensor: torch.Tensor, shape: torch.Size) -> bool:
    """Return whether a tensor has as many dimensions and rows as ``shape``."""
    return len(tensor.shape) == len(shape) > 0 and tensor.shape[0] == shape[0]


def wrapped(result: Any, template: PlacedTensor) -> Any:
    """Return ``result`` with its tensors wrapped as tensors with the rows of ``template``."""

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        # A compiler may return tensors of another class.
        if isinstance(tensor, DTensor):
            return tensor
        return template.with_whole(tensor) if template.is_whole else template.with_rows(tensor)

    return map_tensors(result, wrap)


def _first_placed(args: Sequence[Any], options: Options) -> PlacedTensor:
    return next(tensor for tensor in tensors_in(args, options) if isinstance(tensor, PlacedTensor))


def accurate(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results are summed: FP32 for 16-bit types, to avoid rounding on each rank."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def run_component(operator: Operator, args: Arguments, options: Options) -> Any:
    """Return the real or the imaginary part of each element. It shares the tensor's memory, as of plain tensors."""
    source = args[0] if args else None
    if not isinstance(source, PlacedTensor) or source.window is not None:
        return run_on_whole(operator, args, options)
    return source.with_local(operator.function(source._local_tensor))


# ---------------------------------------------------------------- casts and new tensors


def _local(item: Any) -> Any:
    return item._local_tensor if isinstance(item, DTensor) else item


def run_cast(operator: Operator, args: Arguments, options: Options) -> Any:
    """Change dtype or device of the local part. A second tensor argument only specifies them."""
    located, named = map_tensors(args, _local), {name: _local(item) for name, item in options.items()}
    source = args[0]
    if not isinstance(source, PlacedTensor):
        return operator.function(source, *located[1:], **named)
    local = source._local_tensor if source.window is None else source.whole()
    result = operator.function(local, *located[1:], **named)
    if result is local:
        return source
    return source.with_rows(result) if isinstance(result, torch.Tensor) else result


def run_factory(operator: Operator, args: Arguments, options: Options) -> Any:
    """Make a new tensor: with the first argument's rows if it has the same shape, otherwise replicated."""
    source, *rest = args
    if not isinstance(source, PlacedTensor):
        return operator.function(source, *map_tensors(rest, whole_of), **options)
    local = source._local_tensor
    if operator.name in ("new_zeros", "new_ones", "new_empty", "new_full"):
        size = options.get("size", rest[0] if rest and isinstance(rest[0], (tuple, list)) else rest)
        if tuple(size) == source.shape and source.window is None:
            fill = rest[1:] if operator.name == "new_full" and "size" not in options else ()
            options = {name: value for name, value in options.items() if name != "size"}
            made = source.with_rows(operator.function(local, tuple(local.shape), *fill, **options))
            made.is_unshared = True
            return made
    return source.with_whole(operator.function(local, *map_tensors(rest, whole_of), **options))


def run_random_like(operator: Operator, args: Arguments, options: Options) -> Any:
    """Draw the whole tensor on every rank, as for an unsharded tensor, and keep this rank's rows."""
    source = args[0] if args else None
    if not isinstance(source, PlacedTensor) or source.window is not None:
        return run_on_whole(operator, args, options)
    stand_in = torch.empty(source.shape, dtype=source.dtype, device=source._local_tensor.device)
    drawn = operator.function(stand_in, *args[1:], **options)
    return source.with_rows(source.distribution.cut(drawn).clone())


# ---------------------------------------------------------------- lists


def run_foreach(operator: Operator, args: Arguments, options: Options) -> Any:
    """Run a foreach function; each position uses the rows of its tensor in the first list."""
    references = first_list(args, options)
    if any(getattr(tensor, "window", None) is not None for tensor in references):
        return run_on_whole(operator, args, options)
    located = [_located(operator, index, item, references) for index, item in enumerate(args)]
    named = {name: _located(operator, -1, item, references) for name, item in options.items()}
    result = operator.function(*located, **named)
    if operator.is_in_place or result is None:
        return None if result is None else references
    placed = _first_placed(args, options)
    return type(result)(
        wrapped(one, reference if isinstance(reference, PlacedTensor) else placed)
        if isinstance(reference, DTensor)
        else one
        for reference, one in zip(references, result, strict=True)
    )


def first_list(args: Arguments, options: Options) -> Sequence[torch.Tensor]:
    """Return the first list of tensors of a foreach call."""
    return next(item for item in (*args, *options.values()) if isinstance(item, (list, tuple)))


def _located(operator: Operator, index: int, item: Any, references: Sequence[torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        return whole_of(item, references[0])
    if not isinstance(item, (list, tuple)) or not item or not isinstance(item[0], torch.Tensor):
        return item
    # Fused optimizers write into all lists except the gradients. Writes to a copy with other rows would be lost.
    must_match = operator.name.startswith("_fused_") and index >= 2
    return [
        # The case in every optimizer step; twenty times as fast as comparing the layouts.
        tensor._local_tensor
        if isinstance(tensor, PlacedTensor)
        and isinstance(reference, DTensor)
        and tensor._spec is reference._spec
        and tensor.window is None
        else _at_position(tensor, reference, must_match)
        for tensor, reference in zip(item, references, strict=True)
    ]


def _at_position(tensor: torch.Tensor, reference: torch.Tensor, must_match: bool) -> torch.Tensor:
    if not isinstance(reference, DTensor):
        return whole_of(tensor) if isinstance(tensor, DTensor) else tensor
    part = part_of(tensor, reference)
    if must_match and tensor.ndim and part is not _local(tensor):
        raise PlacementError(
            f"a fused optimizer got state of shape {tuple(tensor.shape)} that is not laid out like its parameter of "
            f"shape {tuple(reference.shape)}. fix: make state with torch.zeros_like(p), or use foreach=True"
        )
    return part


def run_unscale(operator: Operator, args: Arguments, options: Options) -> None:
    """Unscale gradients in place, and tell every rank whether any rank found a non-finite value."""
    gradients, found, *rest = args
    plain = [whole_of(item) if isinstance(item, torch.Tensor) else item for item in (found, *rest)]
    if any(isinstance(item, torch.Tensor) and item.device.type == "cpu" and item.is_pinned() for item in plain):
        # GradScaler copies the scale and the flag to offloaded gradients without waiting for the GPU, which may still
        # be computing them.
        torch.cuda.synchronize()
    operator.function([_local(item) for item in gradients], *plain, **options)
    spread = [Distribution.of(gradient) for gradient in gradients if isinstance(gradient, DTensor)]
    for distribution in {tuple(map(id, each.cutting_axes)): each for each in spread}.values():
        # The bits of 0 and 1 have their order, and integers cannot be NaN.
        distribution.all_reduce(plain[0].view(torch.int32), "max")
