"""GradientBuffer: the gradients of one parameter group in a backward, from autograd to ``main_grad``.

In order of time: ``receive`` (from autograd's hook; the first gradient calls ``_begin``), ``_pack`` or ``_pack_late``,
``close`` (``post_backward``), on a lane ``pack_all``, ``reduce``, ``wait``. Then ``accumulation.py`` completes the sum
in ``main_grad`` and shows it in ``.grad``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dbuffer import DBuffer, SlotPool
from dbuffer.events import listeners, tell
from dbuffer_kernels import accumulate
from dbuffer_kernels.products import add_product
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.engine.accumulation import GradBinding
from megatron_fsdp.engine.fused_linear import offer_products
from megatron_fsdp.engine.lane_packer import LanePacker
from megatron_fsdp.engine.param_loops import clear_grads, grads_of
from megatron_fsdp.engine.params import FSDPParams
from megatron_fsdp.engine.reduce import GradientReduction, fold, fold_on_host, start_reductions
from megatron_fsdp.engine.streams import Ticket, lane, turns
from megatron_fsdp.errors import StateError

__all__ = ["GradientBuffer", "GradientListener", "pack_on_lane"]

# Looked up for every gradient.
_BASE: Any = torch._C.TensorBase
_get_grad, _set_grad, _get_layout = _BASE.grad.__get__, _BASE.grad.__set__, _BASE.layout.__get__
_STRIDED = torch.strided


class GradientListener(Protocol):
    """Calls from a gradient buffer to the backward of its unit; ``backward.UnitGradientListener`` implements them.

    Attributes:
        owner: ``id`` of the unit; see ``Lane.submit``.
    """

    owner: int

    def count_trained(self) -> None:
        """Count the unit's gradients again, because a parameter was frozen."""

    def begin_gradients(self, *, allocates: bool, has_come: bool) -> int:
        """Tell the backward that the first gradient, or zeros in its place, is packed; return the backward's number."""

    def lend(self, packer: LanePacker) -> None:
        """Tell the backward that a lane reads autograd's gradients, which ``packer`` holds."""

    def take_back_lent(self) -> None:
        """Release older gradients that lanes have read, before more gradients wait to be packed."""


class GradientBuffer:
    """Packs the gradients of one parameter group and reduces them into ``main_grad``.

    The packed buffer (``packed``, the reduce-scatter input) is in one of these states:

    | state | how it shows |
    |---|---|
    | empty | ``_begun`` is not set, ``_filled`` is all 0, ``tickets`` is empty |
    | receives gradients of a backward | ``_begun`` is set; ``_filled`` says of which parameters |
    | keeps gradients for the next microbatch | ``_begun`` is not set, ``is_filled`` |
    | is reduced | ``tickets`` has the reduction, until ``wait`` |

    Args:
        main_weight: the group's main weights.
        fsdp_params: the parameters.
        reduction: owns the buffers, and reduces packed gradients into ``main_grad``.
        packer: packs gradients on the lane that reduces them; None if the compute stream packs each on arrival.

    Attributes:
        binding: the sum in ``main_grad``, and ``.grad`` of the parameters.
        packed: receives autograd's gradients. With ``rests_partial`` it is ``main_grad`` itself: whole partial sums
            are accumulated in place, and reduced once at the end of a step.
        rests_final: each microbatch's reduction leaves final gradients in ``main_grad``.
        packer: the argument, but None while the packed buffer takes memory from a slot, and with ``rests_partial``.
            Slots are few, or memory of NCCL, so large gradients are packed into their slot on arrival.
        divisor: the sum over ranks is divided by it. wire_scale: the part of the division before the reduction.
        pack_scale: factor for gradients when they are packed. takes_products: the factor is a power of two, so that a
            scaled matrix product has the bits of an unscaled one.
        wide: holds reduced gradients of a wider dtype than ``packed``; None if reductions stay in ``packed``.
        last_backward: number of the last backward that brought or reduced gradients. If it raises, the sum is
            incomplete.
        listener: the backward of the unit; None outside of a unit.
        is_replaced: the group has another buffer now, because the user keeps gradients that lie in this one.
        tickets: reductions to wait for. last_tickets: reductions over the remaining axes, once per step.
    """

    divisor: float
    wire_scale: float
    pack_scale: float
    takes_products: bool
    _copies = False
    # One byte per parameter, 1 to pack its gradient: if it is trained and this rank's weight is not 0 (``weigh``).
    _packs: bytes | bytearray
    _own_scale = _weight = 1.0

    def __init__(
        self,
        main_weight: DBuffer,
        spec: GroupSpec,
        fsdp_params: FSDPParams,
        reduction: GradientReduction,
        packer: LanePacker | None,
    ) -> None:
        self.unit_name, self.last_backward, self.is_replaced = "", 0, False
        self.tickets: list[Ticket] = []
        self.last_tickets: list[Ticket] = []
        # Set when the unit is made.
        self.listener: GradientListener | None = None
        self._device, self._fsdp_params = spec.compute_device, fsdp_params
        # Set while the backward has packed a gradient; the gradient hooks read it.
        self._begun = fsdp_params.begun
        self.reduction, self.packed, self.wide = reduction, reduction.packed, reduction.wide
        self.rests_partial, self.rests_final = reduction.rests_partial, reduction.rests_final
        self.binding = GradBinding(reduction.main_grad, reduction.final, fsdp_params, main_weight.dtype)
        # Host memory is plentiful, and pinned pages are slow to allocate.
        self.binding.memory.keeps = spec.is_offloaded
        self._views = [self.packed.get_local_tensor(index) for index in range(len(fsdp_params.sharded_params))]
        self._filled = bytearray(len(self._views))
        self.divide_by(spec.divisor)
        # ``missing`` of the sum under way, the same object.
        self._missing = bytearray()
        self._gaps = [self.packed.local_buffer[gap.start : gap.stop] for gap in self.packed.layout.padding()]
        self._turns = turns(self._device, fsdp_params.last_turn)
        self._lane_packer = packer
        self._choose_packer()
        if self.rests_partial:
            self.binding.memory.gaps = self._gaps
        else:
            self.packed.release_storage()
        self.reduction.release()
        self.binding.memory.release_unless_held()
        if spec.fuses_weight_gradients:
            is_wide = spec.fuses_weight_gradients == "wide"
            offer_products(fsdp_params.unsharded_params, self._views, self, is_wide=is_wide)

    def _choose_packer(self) -> None:
        """Choose where gradients are packed, and which are packed late: they stay in ``.grad`` until ``close``.

        On the compute stream small ones are packed late, in one call for all. On a lane all are.
        """
        is_slotted = self.rests_partial or self.packed.storage.takes_slots
        self.packer = None if is_slotted else self._lane_packer
        is_small = self._fsdp_params.is_small
        self._is_late: bytes | bytearray = is_small if self.packer is None else bytes([1]) * len(is_small)
        self._late = [index for index, is_late in enumerate(self._is_late) if is_late]
        self._late_params = [self._fsdp_params.unsharded_params[index] for index in self._late]
        self._late_views = [self._views[index] for index in self._late]

    @property
    def main_grad(self) -> DBuffer:
        """The buffer that gradients are accumulated in, with the strategy's placement of gradients."""
        return self.binding.main_grad

    @property
    def is_filled(self) -> bool:
        """True while the packed buffer holds gradients that are not reduced yet."""
        return 1 in self._filled

    # ------------------------------------------------------------------ receive

    def receive(self, index: int, parameter: torch.Tensor) -> None:
        """Pack ``parameter.grad``; autograd calls this when it has accumulated all of the parameter's gradient.

        A gradient that is packed late stays in ``.grad`` until ``close``. The others are packed at once, so that their
        memory is free. ``.grad`` is None if the graph brought none, or matrix products alone (``receive_product``).
        """
        gradient = _get_grad(parameter)
        if gradient is None:
            return
        _set_grad(parameter, None)
        if self._turns is not None:
            self._turns.take(self._pack_late)
        if not self._begun.is_set:
            self._begin(has_come=True)
        if self._is_late[index] and self._packs[index]:
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
        self._filled[index], self._missing[index] = 1, 0

    def _pack_late(self) -> None:
        """Pack the gradients that have stayed in ``.grad``: small ones, or with a ``LanePacker`` all."""
        if not self._begun.is_set:
            return
        if self.packer is not None and not self.packed.is_allocated:
            # Another stream gets the next turn, or the next microbatch will add to these gradients.
            self._take_packed()
        params, indices = self._late_params, self._late
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
            torch._foreach_copy_(self._late_views, found)
            for index in indices:
                self._filled[index] = 1
                self._missing[index] = 0
            return
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient is not None:
                self._pack(index, gradient)

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        tensor_parallel = self._fsdp_params.owned[index].tensor_parallel
        if tensor_parallel is not None:
            # The part of this rank along the tensor-parallel axis, whole along the data-parallel axes.
            gradient = tensor_parallel.local_gradient(gradient)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        accumulate(gradient, self._views[index], scale=self.pack_scale, overwrite=not self._filled[index])

    def receive_product(self, index: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add ``left @ right`` to the packed gradient of a parameter."""
        if self._turns is not None:
            self._turns.take(self._pack_late)
        if not self._begun.is_set:
            self._begin(has_come=True)
        if self._packs[index]:
            view = self._views[index]
            if self._copies and not self._filled[index] and left.dtype is view.dtype and left.ndim == 2:
                torch.mm(left, right, out=view)
            else:
                add_product(left, right, view, scale=self.pack_scale, overwrite=not self._filled[index])
            self._filled[index], self._missing[index] = 1, 0

    def _begin(self, *, has_come: bool = False) -> bool:  # noqa: C901  # in order of time
        """Prepare for the gradients of a backward; return False if no parameter is trained.

        In order: freeze parameters that the user has frozen since forward (autograd accumulates nothing for them);
        tell the backward, which makes room; wait for the last reduction of this buffer; begin or continue the sum;
        allocate the packed buffer.

        Args:
            has_come: a gradient has arrived; False if ``close`` fills the buffer with zeros.
        """
        listener = self.listener
        for index in self._fsdp_params.freeze():
            self.binding.trained[index] = 0
            if listener is not None:
                listener.count_trained()
        if 1 not in self.binding.trained:
            return False
        if listener is not None:
            allocates = not self.packed.storage.is_allocated
            self.last_backward = listener.begin_gradients(allocates=allocates, has_come=has_come)
        if self.is_replaced:
            raise StateError(
                f"unit {self.unit_name!r}: a backward came to its weights without coming to an output of a unit "
                "before, and gradients of an earlier backward are still in use. fix: call zero_grad() before the "
                "forward, or return the tensor that leads to the loss from the unit's forward"
            )
        self.wait()
        if self.last_tickets:
            self._set_aside()
        under_way = self.reduction.begin_sum(self.binding)
        self._missing = under_way.missing
        if self.rests_partial:
            self.binding.memory.allocate()
            self._filled = bytearray(b"\1" if under_way.is_in_main_grad else b"\0") * len(self._views)
        elif self.packer is None and not self.packed.storage.is_allocated:
            self.packed.storage.reallocate()
            if self._gaps:
                torch._foreach_zero_(self._gaps)
        self._copies = self.pack_scale == 1.0 and not self._fsdp_params.has_tensor_parallel
        self._begun.is_set = has_come
        if self._lane_packer is not None:
            if listener is not None:
                listener.take_back_lent()
            self._fsdp_params.begun_on_lane.is_set = has_come and self.packer is not None
        return True

    def _set_aside(self) -> None:
        """Save the result of a last reduction that was issued early; ``complete`` adds it."""
        for ticket in self.last_tickets:
            ticket.wait()
        self.binding.set_aside()
        self.last_tickets.clear()

    # ------------------------------------------------------------------ reduce

    def close(self, *, reduce: bool) -> bool:
        """End this backward for the group: pack late gradients, and zeros for parameters without a gradient.

        Args:
            reduce: False keeps the gradients in the packed buffer, for the next microbatch to add to. True writes
                zeros for missing gradients, because other ranks may have them.
        Returns:
            True if the caller must call ``reduce`` now.
        """
        if self.packer is not None:
            self._fsdp_params.begun_on_lane.is_set = False
            if reduce and not self.packed.is_allocated:
                # All gradients are in ``.grad``, and ``pack_all`` packs them on the lane.
                self.packer.is_due = self._begun.is_set or self._begin()
                return self.packer.is_due
        # Also with a packer, if this rank adds to the packed gradients of earlier microbatches, or keeps its own.
        if self._turns is not None:
            self._turns.take(self._pack_late)
        self._pack_late()
        has_begun, self._begun.is_set = self._begun.is_set, False
        if not reduce and not self.rests_partial:
            return False
        if not (has_begun or self.is_filled or self._begin()):
            # No parameter is trained.
            return False
        if 0 in self._filled:
            self._zero_missing()
        self._filled = bytearray(len(self._views))
        if self.rests_partial:
            assert self.binding.sum is not None
            self.binding.sum.is_in_main_grad = True
        return reduce

    def _zero_missing(self) -> None:
        for index, filled in enumerate(self._filled):
            if not filled:
                self._views[index].zero_()

    def _take_packed(self) -> None:
        self.packed.reallocate_storage()
        for gap in self._gaps:
            gap.zero_()

    def pack_all(self, packer: LanePacker) -> None:
        """Pack all gradients of a closed buffer, on the reduce lane; autograd's stay allocated in ``packer.lent``."""
        packer.is_due = False
        self._take_packed()
        packer.lent = [gradient for gradient in grads_of(self._late_params) if gradient is not None]
        self._pack_late()
        self._zero_missing()
        self._begun.is_set, self._filled = False, bytearray(len(self._views))

    @staticmethod
    def reduce(buffers: Sequence[GradientBuffer], owner: int = 0, after: Sequence[Ticket] = ()) -> None:
        """Issue one reduction of a unit's packed buffers and the folds into ``main_grad``; ``wait`` waits for both.

        FSDP2's ``foreach_reduce``.

        Args:
            buffers: closed buffers of one unit; those with ``rests_partial`` are skipped.
            owner, after: see ``Lane.submit``.
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
            assert buffer.binding.sum is not None
            buffer.binding.sum.is_in_main_grad = True
            if listeners:
                tell("reducing", buffer)

    def _prepare(self) -> None:
        self.binding.memory.allocate()
        under_way = self.binding.sum
        assert under_way is not None
        scale = 1.0 / (self.divisor * self.wire_scale)
        self.reduction.prepare(scale, overwrites=not under_way.is_in_main_grad)
        if self._lane_packer is not None:
            # Released on the lane because it was allocated there (docs/design/order.md, "Streams").
            self.reduction.frees_packed = bool(self._lane_packer.tickets)

    def wait(self) -> None:
        """Make the compute stream wait for the reduction, and release the packed buffer."""
        if self.tickets:
            for ticket in self.tickets:
                ticket.wait()
            self.packed.release_storage()
            self.reduction.release()
            self.tickets.clear()
        if self._lane_packer is not None:
            self._lane_packer.release_lent()

    def end_backward(self) -> None:
        """Forget which parameters had a gradient in this backward."""
        self._fsdp_params.came[:] = bytes(len(self._views))

    # ------------------------------------------------------------------ a sum is discarded

    def discard_if_dropped(self) -> None:
        """Discard, before a backward, a sum whose ``.grad`` the user has dropped; see ``GradBinding.is_dropped``."""
        if self.binding.is_dropped():
            self._discard_values()
            self.binding.forget_sum()

    def mark_incomplete(self, backward: int) -> None:
        """Make ``.grad`` refuse to be read if the backward that raised brought a part of the sum."""
        if self.last_backward == backward:
            self.binding.mark_incomplete()

    def discard_backward(self, backward: int) -> None:
        """Discard the gradients of a backward that raised; a sum that it has not touched stays."""
        self.mark_incomplete(backward)
        self._begun.is_set = self._fsdp_params.begun_on_lane.is_set = False
        # Autograd may have accumulated into any of them without calling its hook.
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._fsdp_params.unsharded_params:
                _set_grad(parameter, None)
        if self.last_backward == backward:
            self._discard_values()

    def discard_sum(self) -> None:
        """Discard the sum under way, and set ``.grad`` to None."""
        if self.binding.sum is not None:
            self._discard_values()
            self.binding.discard_sum()

    def _discard_values(self) -> None:
        if self._lane_packer is not None:
            self._lane_packer.cancel()
        for ticket in (*self.tickets, *self.last_tickets):
            ticket.cancel()
        self._filled = bytearray(len(self._views))
        if not self.rests_partial:
            self.packed.release_storage()
        self.reduction.release_all()
        self.tickets.clear()
        self.last_tickets.clear()
        self.binding.discard_values()

    # ------------------------------------------------------------------ between steps

    def rename(self, name: str) -> None:
        """Change the unit's name in messages and reports."""
        self.unit_name, self.binding.name = name, f"unit {name!r}"
        self.packed.rename(f"unit {name!r}: packed gradients")
        self.main_grad.rename(f"unit {name!r}: main_grad")

    def keep(self, keeps: bool) -> None:
        """Keep gradient memory allocated permanently (True) or only while gradients exist (False)."""
        # A reduction may still use the memory.
        self.wait()
        self.binding.keep(keeps)
        self.reduction.keep(keeps)

    def take_from(self, pool: SlotPool | None) -> None:
        """Allocate the packed buffer from the slots of a pool; None: from the allocator."""
        if not self.rests_partial:
            self.packed.storage.use_pool(pool)
        self._choose_packer()

    def divide_by(self, divisor: float) -> None:
        """Divide sums over ranks by ``divisor``, from the next reduction on.

        fp16 sums of many ranks overflow and fp16 averages underflow, so for fp16 half of the division (in powers of
        two) comes before the sum.

        Raises:
            StateError: the strategy keeps partial sums of earlier microbatches, which were divided already.
        """
        self.discard_if_dropped()
        under_way = self.binding.sum
        if self.rests_partial and under_way is not None and under_way.is_in_main_grad and divisor != self.divisor:
            raise StateError(
                f"unit {self.unit_name!r}: the divisor of gradients was changed from {self.divisor:g} to {divisor:g} "
                "after a microbatch whose gradients are divided already and not reduced yet. fix: call "
                "set_gradient_divide_factor() before the first microbatch of a step"
            )
        scale_before = self._own_scale
        self.divisor = divisor
        half = 2.0 ** -(math.frexp(max(divisor, 1.0))[1] // 2)
        self.wire_scale = half if self.packed.dtype is torch.float16 else 1.0
        if self.reduction.wire is not None:
            # Values in ``main_grad`` were divided already.
            self.reduction.wire.scale = 1.0 / half if self.reduction.wire.whole.dtype is torch.float16 else 1.0
        self._own_scale = 1.0 / divisor if self.rests_partial else self.wire_scale
        if self.is_filled and self._own_scale != scale_before:
            # Gradients of earlier microbatches that are not reduced yet; both scales are powers of two.
            self.packed.local_buffer.mul_(self._own_scale / scale_before)
        self.weigh(self._weight)

    def weigh(self, weight: float) -> None:
        """Multiply this rank's gradients by ``weight`` from the next backward on.

        Args:
            weight: 0 drops the gradients, and this rank reduces zeros.
        """
        self._weight = weight
        self._packs = self.binding.trained if weight else bytes(len(self._views))
        self.pack_scale = self._own_scale * (weight or 1.0)
        self.takes_products = math.frexp(self.pack_scale)[0] == 0.5

    def buffers(self) -> Iterator[tuple[str, DBuffer]]:
        """Yield the buffers, each with its name in reports."""
        if self.packed is not self.main_grad:
            yield "packed gradients", self.packed
        if self.wide is not None:
            yield "reduced gradients", self.wide
        yield "main_grad", self.main_grad


def pack_on_lane(buffers: Sequence[GradientBuffer]) -> None:
    """Submit the packing of a unit's closed buffers to the reduce lane, as one submission."""
    due = [(buffer, packer) for buffer in buffers if (packer := buffer.packer) is not None and packer.is_due]
    first = due[0][0]
    # The lane waits for all compute streams, so no compute stream takes a turn.
    lane("reduce", first._device).submit(
        functools.partial(_pack_due, due),
        owner=0 if first.listener is None else first.listener.owner,
        tickets=[packer.tickets for _, packer in due],
    )
    for buffer, packer in due:
        if buffer.listener is not None:
            buffer.listener.lend(packer)


def _pack_due(due: Sequence[tuple[GradientBuffer, LanePacker]], _: list[dist.Work] | None) -> None:
    for buffer, packer in due:
        buffer.pack_all(packer)
