"""A backward through weights that an optimizer has stepped since the forward, which a plain model refuses, too."""

from __future__ import annotations

from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.step.unit import Call

__all__ = ["refuse_stepped"]


def refuse_stepped(call: Call) -> None:
    """Refuse the backward of a call whose unit's weights changed after it; asked where an optimizer has stepped since.

    Raises:
        StateError: they did.
    """
    unit = call.unit
    for group in unit.groups:
        if group.freshness.has_changed_since(call.moment):
            raise StateError(
                f"unit {unit.name!r}: an optimizer has stepped its weights ({next(iter(group.parameters))!r} or others "
                "of that group) between a forward and the backward through it: gradients would be of the old "
                "activations and the new weights. Call backward() before optimizer.step(), or run forward again after "
                "it."
            )
