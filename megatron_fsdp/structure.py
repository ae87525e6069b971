"""Tensors in nested arguments and outputs: tuples, lists, dicts, dataclasses, and what PyTorch's pytree knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["iterate_tensors", "map_tensors"]


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in a nested structure, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    leaves, _ = tree_flatten(value)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif _is_dataclass(leaf):
            for field in dataclasses.fields(leaf):
                yield from iterate_tensors(getattr(leaf, field.name))


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
