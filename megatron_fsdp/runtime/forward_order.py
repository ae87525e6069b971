"""ForwardOrder: the way that forward took through the units, and what it says about the next one to be needed."""

from __future__ import annotations

import weakref

from megatron_fsdp.runtime.unit import Unit

__all__ = ["ForwardOrder"]

_MAX_LENGTH = 65_536


class ForwardOrder:
    """Records each forward pass and replays the last one as a prediction.

    A pass that takes another way than the last one is met by gathers on demand, and becomes the next prediction.
    """

    def __init__(self) -> None:
        self._recorded: list[weakref.ref[Unit]] = []
        self._expected: list[weakref.ref[Unit]] = []
        self._cursor = 0

    def start_pass(self) -> None:
        """A pass begins; what was recorded since the last one is the prediction now."""
        self._expected, self._recorded, self._cursor = self._recorded or self._expected, [], 0

    def visit(self, unit: Unit) -> None:
        """Record that a unit runs, and find it in the prediction."""
        if len(self._recorded) < _MAX_LENGTH:
            self._recorded.append(unit.reference)
        # A unit that is not where it was last time moves the cursor to the end.
        while self._cursor < len(self._expected) and self._expected[self._cursor]() is not unit:
            self._cursor += 1
        self._cursor += 1

    def following(self) -> Unit | None:
        """Return the unit with parameters that is expected after the one last visited, None where it is not known."""
        for reference in self._expected[self._cursor : self._cursor + 2]:
            unit = reference()
            if unit is not None and unit.groups:
                return unit
        return None
