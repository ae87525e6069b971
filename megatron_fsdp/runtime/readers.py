"""Reader: by which the backward of an operator asks for the weights that it reads.

A loss may reach a unit by any tensor that its modules made, not by its outputs alone: an activation kept as an
attribute, an auxiliary loss, a list that a hook fills. Operators whose backward is Python ask for their unit's weights
themselves (docs/design/order.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron_fsdp.runtime.unit import Unit

__all__ = ["Reader", "mark_read", "reader_of"]

_ATTRIBUTE = "_fsdp_reader"


class Reader:
    """A unit, which it does not keep alive."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Unit) -> None:
        self._owner = weakref.ref(owner)

    def open_call(self) -> Any:
        """Return the call of the unit under way; None for none."""
        owner = self._owner()
        return None if owner is None else owner.open_call

    def before_reading(self, call: Any) -> None:
        """Have weights gathered, for the backward of something made in ``call``."""
        owner = self._owner()
        if owner is not None:
            owner.backward.before_reading(owner, call)

    def watch(self, output: Any) -> None:
        """Have weights gathered before backward goes through ``output``."""
        owner = self._owner()
        if owner is not None:
            owner.schedule.watch(owner, output)


def mark_read(weights: Iterable[torch.Tensor], owner: Unit) -> None:
    """Note whose weights some gathered parameters are."""
    reader = Reader(owner)
    for weight in weights:
        setattr(weight, _ATTRIBUTE, reader)


def reader_of(weight: torch.Tensor) -> Reader | None:
    """Return the reader of a gathered parameter; None of any other tensor, and where weights are never released."""
    return getattr(weight, _ATTRIBUTE, None)
