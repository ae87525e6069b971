"""Names of parameters and gradients, for errors of operators on sharded tensors (``dbuffer.dtensor.reads``)."""

from __future__ import annotations

import torch

from megatron_fsdp.engine.param_group import group_of_parameter

__all__ = ["name_of"]


def name_of(tensor: torch.Tensor) -> str | None:
    """Return unit and name of a sharded parameter or of the owner of a gradient; None for other tensors."""
    parameter: torch.Tensor | None = tensor
    words = ""
    reference = getattr(tensor, "gradient_of", None)
    if reference is not None:
        parameter, words = reference(), "the gradient of "
    group = None if parameter is None else group_of_parameter(parameter)
    if group is None:
        return None
    # `is`, because == on parameters would run an operator.
    name = next((name for name, each in group.parameters.items() if each is parameter), "a parameter")
    return f"{words}{name!r} of unit {group.name!r}"
