"""ReadGuard: weights that were given back cannot be read by the backward of an operator that saved them.

Autograd compares the version of a saved tensor with the one that it had when it was saved, and refuses before it
computes. Released weights get a version that no operator has seen, gathered ones the version that they had before: a
backward that reaches them unannounced is an error of autograd's instead of a read of other memory, at the price of one
call for a unit's parameters (docs/design/order.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["RELEASED_VERSION", "ReadGuard"]

RELEASED_VERSION = 1_000_000_000
"""What autograd's message gives as the version of a weight that was released."""

_VERSION: Any = torch._C.TensorBase._version
_version = _VERSION.__get__
_plainly: Any = torch._C._disabled_torch_function_impl
_set_versions: Any = torch._C._autograd._unsafe_set_version_counter


class ReadGuard:
    """Allows and forbids the backwards of operators that saved any of some tensors, or views of them.

    Args:
        tensors: as operators see them. Of a DTensor the local part is guarded too.
    """

    __slots__ = ("_owners", "_released", "_tensors", "_versions")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        wrappers = [(index, tensor) for index, tensor in enumerate(tensors) if isinstance(tensor, DTensor)]
        self._owners: list[int] = [*range(len(tensors)), *(index for index, _ in wrappers)]
        self._tensors = (*tensors, *(tensor._local_tensor for _, tensor in wrappers))
        self._released = (RELEASED_VERSION,) * len(self._tensors)
        self._versions = self.current()

    def forbid(self, versions: tuple[int, ...] | None = None) -> None:
        """Make autograd refuse what was saved.

        Args:
            versions: what ``current`` returns now, where that is known.
        """
        self._versions = self.current() if versions is None else versions
        _set_versions(self._tensors, self._released)

    def allow(self) -> None:
        """Let autograd use again what was saved since the tensors were last changed in place."""
        _set_versions(self._tensors, self._versions)

    def current(self) -> tuple[int, ...]:
        """Return how often each tensor was changed in place, and after them the local parts of those that have one."""
        versions: tuple[int, ...] = _plainly(tuple, (), (map(_version, self._tensors),))
        return versions

    def index_of(self, position: int) -> int:
        """Return to which tensor a version in ``current`` belongs."""
        return self._owners[position]
