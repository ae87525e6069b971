"""Backwards that are refused by name: recorded ones, and those through weights that are not those of forward."""

from __future__ import annotations

from typing import NoReturn

import torch

from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.step.fsdp_params import WeightHandle
from megatron_fsdp.runtime.step.unit import Call

__all__ = ["refuse_backward", "refuse_reads"]


def refuse_backward(call: Call) -> None:
    """Refuse a backward that is itself recorded, and that of a call whose unit's weights changed after it.

    Asked where gradients are on, or an optimizer has stepped since.

    Raises:
        StateError: it is, or they did.
    """
    unit = call.unit
    if torch.is_grad_enabled():
        raise StateError(
            f"unit {unit.name!r}: backward with create_graph=True is not supported: the recorded graph would "
            "use released weights. Keep the module whose second derivatives are wanted unsharded."
        )
    for group in unit.groups:
        group.freshness.is_changed()
        if group.freshness.changed_at > call.moment:
            raise StateError(
                f"unit {unit.name!r}: an optimizer has stepped its weights ({next(iter(group.parameters))!r} or others "
                "of that group) between a forward and the backward through it: gradients would be of the old "
                "activations and the new weights. Call backward() before optimizer.step(), or run forward again after "
                "it."
            )


def refuse_reads(handle: WeightHandle) -> NoReturn:
    """Refuse a backward that reads a weight which was given back.

    Raises:
        StateError: always.
    """
    raise StateError(
        f"{handle.words}: backward reads it, and it was not gathered again because of set_unshard_in_backward(False). "
        "That is for look-ups and for what needs no gradient of its input; or keep the weights: "
        "set_reshard_after_forward(False) on the unit."
    )
