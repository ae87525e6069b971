"""Functions on whole tensors: gather, call, write back each rank's rows, and return replicated results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dbuffer.dtensor.distribution import Distribution
from dbuffer.dtensor.own_data import OwnData, own_data_of
from dbuffer.dtensor.placed_tensor import PlacedTensor, Window, whole_of, words_of
from dbuffer.errors import PlacementError

Arguments = tuple[Any, ...]
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Operator:
    """A PyTorch function, and how it runs on sharded tensors.

    Attributes:
        run: the handler. name: the function's name without the underscores of a dunder or an in-place function.
        is_in_place: it writes to its first argument. overwrites: it does so without reading the old values.
        is_differentiable: autograd may have to record it. is_element_wise: it works element by element.
    """

    function: Callable[..., Any]
    run: Callable[[Operator, Arguments, Options], Any]
    name: str
    is_in_place: bool = False
    overwrites: bool = False
    is_differentiable: bool = False
    is_element_wise: bool = False


def run_on_whole(operator: Operator, args: Arguments, options: Options) -> Any:
    """Call a function with every sharded tensor gathered. Correct for any PyTorch function, but it costs a gather.

    In-place changes are written back to each rank's rows. Results are replicated tensors. A view of a sharded tensor
    is returned as a window, and in-place functions write through it. If an operand is this rank's own data, results
    are plain (``own_data``).
    """
    operands = list(tensors_in(args, options))
    own = own_data_of(
        operands, is_in_place=operator.is_in_place, is_element_wise=operator.is_element_wise, is_recorded=False
    )
    gathered = _Gathered(operator, own, operands)
    plain_args = map_tensors(args, gathered.plain)
    plain_options = {name: map_tensors(value, gathered.plain) for name, value in options.items()}
    result = operator.function(*plain_args, **plain_options)
    gathered.write_back()
    return map_tensors(result, gathered.wrapped)


class _Gathered:
    """The gathered tensors of one call, the operands they stand for, and their results."""

    def __init__(self, operator: Operator, own: OwnData | None, operands: Sequence[torch.Tensor]) -> None:
        self._operator, self._own = operator, own
        self._beside = next((each for each in operands if isinstance(each, PlacedTensor)), None)
        # A random function need not gather what it overwrites, unless it reads it too, as in p.bernoulli_(p).
        self._overwrites = operator.overwrites and len(operands) == 1
        self._target = _root(operands[0]) if operator.is_in_place and not self._overwrites else None
        # Keyed by identity of the sharded tensor, with its version: two windows on one tensor share its gathered copy.
        self._wholes: dict[int, tuple[DTensor, torch.Tensor, int]] = {}
        self._stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._template: PlacedTensor | None = None

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole plain tensor to use for an operand."""
        if not isinstance(tensor, DTensor):
            plain = tensor if self._own is not None else whole_of(tensor, self._beside)
        else:
            window, root = getattr(tensor, "window", None), _root(tensor)
            if id(root) not in self._wholes:
                self._wholes[id(root)] = (root, *self._gathered(root, overwrites=self._overwrites and window is None))
            plain = self._wholes[id(root)][1]
            plain = plain if window is None else window.of(plain)
            if self._own is not None:
                plain = self._own.cast(tensor, plain)
        if isinstance(tensor, PlacedTensor) and self._template is None:
            self._template = tensor
        self._stand_ins[id(plain)] = (plain, tensor)
        return plain

    def _gathered(self, root: DTensor, *, overwrites: bool) -> tuple[torch.Tensor, int]:
        if isinstance(root, PlacedTensor) and root.is_whole:
            return root._local_tensor, -1
        # Tensors made in inference mode have no version counter.
        with torch.inference_mode(False):
            if overwrites and isinstance(root, PlacedTensor):
                whole = torch.empty(root.shape, dtype=root.dtype, device=root._local_tensor.device)
            else:
                whole = whole_of(root)
        return whole, whole._version

    def write_back(self) -> None:
        """Write in-place changes back to this rank's rows."""
        for root, whole, version in self._wholes.values():
            # Most writes change the version; those of ``apply_`` and ``map_`` do not.
            if whole is root._local_tensor or (whole._version == version and root is not self._target):
                continue
            with torch._C.DisableTorchFunctionSubclass():
                shape = root.shape
            if whole.shape != shape:
                raise PlacementError(
                    f"{self._operator.name} in place would change the shape of a sharded tensor from {tuple(shape)} to "
                    f"{tuple(whole.shape)}. fix: use the variant that returns a new tensor"
                )
            if self._own is not None:
                raise PlacementError(
                    f"{self._operator.name} would change {words_of(root)}, with data of this rank's own: ranks would "
                    "have different values. fix: call it with p.full_tensor(), which is a copy, and write back what "
                    "all ranks hold alike"
                )
            root._local_tensor.copy_(Distribution.of(root).cut(whole))

    def wrapped(self, result: torch.Tensor) -> torch.Tensor:
        """Return what the caller gets for one result tensor: an operand, a window, or a plain or replicated tensor."""
        if isinstance(result, DTensor):
            return result
        if id(result) in self._stand_ins:
            return self._stand_ins[id(result)][1]
        assert self._template is not None
        for root, whole, _ in self._wholes.values():
            if whole is not root._local_tensor and shares_memory(result, whole):
                return self._view(self._template, root, whole, result)
        if self._own is not None:
            return result
        return self._template.with_whole(result)

    def _view(self, template: PlacedTensor, root: DTensor, whole: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        if not isinstance(root, PlacedTensor) or view.dtype is not whole.dtype:
            raise PlacementError(
                f"{self._operator.name} would return a view of a sharded tensor with another dtype or with other "
                "elements. fix: take a copy, p.full_tensor(), and view that"
            )
        root.is_unshared = False
        # Cloned, because a small view would keep the whole tensor alive.
        result = template.with_whole(view if view.numel() == whole.numel() else view.clone())
        result.window = Window(root, view.shape, view.stride(), int(view.storage_offset()))
        return result


def _root(tensor: torch.Tensor) -> Any:
    """Return the tensor that a view with a window shows; any other tensor itself."""
    window = getattr(tensor, "window", None)
    return tensor if window is None else window.base


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share memory."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]  # the stub lacks it


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
