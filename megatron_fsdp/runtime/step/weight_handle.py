"""WeightHandle: what a gathered weight belongs to."""

from __future__ import annotations

import weakref
from typing import Any

import torch

__all__ = ["WeightHandle", "handle_of"]

_NOTHING: weakref.ref[Any] = weakref.ref(set())


class WeightHandle:
    """What a gathered weight belongs to; it keeps nothing alive.

    Attributes:
        group: its ``ParameterGroup``. parameter: its name within the unit.
        unit: the ``Unit`` that gathers it and releases it again; nothing where it is whole on every rank all the time.
        gradients: the ``GradientBuffer`` into which backward may multiply its gradient; nothing where it may not.
        index: of the parameter there.
    """

    __slots__ = ("gradients", "group", "index", "parameter", "unit")

    def __init__(self, group: weakref.ref[Any] = _NOTHING, parameter: str = "") -> None:
        self.group, self.parameter = group, parameter
        self.unit = self.gradients = _NOTHING
        self.index = 0

    @property
    def words(self) -> str:
        """The unit and the parameter."""
        group = self.group()
        return f"unit {'(deleted)' if group is None else group.name!r}: parameter {self.parameter!r}"


def handle_of(weight: torch.Tensor) -> WeightHandle:
    """Return the handle of a gathered weight, which gets one if it has none."""
    handle: WeightHandle | None = getattr(weight, "_fsdp_handle", None)
    if handle is None:
        handle = weight._fsdp_handle = WeightHandle()  # type: ignore[attr-defined]  # an attribute of its own
    return handle
