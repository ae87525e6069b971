"""Megatron's switches for buffers that stay, as slots."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from megatron_fsdp.module import units_below
from megatron_fsdp.pools import SlotChoice

__all__ = ["SlotFlags", "use_slots_of"]


class SlotFlags(Protocol):
    """The fields of ``FsdpConfig`` that decide."""

    @property
    def fsdp_double_buffer(self) -> bool:
        """Units of equal size take turns."""

    @property
    def megatron_fsdp_max_pool_double_buffer(self) -> bool:
        """All units take turns."""

    @property
    def nccl_ub(self) -> bool:
        """Buffers are registered with NCCL."""

    @property
    def disable_symmetric_registration(self) -> bool:
        """But not as symmetric memory."""


def use_slots_of(model: nn.Module, flags: SlotFlags) -> None:
    """Let the units below ``model`` take their memory from the slots that the flags ask for, if they do."""
    for unit in units_below(model):
        choice = SlotChoice.of_megatron(
            double_buffer=flags.fsdp_double_buffer,
            max_pool=flags.megatron_fsdp_max_pool_double_buffer,
            user_buffers=flags.nccl_ub,
            is_symmetric=not flags.disable_symmetric_registration,
            device_type=next((group.spec.device.type for group in unit.groups), "cpu"),
        )
        if choice.sizing is not None:
            unit.use_slots(choice)
