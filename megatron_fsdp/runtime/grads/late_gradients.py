"""LateGradients: gradients that a lane casts into its packed buffer, while compute goes on.

Where sums are of a wider dtype than gradients, two packed buffers, one that is reduced behind the backward that fills
the other, would hold more than FSDP2 does. So gradients stay autograd's until their unit is closed, and the packed
buffer is the lane's: it takes the memory when the one before is reduced, without a word to compute
(docs/design/order.md, "Streams").
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dbuffer import DBuffer, SlotPool
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.runtime.grads.packed_gradients import PackedGradients
from megatron_fsdp.runtime.step.backward import Backward
from megatron_fsdp.runtime.step.fsdp_params import FSDPParams, grads_of
from megatron_fsdp.runtime.step.gradients import GradientBuffer
from megatron_fsdp.runtime.step.lanes import Ticket, lane
from megatron_fsdp.runtime.step.streams import turns

__all__ = ["LateGradients", "packs_late"]

# Whose gradients a lane still reads, by the backward that brought them, oldest first.
_LENDERS: weakref.WeakKeyDictionary[Backward, list[weakref.ref[LateGradients]]] = weakref.WeakKeyDictionary()


def packs_late(spec: GroupSpec, params: FSDPParams) -> bool:
    """Whether a lane is to pack gradients: on a device with streams, where packing casts them."""
    return (
        turns(spec.compute_device) is not None
        and spec.dtypes.reduce.itemsize > params.unsharded_params[0].itemsize
        and spec.fuses_weight_gradients != "wide"
        and not params.has_splits
    )


def _pack(buffers: Sequence[LateGradients], _: list[dist.Work] | None) -> None:
    for buffer in buffers:
        buffer._pack_on_lane()


class LateGradients(PackedGradients):
    """The gradients of one parameter group, packed on the lane that reduces them."""

    def __init__(self, main_weight: DBuffer, spec: GroupSpec, fsdp_params: FSDPParams) -> None:
        # Autograd's gradients that the lane reads, and its tickets for that.
        self._lent: Sequence[torch.Tensor] = ()
        self._packings: list[Ticket] = []
        super().__init__(main_weight, spec, fsdp_params)

    def _let_wait(self) -> None:
        super()._let_wait()
        # Slots are few, or NCCL's own: whoever asks for them has their number in mind.
        self.packs_late = not self.rests_partial and not self.packed.storage.takes_slots
        if self.packs_late:
            self._wait_for(bytes([1]) * len(self._waits))

    def take_from(self, pool: SlotPool | None) -> None:
        """Take the memory of the packed buffer from slots, into which each gradient goes at once; None: as it was."""
        super().take_from(pool)
        self._let_wait()

    def _pack_waiting(self) -> None:
        if self._begun[0] and not self.packed.is_allocated:
            # Another stream has the next turn, or the next microbatch is to add to these.
            self._take_packed()
        super()._pack_waiting()

    def close(self, *, reduce: bool) -> bool:
        """End this backward's part of the group, as ``GradientBuffer.close`` does; the lane packs."""
        self._fsdp_params.begun_all[0] = False
        if not reduce or not self.packs_late or self.packed.is_allocated:
            return super().close(reduce=reduce)
        if not self._begun[0] and not self._begin():
            return False
        self.is_to_pack = True
        return True

    @staticmethod
    def pack(buffers: Sequence[GradientBuffer]) -> None:
        """Let the lane pack, in one submission, the gradients of those closed buffers of a unit that it is to pack."""
        late = [buffer for buffer in buffers if isinstance(buffer, LateGradients) and buffer.is_to_pack]
        observer = late[0]._observer()
        # After all that any stream of compute has brought, so nobody takes a turn.
        lane("reduce", late[0]._device).submit(
            functools.partial(_pack, late),
            owner=0 if observer is None else id(observer),
            tickets=[buffer._packings for buffer in late],
        )
        for buffer in late:
            if observer is not None:
                _LENDERS.setdefault(observer.backward, []).append(weakref.ref(buffer))

    def _take_packed(self) -> None:
        self.packed.reallocate_storage()
        for gap in self._gaps:
            gap.zero_()

    def _pack_on_lane(self) -> None:
        self.is_to_pack = False
        self._take_packed()
        self._lent = [gradient for gradient in grads_of(self._waiting_params) if gradient is not None]
        super()._pack_waiting()
        self._fill_up()
        self._begun[0], self._filled = False, bytearray(len(self._views))

    def _prepare(self) -> None:
        super()._prepare()
        # Where it was allocated, and is allocated next: on the lane.
        self.reduction.frees_packed = bool(self._packings)

    def _begin(self, *, has_come: bool = False) -> bool:
        if not super()._begin(has_come=has_come):
            return False
        observer = self._observer()
        # One unit's gradients and one wide buffer take what two narrow ones do.
        lenders = _LENDERS.setdefault(observer.backward, []) if observer is not None else []
        while observer is not None and len(lenders) > max(observer.backward.max_packed_buffers - 2, 0):
            lender = lenders.pop(0)()
            if lender is not None:
                lender.take_back()
        self._fsdp_params.begun_all[0] = has_come and self.packs_late
        return True

    def take_back(self) -> None:
        """Make compute come after the packing, and give back what autograd left for it."""
        for ticket in self._packings if self._lent else ():
            ticket.wait()
        self._lent = ()

    def wait(self) -> None:
        """Make compute wait for the reduction, and with it for the packing."""
        super().wait()
        self._lent = ()
        self._packings.clear()

    def _empty(self) -> None:
        for ticket in self._packings:
            ticket.give_up()
        self.is_to_pack = False
        self._lent = ()
        self._packings.clear()
        super()._empty()
