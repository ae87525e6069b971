"""PackedGradients: the buffers of one group's gradients, and what is known of them before any comes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from dbuffer import DBuffer, Partial, SlotPool
from dbuffer.placements import BufferPlacement
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.runtime.grads.fuse import offer_products
from megatron_fsdp.runtime.grads.last_reduction import LastReduction, OffloadedReduction, Wire
from megatron_fsdp.runtime.grads.shown_grads import ShownGrads
from megatron_fsdp.runtime.step.fsdp_params import FSDPParams
from megatron_fsdp.runtime.step.gradients import GradientBuffer
from megatron_fsdp.runtime.step.streams import turns

__all__ = ["PackedGradients"]


_GRAD: Any = torch._C.TensorBase.grad
_set_grad = _GRAD.__set__


class PackedGradients(GradientBuffer):
    """The buffers of the gradients of one parameter group.

    Args:
        main_weight: the group's main weights; gradients share its plan and mesh.
        fsdp_params: the parameters.

    Attributes:
        binding: ``main_grad``, and what the parameters show of it.
        packed: receives autograd's gradients; ``main_grad`` itself where they rest as whole partial sums
            (``rests_partial``), which are accumulated in place and reduced once, at the end.
        rests_final: whether each microbatch's reduction gives what the optimizer reads.
        reduction: the way from packed gradients to ``main_grad``. packs_late: a lane packs them (``LateGradients``).
        divisor: the sum over ranks is divided by it. wire_scale: what of that is done before the sum.
        pack_scale: what gradients are multiplied by where they are packed. takes_products: whether that is a power of
            two, so that a scaled product is rounded as an unscaled one.
        wide: sums of a wider dtype than is sent; None where they lie in ``packed``.
        backward: which backward left something here that is void if it raises, by the schedule's count.
        tickets: of reductions that nobody has waited for. last_tickets: of what is left to reduce once a step.
    """

    reduction: LastReduction
    wide: DBuffer | None = None
    _spec: GroupSpec

    def __init__(self, main_weight: DBuffer, spec: GroupSpec, fsdp_params: FSDPParams) -> None:
        self.unit, self.backward = "", 0
        self.tickets, self.last_tickets = [], []
        self._device = spec.compute_device
        self._spec, self._template, self._fsdp_params = spec, main_weight, fsdp_params
        self._begun = fsdp_params.begun
        self._make_buffers()
        self.divide_by(spec.divisor)
        self._views = [self.packed.get_local_tensor(index) for index in range(len(fsdp_params.sharded_params))]
        self._filled = bytearray(len(self._views))
        self._gaps = [self.packed.local_buffer[gap.start : gap.stop] for gap in self.packed.layout.padding()]
        self._turns = turns(self._device, fsdp_params.turn)
        self._let_wait()
        self._trained = self.binding.trained
        if self.rests_partial:
            self.binding.gaps = self._gaps
        else:
            self.packed.release_storage()
        self.reduction.release()
        self.binding.let_go()
        if spec.fuses_weight_gradients:
            is_wide = spec.fuses_weight_gradients == "wide"
            offer_products(fsdp_params.unsharded_params, self._views, self, is_wide=is_wide)

    def observe(self, unit: Any) -> None:
        """Report to the unit, which is referred to weakly."""
        self._observer = weakref.ref(unit)

    def _let_wait(self) -> None:
        self._wait_for(self._fsdp_params.waits)

    def _wait_for(self, waits: bytes | bytearray) -> None:
        """Leave gradients of these parameters (nonzero) where autograd leaves them until the unit is closed."""
        self._waits = waits
        self._waiting = [index for index, waits in enumerate(waits) if waits]
        self._waiting_params = [self._fsdp_params.unsharded_params[index] for index in self._waiting]
        self._waiting_views = [self._views[index] for index in self._waiting]

    def take_from(self, pool: SlotPool | None) -> None:
        """Take the memory of the packed buffer from the slots of a pool from now on, or from the allocator again."""
        if not self.rests_partial:
            self.packed.storage.use_pool(pool)

    def divide_by(self, divisor: float) -> None:
        """Divide sums by ``divisor``, partly before they are made.

        fp16 sums of many ranks overflow and fp16 averages underflow, so half of the division (in powers of two) is done
        before.
        """
        self.divisor = divisor
        half = 2.0 ** -(math.frexp(max(divisor, 1.0))[1] // 2)
        self.wire_scale = half if self.packed.dtype is torch.float16 else 1.0
        if self.reduction.wire is not None:
            # What rests was divided before.
            self.reduction.wire.scale = 1.0 / half if self.reduction.wire.whole.dtype is torch.float16 else 1.0
        self.pack_scale = 1.0 / divisor if self.rests_partial else self.wire_scale
        self.takes_products = math.frexp(self.pack_scale)[0] == 0.5

    def _make_buffers(self) -> None:
        spec, dtypes, placements = self._spec, self._spec.dtypes, self._spec.placements
        partial: tuple[BufferPlacement, ...] = (Partial("sum"),) * len(placements.gradient)
        self.rests_partial = placements.gradient == partial
        left = zip(self._template.axes, placements.gradient, placements.optimizer, strict=True)
        # Replicas of one rank, say: what a microbatch's reduction leaves here is final.
        is_alone = all(axis.size == 1 for axis, now, last in left if now != last)
        self.rests_final = is_alone and not self.rests_partial
        resting = placements.optimizer if self.rests_final else placements.gradient
        main_grad = self._buffer(resting, dtypes.main_grad, "main_grad", self._template.device)
        self.packed = reduced = final = main_grad
        if not self.rests_partial:
            self.packed = self._buffer(partial, dtypes.reduce, "packed gradients", self._device)
            if dtypes.accumulate is None:
                reduced = self.packed.slice_view(placements.gradient)
            else:
                reduced = self._buffer(placements.gradient, dtypes.accumulate, "reduced gradients", self._device)
                self.wide = reduced
        if resting != placements.optimizer:
            final = main_grad.slice_view(placements.optimizer)
        self._bind(ShownGrads(main_grad, final, self._fsdp_params, self._template.dtype))
        wire, sent = None, dtypes.accumulate or dtypes.reduce
        if not is_alone and (sent is not main_grad.dtype or main_grad.device != self._device):
            wire = Wire(main_grad, final, sent, self._device)
        make = OffloadedReduction if spec.is_offloaded else LastReduction
        self.reduction = make(self.packed, reduced, main_grad, final, wire)

    def _bind(self, binding: ShownGrads) -> None:
        # Memory of the host is plentiful, and pages that a GPU writes are slow to come by.
        self.binding, binding.keeps = binding, self._spec.is_offloaded

    def _buffer(
        self, placements: tuple[BufferPlacement, ...], dtype: torch.dtype, what: str, device: torch.device
    ) -> DBuffer:
        like, is_pinned = self._template, self._spec.is_pinned and device.type == "cpu"
        return DBuffer.from_plan(like.plan, like.mesh, placements, dtype, device, name=what, pin_memory=is_pinned)

    def buffers(self) -> Iterator[tuple[str, DBuffer]]:
        """Yield what lies where, each kind by its name in reports."""
        if self.packed is not self.main_grad:
            yield "packed gradients", self.packed
        if self.wide is not None:
            yield "reduced gradients", self.wide
        yield "main_grad", self.main_grad

    def rename(self, name: str) -> None:
        """Take another unit name, for messages."""
        self.unit, self.binding.name = name, f"unit {name!r}"
        self.packed.rename(f"unit {name!r}: packed gradients")
        self.main_grad.rename(f"unit {name!r}: main_grad")

    def keep(self, keeps: bool) -> None:
        """Have the memory of what comes with gradients all the time, or while there are any."""
        self.binding.keep(keeps)
        self.reduction.keep(keeps)

    # ------------------------------------------------------------------ sums that are given up

    def settle(self) -> None:
        """Throw away, before a backward, a sum under way whose ``.grad`` users have dropped; see ``settle_sum``."""
        if self.binding.settle_sum():
            self._empty()
            self.binding.end_sum(clears=False)

    def void(self, backward: int) -> None:
        """Let ``.grad`` refuse to be read until it is dropped, if a backward that has raised brought some of it."""
        if self.backward == backward and self.binding.is_under_way:
            self.binding.void()

    def abandon(self, backward: int) -> None:
        """Forget what a backward that raised left here; what earlier ones keep for the next stays."""
        self.void(backward)
        self._begun[0] = self._fsdp_params.begun_all[0] = False
        # Autograd may have been about to tell of any of them.
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._fsdp_params.unsharded_params:
                _set_grad(parameter, None)
        if self.backward == backward:
            self._empty()

    def discard(self) -> None:
        """Drop a sum under way, and ``.grad`` with it."""
        if self.binding.is_under_way:
            self._empty()
            self.binding.end_sum(clears=True)

    def _empty(self) -> None:
        for ticket in (*self.tickets, *self.last_tickets):
            ticket.give_up()
        self._filled = bytearray(len(self._views))
        if not self.rests_partial:
            self.packed.release_storage()
        self.reduction.discard()
        self.tickets.clear()
        self.last_tickets.clear()
        if self.binding.is_under_way:
            self.binding.empty()
