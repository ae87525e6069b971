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

__all__ = ["READER", "Reader", "mark_read"]

READER = "_fsdp_reader"
"""The attribute of a gathered parameter that holds its reader; where weights are never released, none has it."""


class Reader:
    """A unit, which it does not keep alive."""

    __slots__ = ("owner",)

    def __init__(self, owner: Unit) -> None:
        self.owner = weakref.ref(owner)

    def before_reading(self, call: Any) -> None:
        """Have weights gathered, for the backward of something made in ``call``."""
        owner = self.owner()
        if owner is not None and (call is None or not owner.is_in(call)):
            owner.backward.before_reading(owner, call)

    def watch(self, output: Any) -> None:
        """Have weights gathered before backward goes through ``output``."""
        owner = self.owner()
        if owner is not None:
            owner.schedule.watch(owner, output)


def mark_read(weights: Iterable[torch.Tensor], owner: Unit) -> None:
    """Note whose weights some gathered parameters are."""
    reader = Reader(owner)
    for weight in weights:
        setattr(weight, READER, reader)
