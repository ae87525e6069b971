"""LanePacker: casts gradients into the packed buffer on the reduce lane, and not on the compute stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.engine.params import FSDPParams
from megatron_fsdp.engine.streams import Ticket, turns

__all__ = ["LanePacker", "should_pack_on_lane"]


class LanePacker:
    """Casts the gradients of one group into the packed buffer on the lane that reduces it.

    With bf16 gradients and FP32 reduction, two FP32 packed buffers (one reduced while backward fills the other) would
    take more memory than FSDP2 does. With a packer, gradients stay in autograd's memory until their unit is closed.
    The lane allocates and releases the packed buffer, so the memory of the last reduction serves the next one
    (docs/design/order.md, "Streams").

    Attributes:
        is_due: the group is closed, and ``pack_on_lane`` has not submitted it yet.
        tickets: submitted packings. lent: autograd's gradients that the lane reads.
    """

    def __init__(self) -> None:
        self.is_due = False
        self.tickets: list[Ticket] = []
        self.lent: Sequence[torch.Tensor] = ()

    def take_back(self) -> None:
        """Make the compute stream wait for the packing, and release autograd's gradients."""
        for ticket in self.tickets if self.lent else ():
            ticket.wait()
        self.lent = ()

    def release_lent(self) -> None:
        """Release gradients and tickets after the compute stream has waited for the reduction."""
        self.lent = ()
        self.tickets.clear()

    def cancel(self) -> None:
        """Cancel packings that were submitted or are due."""
        for ticket in self.tickets:
            ticket.cancel()
        self.is_due = False
        self.release_lent()


def should_pack_on_lane(spec: GroupSpec, params: FSDPParams) -> bool:
    """Return True if a lane should pack gradients: on a device with streams, if packing casts to a wider dtype."""
    return (
        turns(spec.compute_device) is not None
        and spec.dtypes.reduce.itemsize > params.unsharded_params[0].itemsize
        and spec.fuses_weight_gradients != "wide"
        and not params.has_tensor_parallel
    )
