"""SlotChoice: where the memory of gathered weights and packed gradients comes from."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SlotChoice"]


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """Where a unit's gathered weights and packed gradients come from.

    Attributes:
        sizing: of the slots, see ``SlotPool``; None: no slots, each buffer comes from the allocator and goes back.
        source: of the slots' memory: "device", "communicator" (its own allocator, where it has one), or the name of a
            backend of symmetric memory.
    """

    sizing: str | None = None
    source: str = "device"

    @classmethod
    def of_megatron(
        cls, *, double_buffer: bool, max_pool: bool, user_buffers: bool, is_symmetric: bool, device_type: str
    ) -> SlotChoice:
        """Return what Megatron's switches ask for.

        Args:
            double_buffer: ``fsdp_double_buffer``: units of equal size take turns in two slots; others have their own.
            max_pool: all units take turns in slots of the largest one's size. user_buffers: ``nccl_ub``, slots that
                NCCL has registered. Each of the two turns ``double_buffer`` on.
            is_symmetric: register them as symmetric windows. device_type: only GPUs have such memory.
        """
        if not (double_buffer or max_pool or user_buffers):
            return cls()
        has_registered = user_buffers and device_type == "cuda"
        source = ("NCCL" if is_symmetric else "communicator") if has_registered else "device"
        return cls("largest" if max_pool else "by_size", source)
