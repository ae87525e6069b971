"""SlotChoice: the source of the memory of gathered weights and packed gradients."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SlotChoice"]


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """The source of the memory of a unit's gathered weights and packed gradients.

    Attributes:
        sizing: how slots are sized, see ``SlotPool``; None: no slots, buffers are allocated and freed.
        source: where slots are allocated: "device", "communicator" (its own allocator, if it has one), or the name of a
            symmetric-memory backend.
    """

    sizing: str | None = None
    source: str = "device"

    @classmethod
    def of_megatron(
        cls, *, double_buffer: bool, max_pool: bool, user_buffers: bool, is_symmetric: bool, device_type: str
    ) -> SlotChoice:
        """Return the choice for Megatron's flags.

        Args:
            double_buffer: ``fsdp_double_buffer``: units of equal size share two slots; others have their own.
            max_pool: all units share slots of the largest unit's size; turns on ``double_buffer``. user_buffers:
                ``nccl_ub``: NCCL registers the slots; turns on ``double_buffer``.
            is_symmetric: register slots as symmetric windows. device_type: only "cuda" has registered memory.
        """
        if not (double_buffer or max_pool or user_buffers):
            return cls()
        has_registered = user_buffers and device_type == "cuda"
        source = ("NCCL" if is_symmetric else "communicator") if has_registered else "device"
        return cls("largest" if max_pool else "by_size", source)
