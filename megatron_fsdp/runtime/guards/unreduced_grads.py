"""What users do to ``.grad`` while it is a sum that is not reduced: zero it, drop it, read it, add to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.step.fsdp_params import grads_of
from megatron_fsdp.runtime.step.grad_state import GradState
from megatron_fsdp.runtime.weights.param_layout import own_rows

if TYPE_CHECKING:
    from megatron_fsdp.runtime.step.grad_binding import GradBinding

__all__ = ["adopt_direct", "describe", "has_had", "settle_sum"]


def settle_sum(binding: GradBinding) -> list[int] | None:
    """Take notice, before a backward, of what users did to ``.grad`` while a sum was under way.

    Returns:
        The parameters whose sum they threw away; None where that of every one.
    Raises:
        StateError: a backward has raised, and ``.grad`` was not dropped since.
    """
    if not binding.is_under_way:
        return []
    sums, dropped = binding.pending(), []
    for index, (gradient, is_wanted) in enumerate(zip(grads_of(binding.parameters), binding.wanted, strict=True)):
        pending = sums.sum_of(index, gradient)
        if pending is None:
            sums[index].forget()
        if is_wanted and (pending is None or pending.is_zeroed):
            dropped.append(index)
    if len(dropped) == sum(binding.wanted):
        return None
    if binding.is_void:
        raise StateError(describe(binding, next(i for i, one in enumerate(binding.wanted) if one and i not in dropped)))
    for index in dropped:
        _drop_one(binding, index)
    return dropped


def _drop_one(binding: GradBinding, index: int) -> None:
    binding.had[index] = has_had(binding, index, grads_of(binding.parameters)[index])
    binding.wanted[index] = binding.missing[index] = binding.trained[index]
    if binding.state is GradState.PARTIAL:
        binding.main_grad.get_local_tensor(index).zero_()
    if binding.carry is not None:
        binding.final.layout.piece(index, binding.carry).zero_()


def adopt_direct(binding: GradBinding, shown: Sequence[torch.Tensor | None]) -> None:
    """Take what lies in ``.grad`` beside a sum as something to add to it in the end."""
    sums = binding.pending()
    for index, gradient in enumerate(shown):
        pending = sums.sum_of(index, gradient)
        if pending is not None:
            if pending.is_added:
                binding.missing[index] = 0
            pending.is_zeroed = False
        elif gradient is not None:
            sums[index].add(own_rows(binding.fsdp_params, index, gradient))
            binding.wanted[index] = binding.had[index] = 1


def describe(binding: GradBinding, index: int) -> str:
    """Return the words of the error for who reads the ``.grad`` of a parameter while it is such a sum."""
    name = f"{binding.name}: the gradient of parameter {binding.fsdp_params.owned[index].name!r}"
    if binding.is_void:
        return (
            f"{name} is incomplete, because the last backward raised. Drop it, with what was accumulated before: "
            "call zero_grad() of the optimizer or the model, or model.reset_iter_state()."
        )
    return (
        f"{name} is a sum under way, not reduced over all ranks yet. Run the last microbatch outside of no_sync() "
        "and of microbatch(model, False), and call finalize_backward() if that is manual, before .grad is read or "
        "an optimizer steps; after a backward that raised call zero_grad() first."
    )


def has_had(binding: GradBinding, index: int, shown: torch.Tensor | None) -> bool:
    """Whether a plain model would have a gradient beside the one that is summed up next."""
    if binding.sums is None or binding.sums.sum_of(index, shown) is None:
        return shown is not None
    # Of a sum that was set to zero: a sum of nothing is none still.
    return bool(binding.had[index] or not binding.missing[index])
