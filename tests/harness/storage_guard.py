"""Every operator that touches released storage raises: a view that was kept somewhere would end the process."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dbuffer.errors import StorageError
from dbuffer.storage import KNOWN

__all__ = ["guard_released_storage"]

# Operators that read neither data nor the storage size.
_HARMLESS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class _Guard(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            for leaf in tree_leaves((args, kwargs or {})):
                if isinstance(leaf, torch.Tensor) and _has_plain_storage(leaf) and leaf.numel():
                    owner = KNOWN.get(leaf.untyped_storage()._cdata)
                    if owner is not None and not owner.is_allocated:
                        raise StorageError(f"{owner.name}: {func} was called on a view of it after its release")
        return func(*args, **(kwargs or {}))


def guard_released_storage() -> AbstractContextManager[Any]:
    """Raise ``StorageError`` with the owner's name in the block where an operator touches its released storage."""
    return _Guard()  # type: ignore[no-untyped-call]  # torch leaves it unannotated


def _has_plain_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is not a wrapper subclass."""
    return bool(type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__)
