"""Functions on whole tensors: gather, call, write each rank's rows back, and hand out results that all ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dbuffer.dtensor.distribution import Distribution
from dbuffer.dtensor.op_table import Kind, Operator
from dbuffer.dtensor.placed_tensor import PlacedTensor, Window, whole_of
from dbuffer.errors import PlacementError

__all__ = ["map_tensors", "run_on_whole", "run_random_like", "run_view", "tensors_in"]

Arguments = tuple[Any, ...]
Options = Mapping[str, Any]


def run_on_whole(operator: Operator, args: Arguments, options: Options) -> Any:
    """Call a function with every tensor whole; right for whatever PyTorch has, at the price of gathering.

    What the function changes in place is written back into this rank's rows. Results are tensors that all ranks hold;
    a view of a sharded tensor is a window, through which in-place functions write.
    """
    gathered = _Gathered(operator)
    plain_args = map_tensors(args, gathered.plain)
    plain_options = {name: map_tensors(value, gathered.plain) for name, value in options.items()}
    result = operator.function(*plain_args, **plain_options)
    gathered.write_back()
    return map_tensors(result, gathered.wrapped)


class _Gathered:
    """The whole tensors of one call, which tensors they stand for, and what became of them."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        # By identity of the sharded tensor: two windows onto one tensor must see the same memory.
        self._wholes: dict[int, tuple[DTensor, torch.Tensor, int]] = {}
        self._stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._template: PlacedTensor | None = None

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole plain tensor that stands for an operand."""
        if isinstance(tensor, PlacedTensor) and self._template is None:
            self._template = tensor
            overwrites = self._operator.kind is Kind.RANDOM and tensor.window is None
            plain = self._of(tensor, overwrites=overwrites)
        else:
            plain = self._of(tensor, overwrites=False)
        self._stand_ins[id(plain)] = (plain, tensor)
        return plain

    def _of(self, tensor: torch.Tensor, *, overwrites: bool) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return whole_of(tensor)
        window = getattr(tensor, "window", None)
        if window is None and isinstance(tensor, PlacedTensor) and tensor.is_whole:
            self._wholes[id(tensor)] = (tensor, tensor._local_tensor, -1)
            return tensor._local_tensor
        root = tensor if window is None else window.base
        if id(root) not in self._wholes:
            if overwrites and isinstance(root, PlacedTensor):
                whole = torch.empty(root.shape, dtype=root.dtype, device=root._local_tensor.device)
            else:
                # What inference mode makes counts no changes.
                with torch.inference_mode(False):
                    whole = whole_of(root)
            self._wholes[id(root)] = (root, whole, whole._version)
        whole = self._wholes[id(root)][1]
        return whole if window is None else window.of(whole)

    def write_back(self) -> None:
        """Take over what was changed in place."""
        for root, whole, version in self._wholes.values():
            if whole is root._local_tensor or whole._version == version:
                continue
            if whole.shape != _shape(root):
                raise PlacementError(
                    f"{self._operator.name} in place would change the shape of a sharded tensor from "
                    f"{tuple(_shape(root))} to {tuple(whole.shape)}; use the variant that returns a new tensor"
                )
            root._local_tensor.copy_(Distribution.of(root).cut(whole))

    def wrapped(self, result: torch.Tensor) -> torch.Tensor:
        """Return what the caller gets for one resulting tensor."""
        if isinstance(result, DTensor):
            return result
        if id(result) in self._stand_ins:
            return self._stand_ins[id(result)][1]
        assert self._template is not None
        for root, whole, _ in self._wholes.values():
            if _shares_memory(result, whole):
                return self._view(root, whole, result)
        return self._template.with_whole(result)

    def _view(self, root: DTensor, whole: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        assert self._template is not None
        if whole is root._local_tensor:
            return self._template.with_whole(view)
        if not isinstance(root, PlacedTensor) or view.dtype is not whole.dtype:
            raise PlacementError(
                f"{self._operator.name} would return a view with other elements or another dtype of a tensor that is "
                "sharded; take a copy, p.full_tensor(), and view that"
            )
        # A small view must not keep the whole tensor alive.
        kept = view if view.numel() == whole.numel() else view.clone()
        result = self._template.with_whole(kept)
        result.window = Window(root, view.shape, view.stride(), view.storage_offset())  # type: ignore[arg-type]  # torch's stub
        return result


def _shape(tensor: DTensor) -> torch.Size:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.shape


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]  # the stub lacks it


def run_random_like(operator: Operator, args: Arguments, options: Options) -> Any:
    """Draw the whole tensor on every rank, like a tensor that is not sharded, and keep this rank's rows."""
    source = next(tensors_in(args, options))
    if not isinstance(source, PlacedTensor) or source.window is not None:
        return run_on_whole(operator, args, options)
    stand_in = torch.empty(source.shape, dtype=source.dtype, device=source._local_tensor.device)
    drawn = operator.function(
        *map_tensors(args, lambda _: stand_in),
        **{name: map_tensors(value, lambda _: stand_in) for name, value in options.items()},
    )
    return source.with_rows(source.distribution.cut(drawn).clone())


# ---------------------------------------------------------------- views


def run_view(operator: Operator, args: Arguments, options: Options) -> Any:
    """Return a view of this rank's rows where each of its rows lies within a row of the tensor, else of the whole."""
    source = args[0] if args else None
    if not isinstance(source, PlacedTensor) or source.window is not None or source.distribution.ragged is None:
        return run_on_whole(operator, args, options)
    if source.is_unshared:
        source.is_unshared = False
    try:
        shown = operator.function(*map_tensors(args, _geometry), **options)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        # Whatever is wrong, or has no answer without values, comes to light on the whole tensor.
        return run_on_whole(operator, args, options)
    views = [_rows_in_view(source, view) for view in tensors_in((shown,), {})]
    if any(view is None for view in views):
        return run_on_whole(operator, args, options)
    remaining = iter(views)
    return map_tensors(shown, lambda _: next(remaining))


def _geometry(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without data that has the global shape and stride of another."""
    if not isinstance(tensor, DTensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    meta = tensor._spec.tensor_meta
    assert meta is not None
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def _rows_in_view(source: PlacedTensor, view: torch.Tensor) -> PlacedTensor | None:
    """Return a view of this rank's rows with the geometry of ``view``, a view of the whole; None if there is none."""
    meta = source._spec.tensor_meta
    assert meta is not None
    if view._base is None or view.dtype is not meta.dtype or view.ndim == 0 or not meta.shape.numel():
        return None
    step = meta.stride[0]
    first, inner = divmod(view.storage_offset(), step)  # type: ignore[operator]  # torch's stub
    reach = inner + sum((size - 1) * stride for size, stride in zip(view.shape[1:], view.stride()[1:], strict=True))
    is_by_rows = view.stride(0) == step or view.shape[0] == 1
    if not view.numel() or not is_by_rows or reach >= step or first + view.shape[0] > meta.shape[0]:
        return None
    rows, local = source.distribution.rows, source._local_tensor
    start, stop = (min(max(row, rows.start), rows.stop) for row in (first, first + view.shape[0]))
    size, stride = torch.Size((stop - start, *view.shape[1:])), (step, *view.stride()[1:])
    if stop == start:
        part = local.new_empty(size)
    else:
        part = local.as_strided(size, stride, local.storage_offset() + (start - rows.start) * step + inner)
    return source.with_slice(part, first, view.shape, stride)


# ---------------------------------------------------------------- arguments


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``value``, which may be nested tuples, lists and dictionaries, with every tensor replaced."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        if type(value) is tuple:
            return tuple(items)
        # Named results: torch.return_types takes one iterable, a NamedTuple the items.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: map_tensors(item, change) for name, item in value.items()}
    return value


def tensors_in(args: Sequence[Any], options: Options) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, one level of lists and tuples deep."""
    for value in (*args, *options.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, torch.Tensor))
