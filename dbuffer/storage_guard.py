"""A guard for debugging and tests: every operator that touches released storage raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dbuffer.errors import StorageError
from dbuffer.storage import KNOWN, FlatStorage

# They read no data and no storage size.
_HARMLESS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _has_plain_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no wrapper around others."""
    return bool(type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__)


Refuse = Callable[[Any, torch.Tensor, FlatStorage], None]
"""Called with an operator, the tensor that it was called on, and the released storage in which that lies."""


def _refuse(func: Any, _: torch.Tensor, owner: FlatStorage) -> None:
    raise StorageError(f"{owner.name}: {func} was called on a view of it after its storage was released")


class _ReleasedStorageGuard(TorchDispatchMode):
    def __init__(self, refuse: Refuse) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._refuse = refuse

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            for leaf in tree_iter((args, kwargs or {})):
                if isinstance(leaf, torch.Tensor) and _has_plain_storage(leaf) and leaf.numel():
                    owner = KNOWN.get(leaf.untyped_storage()._cdata)
                    if owner is not None and not owner.is_allocated:
                        self._refuse(func, leaf, owner)
        return func(*args, **(kwargs or {}))


@contextmanager
def guard_released_storage(refuse: Refuse = _refuse) -> Iterator[None]:
    """Check every operator in the block and raise ``StorageError`` where one touches released storage.

    A view of released memory that was kept somewhere (a captured weight, a tensor saved for backward) ends in a crash
    on CPU and in an illegal address on a GPU. With this guard it is an error that names the owner; it costs a Python
    call per operator. ``refuse`` is called in place of raising that error.
    """
    with _ReleasedStorageGuard(refuse):
        yield
