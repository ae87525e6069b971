"""Tensors in nested arguments and outputs: what PyTorch's pytree knows, mappings and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["iterate_tensors", "map_tensors", "parts_of_dual"]

_MAX_DEPTH = 8


_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


def iterate_tensors(value: Any, depth: int = 0, opaque: list[Any] | None = None) -> Iterator[torch.Tensor]:
    """Yield every tensor in a nested structure, in a fixed order.

    Args:
        opaque: gets the objects in it that may hold tensors in a way that is not known here.
    """
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth < _MAX_DEPTH:
            # By their types: objects such as the configs of frameworks run Python when asked for ``__class__``.
            names = getattr(type(leaf), "__dataclass_fields__", ())
            others = leaf.values() if issubclass(type(leaf), Mapping) else ()
            for member in (*others, *(getattr(leaf, name, None) for name in names)):
                yield from iterate_tensors(member, depth + 1, opaque)
            if opaque is not None and not names and type(leaf) not in _ATOMS:
                opaque.append(leaf)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return the structure with ``function`` applied to every tensor; the same object where nothing changed."""
    leaves, structure = tree_flatten(value)
    mapped = [_map_leaf(function, leaf) for leaf in leaves]
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return value
    return tree_unflatten(mapped, structure)


def _map_leaf(function: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return function(leaf)
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if field.init}
    mapped = {name: map_tensors(function, old) for name, old in fields.items()}
    changes = {name: new for name, new in mapped.items() if new is not fields[name]}
    return dataclasses.replace(leaf, **changes) if changes else leaf


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
