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
_set_versions: Any = torch._C._autograd._unsafe_set_version_counter


class ReadGuard:
    """Allows and forbids the backwards of operators that saved any of some tensors, or views of them.

    Args:
        tensors: as operators see them. Of a DTensor the local part is guarded too.
    """

    __slots__ = ("_released", "_tensors", "_versions")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        locals_ = [tensor._local_tensor for tensor in tensors if isinstance(tensor, DTensor)]
        self._tensors = (*tensors, *locals_)
        self._released = (RELEASED_VERSION,) * len(self._tensors)
        self._versions = self._current()

    def forbid(self) -> None:
        """Make autograd refuse what was saved."""
        self._versions = self._current()
        _set_versions(self._tensors, self._released)

    def allow(self) -> None:
        """Let autograd use again what was saved since the tensors were last changed in place."""
        _set_versions(self._tensors, self._versions)

    @property
    def versions(self) -> tuple[int, ...]:
        """How often each was changed in place, whether or not it is readable."""
        versions = self._current()
        return self._versions if versions == self._released else versions

    def _current(self) -> tuple[int, ...]:
        return tuple(map(_version, self._tensors))
