"""Tensors in nested arguments and outputs: containers, dataclasses, what PyTorch's pytree knows, plain objects."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["iterate_tensors", "map_tensors", "parts_of_dual"]

# Types whose values hold no tensors.
_PLAIN_VALUES = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}

# Classes and code, and modules, whose tensors are somebody else's.
_OPAQUE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, nn.Module)

_MAX_DEPTH = 8


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in a nested structure, in a fixed order; of objects of unknown classes, the attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        yield from _iterate(value, 0)


def _iterate(value: Any, depth: int) -> Iterator[torch.Tensor]:
    leaves, _ = tree_flatten(value)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif type(leaf) not in _PLAIN_VALUES and depth < _MAX_DEPTH:
            for member in _members_of(leaf):
                yield from _iterate(member, depth + 1)


def _members_of(value: Any) -> Iterable[Any]:
    """Return what a container, a dataclass or an object holds; nothing of what no tensor is looked for in."""
    # By their types: objects such as the configs of frameworks run Python when they are asked for ``__class__``.
    kind = type(value)
    if issubclass(kind, Mapping):
        return list(value.values())
    if issubclass(kind, list | tuple | set | frozenset | deque):
        return list(value)
    if issubclass(kind, _OPAQUE):
        return ()
    try:
        members = list(object.__getattribute__(value, "__dict__").values())
    except AttributeError:
        members = []
    return [*members, *(getattr(value, name, None) for name in _slots_of(kind))]  # type: ignore[arg-type]  # classes are hashable


@functools.cache
def _slots_of(kind: type) -> tuple[str, ...]:
    all_slots = (each.__dict__.get("__slots__", ()) for each in kind.__mro__)
    return tuple(name for slots in all_slots for name in ((slots,) if isinstance(slots, str) else slots))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return the structure with ``function`` applied to every tensor; the same object where nothing changed."""
    if isinstance(value, torch.Tensor):
        return function(value)
    leaves, structure = tree_flatten(value)
    mapped = [_map_leaf(function, leaf) for leaf in leaves]
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return value
    return tree_unflatten(mapped, structure)


def _map_leaf(function: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return function(leaf)
    if not _is_dataclass(leaf):
        return leaf
    changes = {}
    for field in dataclasses.fields(leaf):
        old = getattr(leaf, field.name)
        new = map_tensors(function, old)
        if new is not old and field.init:
            changes[field.name] = new
    return dataclasses.replace(leaf, **changes) if changes else leaf


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def parts_of_dual(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what autograd knows of a tensor of forward mode: its value without wrappers, and its tangent."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_gradtrackingtensor(tensor):
            tangent = forward_ad.unpack_dual(tensor).tangent
            if tangent is not None:
                yield from parts_of_dual(tangent)
        yield from parts_of_dual(torch._C._functorch.get_unwrapped(tensor))
        return
    dual = forward_ad.unpack_dual(tensor)
    yield tensor
    if dual.tangent is not None:
        yield dual.tangent
