"""GradientBuffer: the way of one group's gradients in a backward: received, packed, reduced, folded into main_grad."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch

from dbuffer import DBuffer
from dbuffer.events import listeners, tell
from dbuffer_kernels import accumulate
from megatron_fsdp.runtime.grads.fuse import offer_products
from megatron_fsdp.runtime.grads.last_reductions import begin_again
from megatron_fsdp.runtime.grads.packed_gradients import PackedGradients
from megatron_fsdp.runtime.guards.unreduced_grads import settle_sum
from megatron_fsdp.runtime.step.fsdp_params import FSDPParams
from megatron_fsdp.runtime.step.fused_linear import add_product
from megatron_fsdp.runtime.step.grad_state import GradState
from megatron_fsdp.runtime.step.lane_types import Ticket
from megatron_fsdp.runtime.step.reduction import GradientSpec, Stages, submit_reductions

if TYPE_CHECKING:
    from megatron_fsdp.runtime.step.unit import Unit

__all__ = ["GradientBuffer"]

# Looked up for every gradient.
_GRAD: Any = torch._C.TensorBase.grad
_get_grad, _set_grad = _GRAD.__get__, _GRAD.__set__
_LAYOUT: Any = torch._C.TensorBase.layout
_get_layout = _LAYOUT.__get__
_STRIDED = torch.strided
_plainly: Any = torch._C._disabled_torch_function_impl


class GradientBuffer(PackedGradients):
    """The gradients of one parameter group; ``PackedGradients`` says what they lie in."""

    def __init__(self, main_weight: DBuffer, spec: GradientSpec, fsdp_params: FSDPParams) -> None:
        super().__init__(main_weight, spec, fsdp_params)
        self._observer: weakref.ref[Unit] | None = None
        # Whether the backward under way brought anything; hooks of gradients have the list itself.
        self._begun = fsdp_params.begun
        self._copies = False
        # Which backward left something here that is void if it raises, by the schedule's count.
        self.backward = 0
        self._filled = bytearray(len(self._views))
        # Of reductions that were issued and that nobody has waited for.
        self.tickets: list[Ticket] = []
        # Of what is left to reduce at the end of a step.
        self.last_tickets: list[Ticket] = []
        if spec.fuses_weight_gradients:
            is_wide = spec.fuses_weight_gradients == "wide"
            offer_products(fsdp_params.unsharded_params, self._views, self, is_wide=is_wide)

    def observe(self, observer: Unit) -> None:
        """Report to ``observer``, which is referred to weakly."""
        self._observer = weakref.ref(observer)

    @property
    def is_filled(self) -> bool:
        """Whether the packed buffer holds gradients that are not reduced yet."""
        return 1 in self._filled

    def awaits_gradients(self) -> bool:
        """Whether the graph that autograd is going through brings gradients that have not come yet."""
        return self._fsdp_params.awaits_gradients()

    def end_backward(self) -> None:
        """Expect gradients of all parameters again."""
        self._fsdp_params.came[:] = bytes(len(self._views))

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
        self._begin_once()
        if self._waits[index] and self._trained[index]:
            _set_grad(parameter, gradient)
        else:
            self._pack(index, gradient)

    def _pack(self, index: int, gradient: torch.Tensor) -> None:
        if not self._trained[index]:
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
        gradients = _plainly(list, (), (map(_get_grad, self._waiting_params),))
        are_there = bytearray(map(operator.is_not, gradients, repeat(None)))
        if 1 not in are_there:
            return
        self._drop_waiting()
        if self._copies and 0 not in are_there and self._are_new(self._waiting, gradients):
            torch._foreach_copy_(self._waiting_views, gradients)
            if len(self._waiting) == len(self._views):
                self._filled, self.binding.missing = bytearray(b"\1" * len(self._views)), bytearray(len(self._views))
            else:
                for index in self._waiting:
                    self._filled[index], self.binding.missing[index] = 1, 0
            return
        for index, gradient in zip(self._waiting, gradients, strict=True):
            if gradient is not None:
                self._pack(index, gradient)

    def _are_new(self, indices: list[int], gradients: list[torch.Tensor]) -> bool:
        """Whether gradients of these parameters are plain and the first ones of parameters that are trained."""
        return (
            set(map(_get_layout, gradients)) == {_STRIDED}
            and not any(map(self._filled.__getitem__, indices))
            and all(map(self._trained.__getitem__, indices))
        )

    def _drop_waiting(self) -> None:
        _plainly(deque, (), (map(_set_grad, self._waiting_params, repeat(None)), 0))

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        gradient = self._fsdp_params.local_gradient(index, gradient)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        accumulate(gradient, self._views[index], scale=self.pack_scale, overwrite=not self._filled[index])

    def receive_product(self, index: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add ``left @ right`` to the packed gradient of a parameter."""
        if self._turns is not None:
            self._turns.take(self._pack_waiting)
        if not self._begun[0]:
            self._begin_once()
        if self._trained[index]:
            view = self._views[index]
            if self._copies and not self._filled[index] and left.dtype is view.dtype and left.ndim == 2:
                torch.mm(left, right, out=view)
            else:
                add_product(left, right, view, scale=self.pack_scale, overwrite=not self._filled[index])
            self._filled[index], self.binding.missing[index] = 1, 0

    def _begin_once(self) -> None:
        if self._begun[0]:
            return
        self._follow_freezing()
        if 1 in self._trained:
            self._copies = self.pack_scale == 1.0 and not self._fsdp_params.has_splits
            self._begin()
            self._begun[0] = True
            observer = self._observer() if self._observer is not None else None
            if observer is not None:
                observer.backward.gradient_arrived(observer)

    def _follow_freezing(self) -> None:
        """Take notice of parameters that were frozen since forward, which accumulate nothing as in any model."""
        frozen = self._fsdp_params.frozen_since_used()
        for index in frozen:
            self._fsdp_params.set_requires_grad(index, False)
            self._trained[index] = 0
        observer = self._observer() if frozen and self._observer is not None else None
        if observer is not None:
            observer.follow_gradients()

    def _begin(self) -> None:
        observer = self._observer() if self._observer is not None else None
        if observer is not None:
            backward = observer.backward
            backward.begin(packs=not self.packed.storage.is_allocated)
            self.backward = backward.number
        self.wait()
        if self.last_tickets:
            begin_again(self)
        self._begin_sum()
        if self.rests_partial:
            self.binding.hold()
            is_empty = self.binding.state is GradState.EMPTY
            self._filled = bytearray(b"\0" if is_empty else b"\1") * len(self._views)
        elif not (self.packs_late or self.packed.is_allocated):
            self.packed.reallocate_storage()
            for gap in self._gaps:
                gap.zero_()

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
        if not has_begun and not self.is_filled:
            self._follow_freezing()
            if 1 not in self._trained:
                return False
            self._begin()
        if 0 in self._filled:
            self._fill_up()
        self._filled = bytearray(len(self._views))
        if self.rests_partial:
            self.binding.become(GradState.PARTIAL)
        return reduce

    def _fill_up(self) -> None:
        for index, filled in enumerate(self._filled):
            if not filled:
                self._views[index].zero_()

    @staticmethod
    def reduce(buffers: Sequence[GradientBuffer], owner: int = 0) -> None:
        """Issue the reductions of packed buffers and their folds into ``main_grad``, for which ``wait`` waits.

        Args:
            buffers: of one unit. owner: as in ``Lane.submit``.
        """
        packed = [buffer for buffer in buffers if not buffer.rests_partial]
        if packed:
            submit_reductions(
                packed[0]._spec.device,
                [buffer._stages() for buffer in packed],
                owner,
                [buffer.tickets for buffer in packed],
            )
            for buffer in packed:
                buffer.binding.become(GradState.PARTIAL)
                if listeners:
                    tell("reducing", buffer)

    def _stages(self) -> Stages:
        self.binding.hold()
        overwrite = self.binding.state is GradState.EMPTY
        return self.reduction.stages(1.0 / (self.divisor * self.wire_scale), overwrite=overwrite)

    def wait(self) -> None:
        """Make compute wait for the reduction and release the packed buffer."""
        if self.tickets:
            for ticket in self.tickets:
                ticket.wait()
            self.packed.release_storage()
            self.reduction.release()
            self.tickets.clear()

    # ------------------------------------------------------------------ sums that are given up

    def settle(self) -> None:
        """Take notice, before a backward, of what users did to ``.grad`` while a sum was under way: throw it away.

        Raises:
            StateError: a backward has raised, and ``.grad`` was not dropped since.
        """
        dropped = settle_sum(self.binding)
        if dropped is None:
            self._empty()
            self.binding.end_sum(clears=False)
            return
        for index in dropped:
            self._filled[index] = 0

    def void(self, backward: int) -> None:
        """Let ``.grad`` refuse to be read until it is dropped.

        Args:
            backward: the number of one that has raised; nothing happens where it brought no gradient, or all of them.
        """
        if self.backward == backward and self.binding.is_under_way:
            self.binding.void()

    def abandon(self, backward: int) -> None:
        """Forget what a backward that raised left here; what earlier ones keep for the next stays.

        Args:
            backward: its number.
        """
        self.void(backward)
        self._begun[0] = False
        # Autograd may have been about to tell of any of them.
        _plainly(deque, (), (map(_set_grad, self._fsdp_params.unsharded_params, repeat(None)), 0))
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
        self.reduction.release()
        self.tickets.clear()
        self.last_tickets.clear()
        if self.binding.is_under_way:
            self.binding.empty()
