"""The way of one group's gradients in a backward: received, packed, reduced, folded into ``main_grad``."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dbuffer import DBuffer, Partial, SlotPool
from dbuffer.events import listeners, tell
from dbuffer.placements import BufferPlacement
from dbuffer_kernels import accumulate
from dbuffer_kernels.products import add_product
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.engine.accumulation import GradBinding, GradState
from megatron_fsdp.engine.fused_linear import offer_products
from megatron_fsdp.engine.params import FSDPParams
from megatron_fsdp.engine.passes import clear_grads, grads_of
from megatron_fsdp.engine.reduce import OffloadedReduction, Reduction, Wire, fold, fold_on_host, start_reductions
from megatron_fsdp.engine.streams import Ticket, lane, turns

__all__ = ["GradientBuffer", "GradientListener", "LateGradients", "packs_late"]

# Looked up for every gradient.
_BASE: Any = torch._C.TensorBase
_get_grad, _set_grad, _get_layout = _BASE.grad.__get__, _BASE.grad.__set__, _BASE.layout.__get__
_STRIDED = torch.strided


class GradientListener(Protocol):
    """What gradient buffers tell the backward of their unit: ``backward.GradientsOfUnit``, which lies above this file.

    Attributes:
        owner: as in ``Lane.submit``.
    """

    owner: int

    def count_gradients(self) -> None:
        """A parameter was frozen."""

    def begin_gradients(self, *, packs: bool, has_come: bool) -> int:
        """Gradients begin to come, or zeros stand for them; return the number of the backward."""

    def lend(self, buffer: LateGradients) -> None:
        """A lane reads gradients of autograd's that ``buffer`` holds."""

    def take_back_lent(self) -> None:
        """Gradients are about to wait: make room for them."""


class GradientBuffer:
    """The gradients of one parameter group in a backward, and the buffers that they lie in.

    Args:
        main_weight: the group's main weights; gradients share its plan and mesh.
        fsdp_params: the parameters.

    Attributes:
        binding: ``main_grad``, and what the parameters show of it.
        packed: receives autograd's gradients; ``main_grad`` itself where they rest as whole partial sums
            (``rests_partial``), which are accumulated in place and reduced once, at the end.
        rests_final: whether each microbatch's reduction gives what the optimizer reads.
        reduction: the way from packed gradients to ``main_grad``.
        packs_late: a lane packs them (``LateGradients``). is_to_pack: which is still to be asked of it.
        divisor: the sum over ranks is divided by it. wire_scale: what of that is done before the sum.
        pack_scale: what gradients are multiplied by where they are packed. takes_products: whether that is a power of
            two, so that a scaled product is rounded as an unscaled one.
        wide: sums of a wider dtype than is sent; None where they lie in ``packed``.
        backward: which backward left something here that is void if it raises, by the schedule's count.
        listener: is told when gradients begin to come; None for nobody.
        tickets: of reductions that nobody has waited for. last_tickets: of what is left to reduce once a step.
    """

    binding: GradBinding
    reduction: Reduction
    packed: DBuffer
    wide: DBuffer | None = None
    rests_partial: bool
    rests_final: bool
    divisor: float
    wire_scale: float
    pack_scale: float
    takes_products: bool
    packs_late = is_to_pack = False
    _copies = False
    # Which gradients count: those of trained parameters, or none (``weigh``).
    _packs: bytes | bytearray
    _own_scale: float
    _weight = 1.0
    # Gradients that stay where autograd leaves them until the unit is closed.
    _waits: bytes | bytearray
    _waiting: list[int]
    _waiting_params: list[torch.nn.Parameter]
    _waiting_views: list[torch.Tensor]

    def __init__(self, main_weight: DBuffer, spec: GroupSpec, fsdp_params: FSDPParams) -> None:
        self.unit, self.backward = "", 0
        self.tickets: list[Ticket] = []
        self.last_tickets: list[Ticket] = []
        # From when the unit is made.
        self.listener: GradientListener | None = None
        self._device = spec.compute_device
        self._spec, self._template, self._fsdp_params = spec, main_weight, fsdp_params
        # Whether the backward under way brought anything; hooks of gradients have the list itself.
        self._begun = fsdp_params.begun
        self._make_buffers()
        self._views = [self.packed.get_local_tensor(index) for index in range(len(fsdp_params.sharded_params))]
        self.divide_by(spec.divisor)
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
        self._bind(GradBinding(main_grad, final, self._fsdp_params, self._template.dtype))
        wire, sent = None, dtypes.accumulate or dtypes.reduce
        if not is_alone and (sent is not main_grad.dtype or main_grad.device != self._device):
            wire = Wire(main_grad, final, sent, self._device)
        make = OffloadedReduction if spec.is_offloaded else Reduction
        self.reduction = make(self.packed, reduced, main_grad, final, wire)

    def _bind(self, binding: GradBinding) -> None:
        # Memory of the host is plentiful, and pages that a GPU writes are slow to come by.
        self.binding, binding.keeps = binding, self._spec.is_offloaded

    def _buffer(
        self, placements: tuple[BufferPlacement, ...], dtype: torch.dtype, what: str, device: torch.device
    ) -> DBuffer:
        like, is_pinned = self._template, self._spec.is_pinned and device.type == "cpu"
        return DBuffer.from_plan(like.plan, like.mesh, placements, dtype, device, name=what, pin_memory=is_pinned)

    def _let_wait(self) -> None:
        self._wait_for(self._fsdp_params.waits)

    def _wait_for(self, waits: bytes | bytearray) -> None:
        """Leave gradients of these parameters (nonzero) where autograd leaves them until the unit is closed."""
        self._waits = waits
        self._waiting = [index for index, waits in enumerate(waits) if waits]
        self._waiting_params = [self._fsdp_params.unsharded_params[index] for index in self._waiting]
        self._waiting_views = [self._views[index] for index in self._waiting]

    @property
    def main_grad(self) -> DBuffer:
        """The accumulator, at the gradients' placement."""
        return self.binding.main_grad

    @property
    def is_filled(self) -> bool:
        """Whether the packed buffer holds gradients that are not reduced yet."""
        return 1 in self._filled

    # ------------------------------------------------------------------ receive

    def receive(self, index: int, parameter: torch.Tensor) -> None:
        """Take notice of ``parameter.grad``, when autograd has added up what one graph brings.

        A small one stays there until ``close``, to be copied with the others in one call; a larger one is packed at
        once, so that autograd's memory is free. It is None where autograd has none, or all of it came as products.
        """
        gradient = _get_grad(parameter)
        if gradient is None:
            return
        _set_grad(parameter, None)
        if self._turns is not None:
            self._turns.take(self._pack_waiting)
        if not self._begun[0]:
            self._begin(has_come=True)
        if self._waits[index] and self._packs[index]:
            _set_grad(parameter, gradient)
        else:
            self._pack(index, gradient)

    def _pack(self, index: int, gradient: torch.Tensor) -> None:
        if not self._packs[index]:
            return
        if self._copies and not self._filled[index] and gradient.layout is _STRIDED:
            self._views[index].copy_(gradient)
        else:
            self._add(index, gradient)
        self._filled[index], self.binding.missing[index] = 1, 0

    def _pack_waiting(self) -> None:
        """Take over the small gradients that are there."""
        if not self._begun[0]:
            return
        params, indices = self._waiting_params, self._waiting
        gradients = grads_of(params)
        found = [gradient for gradient in gradients if gradient is not None]
        if not found:
            return
        clear_grads(params)
        if (
            self._copies
            and len(found) == len(gradients)
            and not any(map(self._filled.__getitem__, indices))
            and all(map(self._packs.__getitem__, indices))
            and set(map(_get_layout, found)) == {_STRIDED}
        ):
            torch._foreach_copy_(self._waiting_views, found)
            for index in indices:
                self._filled[index] = 1
                self.binding.missing[index] = 0
            return
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient is not None:
                self._pack(index, gradient)

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        split = self._fsdp_params.owned[index].split
        if split is not None:
            # Whole along the data-parallel axes alone.
            gradient = split.local_gradient(gradient)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        accumulate(gradient, self._views[index], scale=self.pack_scale, overwrite=not self._filled[index])

    def receive_product(self, index: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add ``left @ right`` to the packed gradient of a parameter."""
        if self._turns is not None:
            self._turns.take(self._pack_waiting)
        if not self._begun[0]:
            self._begin(has_come=True)
        if self._packs[index]:
            view = self._views[index]
            if self._copies and not self._filled[index] and left.dtype is view.dtype and left.ndim == 2:
                torch.mm(left, right, out=view)
            else:
                add_product(left, right, view, scale=self.pack_scale, overwrite=not self._filled[index])
            self._filled[index], self.binding.missing[index] = 1, 0

    def _begin(self, *, has_come: bool = False) -> bool:
        """Have room for this backward's gradients, if any is wanted; return whether one is.

        Parameters that were frozen since forward accumulate nothing, as in any model.

        Args:
            has_come: the first one is there.
        """
        listener = self.listener
        for index in self._fsdp_params.freeze():
            self._trained[index] = 0
            if listener is not None:
                listener.count_gradients()
        if 1 not in self._trained:
            return False
        if listener is not None:
            packs = not self.packed.storage.is_allocated
            self.backward = listener.begin_gradients(packs=packs, has_come=has_come)
        self.wait()
        if self.last_tickets:
            self._set_aside()
        self._begin_sum()
        if self.rests_partial:
            self.binding.hold()
            is_empty = self.binding.state is GradState.EMPTY
            self._filled = bytearray(b"\0" if is_empty else b"\1") * len(self._views)
        elif not (self.packs_late or self.packed.storage.is_allocated):
            self.packed.storage.reallocate()
            if self._gaps:
                torch._foreach_zero_(self._gaps)
        self._copies = self.pack_scale == 1.0 and not self._fsdp_params.has_splits
        self._begun[0] = has_come
        return True

    def _set_aside(self) -> None:
        """Have what the last reduction gives, which was issued already, added at the end."""
        for ticket in self.last_tickets:
            ticket.wait()
        self.binding.set_aside()
        self.last_tickets.clear()

    def _begin_sum(self) -> None:
        self.binding.begin_sum()

    # ------------------------------------------------------------------ reduce

    def close(self, *, reduce: bool) -> bool:
        """End this backward's part of the group.

        Args:
            reduce: zeros stand for gradients that did not come (other ranks may have one). False keeps what came for
                the next backward to add to.
        Returns:
            Whether ``reduce`` is to be called now.
        """
        if self._turns is not None:
            self._turns.take(self._pack_waiting)
        self._pack_waiting()
        has_begun, self._begun[0] = self._begun[0], False
        if not reduce and not self.rests_partial:
            return False
        if not has_begun and not self.is_filled and not self._begin():
            return False
        if 0 in self._filled:
            self._fill_up()
        self._filled = bytearray(len(self._views))
        if self.rests_partial:
            self.binding.state = GradState.PARTIAL
        return reduce

    def _fill_up(self) -> None:
        for index, filled in enumerate(self._filled):
            if not filled:
                self._views[index].zero_()

    @staticmethod
    def reduce(buffers: Sequence[GradientBuffer], owner: int = 0, after: Sequence[Ticket] = ()) -> None:
        """Issue the reductions of packed buffers and their folds into ``main_grad``, for which ``wait`` waits.

        FSDP2's ``foreach_reduce``.

        Args:
            buffers: of one unit. owner, after: as in ``Lane.submit``.
        """
        packed = [buffer for buffer in buffers if not buffer.rests_partial]
        if not packed:
            return
        reductions, tickets, is_for_host = [], [], False
        for buffer in packed:
            buffer._prepare()
            reductions.append(buffer.reduction)
            tickets.append(buffer.tickets)
            is_for_host = is_for_host or buffer.reduction.adds_on_host
        lane("reduce", packed[0]._device).submit(
            functools.partial(start_reductions, reductions),
            functools.partial(fold, reductions),
            functools.partial(fold_on_host, reductions) if is_for_host else None,
            owner=owner,
            tickets=tickets,
            after=after,
        )
        for buffer in packed:
            buffer.binding.state = GradState.PARTIAL
            if listeners:
                tell("reducing", buffer)

    def _prepare(self) -> None:
        self.binding.hold()
        self.reduction.prepare(1.0 / (self.divisor * self.wire_scale), overwrites=self.binding.state is GradState.EMPTY)

    def wait(self) -> None:
        """Make compute wait for the reduction, if one is under way, and release the packed buffer."""
        if self.tickets:
            for ticket in self.tickets:
                ticket.wait()
            self.packed.release_storage()
            self.reduction.release()
            self.tickets.clear()

    def end_backward(self) -> None:
        """Expect gradients of all parameters again."""
        self._fsdp_params.came[:] = bytes(len(self._views))

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

    # ------------------------------------------------------------------ between steps

    def rename(self, name: str) -> None:
        """Take another unit name, for messages."""
        self.unit, self.binding.name = name, f"unit {name!r}"
        self.packed.rename(f"unit {name!r}: packed gradients")
        self.main_grad.rename(f"unit {name!r}: main_grad")

    def keep(self, keeps: bool) -> None:
        """Have the memory of what comes with gradients all the time, or while there are any."""
        self.binding.keep(keeps)
        self.reduction.keep(keeps)

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
        self._own_scale = 1.0 / divisor if self.rests_partial else self.wire_scale
        self.weigh(self._weight)

    def weigh(self, weight: float) -> None:
        """Multiply this rank's gradients by ``weight`` from the next backward on.

        Args:
            weight: 0 drops them: this rank takes part in reductions with zeros.
        """
        self._weight = weight
        self._packs = self.binding.trained if weight else bytes(len(self._views))
        self.pack_scale = self._own_scale * (weight or 1.0)
        self.takes_products = math.frexp(self.pack_scale)[0] == 0.5

    def buffers(self) -> Iterator[tuple[str, DBuffer]]:
        """Yield what lies where, each kind by its name in reports."""
        if self.packed is not self.main_grad:
            yield "packed gradients", self.packed
        if self.wide is not None:
            yield "reduced gradients", self.wide
        yield "main_grad", self.main_grad


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


class LateGradients(GradientBuffer):
    """The gradients of one parameter group, cast into their packed buffer on the lane that reduces them.

    Where sums are of a wider dtype than gradients, two packed buffers, one that is reduced behind the backward that
    fills the other, would hold more than FSDP2 does. So gradients stay autograd's until their unit is closed, and the
    packed buffer is the lane's: it takes the memory when the one before is reduced, without a word to compute
    (docs/design/order.md, "Streams").
    """

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
        listener = late[0].listener
        # After all that any stream of compute has brought, so nobody takes a turn.
        lane("reduce", late[0]._device).submit(
            functools.partial(_pack, late),
            owner=0 if listener is None else listener.owner,
            tickets=[buffer._packings for buffer in late],
        )
        for buffer in late:
            if listener is not None:
                listener.lend(buffer)

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
        if self.listener is not None:
            self.listener.take_back_lent()
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
