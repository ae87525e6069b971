"""GradientBuffer: the way of one group's gradients in a backward: received, packed, reduced, folded into main_grad."""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist

from dbuffer import DBuffer, SlotPool
from dbuffer.collectives import Part, reduce_scatter
from dbuffer.collectives_together import reduce_together
from dbuffer.events import listeners, tell
from dbuffer.layout import only_flat_axis
from dbuffer.route import Route
from dbuffer_kernels import accumulate
from dbuffer_kernels.products import add_product
from megatron_fsdp.runtime.step.fsdp_params import FSDPParams
from megatron_fsdp.runtime.step.grad_binding import GradBinding, GradState
from megatron_fsdp.runtime.step.lanes import Ticket, lane
from megatron_fsdp.runtime.step.streams import Turns

__all__ = ["GradientBuffer", "Hook", "ReduceFunction", "Reduction"]

Hook = Callable[[torch.Tensor], None]

# A replacement for the reduce-scatter: (output, input, group, op, async_op) -> handle or None, as FSDP2's
# ``ReduceScatter``.
ReduceFunction = Callable[
    [torch.Tensor, torch.Tensor, dist.ProcessGroup, dist.ReduceOp.RedOpType, bool], "dist.Work | None"
]

# Looked up for every gradient.
_BASE: Any = torch._C.TensorBase
_get_grad, _set_grad, _get_layout = _BASE.grad.__get__, _BASE.grad.__set__, _BASE.layout.__get__
_STRIDED = torch.strided
_plainly: Any = torch._C._disabled_torch_function_impl


class Reduction:
    """The way of one group's gradients from the packed buffer to the optimizer.

    Args:
        packed: receives autograd's gradients. reduced: the slice of it that its reduction leaves to this rank; or, of a
            wider dtype, memory of its own.
        main_grad: the accumulator. final: the slice of it that the optimizer reads.

    Attributes:
        hook: called with each reduced gradient (1-D, averaged) before it is accumulated, to reduce it further.
        function: used instead of the reduce-scatter.
        keeps: what is reduced into has memory all the time, where it has its own.
        is_last: whether ``main_grad`` is what the optimizer reads, so that nothing is left to reduce.
        adds_on_host: whether ``fold_on_host`` has anything to do.
        frees_packed: the packed buffer is the lane's, which gives it back.
    """

    def __init__(self, packed: DBuffer, reduced: DBuffer, main_grad: DBuffer, final: DBuffer) -> None:
        self.hook: Hook | None = None
        self.function: ReduceFunction | None = None
        self.keeps = self.frees_packed = self.adds_on_host = False
        self._packed, self._reduced = packed, reduced
        # The reduction into memory of its own, where sums are of a wider dtype.
        self._wide: list[Part] = []
        self._route = Route(packed, reduced)
        self._main_grad, self._final = main_grad, final
        self.is_last = final is main_grad
        self._scale, self._overwrites = 1.0, True

    def prepare(self, scale: float, *, overwrites: bool) -> None:
        """Get ready for the next ``start``.

        Args:
            scale: the sum over ranks is multiplied by it.
            overwrites: ``main_grad`` holds nothing yet.
        """
        self._scale, self._overwrites = scale, overwrites
        if self._wide:
            self._reduced.reallocate_storage()

    def start(self, works: list[dist.Work] | None) -> list[Part]:
        """Return the reduction to be issued; one that is no single collective is issued."""
        if self.function is None:
            return self._wide or self._route.ready or self._route.parts(works)
        reduced = self._reduced
        group = only_flat_axis(reduced.axes, reduced.placements).reduce_group
        is_async = works is not None
        work = self.function(reduced.local_buffer, self._packed.local_buffer, group, dist.ReduceOp.SUM, is_async)
        if works is not None and work is not None:
            works.append(work)
        return []

    def fold(self) -> None:
        """Do the device's work on its result."""
        accumulate(self._averaged(), self._main_grad.local_buffer, scale=self._scale, overwrite=self._overwrites)

    def _averaged(self) -> torch.Tensor:
        """Return what came of it, still to be scaled, but for a hook, which sees averages."""
        source = self._reduced.local_buffer
        # Where axes are left to reduce at the end, the hook's turn comes after them.
        if self.hook is not None and self.is_last:
            self.hook(source.mul_(self._scale))
            self._scale = 1.0
        return source

    def fold_on_host(self) -> None:
        """Do the CPU's work after that."""

    def release(self) -> None:
        """Release what the reduction left, which is folded."""
        if self._wide and not self.keeps:
            self._reduced.release_storage()


def _start(reductions: Sequence[Reduction], works: list[dist.Work] | None) -> None:
    parts: list[Part] = []
    for reduction in reductions:
        parts += reduction.start(works)
    if len(parts) == 1:
        reduce_scatter(parts[0].shard, parts[0].whole, parts[0].axis, parts[0].op, works)
    else:
        reduce_together(parts, works)


def _fold(reductions: Sequence[Reduction]) -> None:
    for reduction in reductions:
        reduction.fold()
        if reduction.frees_packed:
            reduction._packed.release_storage()


def _fold_on_host(reductions: Sequence[Reduction]) -> None:
    for reduction in reductions:
        reduction.fold_on_host()


class GradientBuffer:
    """The gradients of one parameter group in a backward; ``PackedGradients`` makes and describes what they lie in."""

    packs_late = is_to_pack = False
    binding: GradBinding
    packed: DBuffer
    rests_partial: bool
    rests_final: bool
    reduction: Reduction
    divisor: float
    wire_scale: float
    pack_scale: float
    takes_products: bool
    unit: str
    backward: int
    tickets: list[Ticket]
    last_tickets: list[Ticket]
    _device: torch.device
    _template: DBuffer
    _fsdp_params: FSDPParams
    # The ``Unit``, weakly, from when that is made.
    _observer: Callable[[], Any] = staticmethod(lambda: None)
    _turns: Turns | None
    _views: list[torch.Tensor]
    _gaps: list[torch.Tensor]
    # Whether the backward under way brought anything; hooks of gradients have the list itself.
    _begun: list[bool]
    _filled: bytearray
    _trained: bytearray
    _copies = False
    # Gradients that stay where autograd leaves them until the unit is closed.
    _waits: bytes | bytearray
    _waiting: list[int]
    _waiting_params: list[torch.nn.Parameter]
    _waiting_views: list[torch.Tensor]

    # What is done between backwards, and with sums that are given up: ``runtime/grads/packed_gradients.py``.
    take_from: Callable[[SlotPool | None], None]
    divide_by: Callable[[float], None]
    observe: Callable[[Any], None]
    rename: Callable[[str], None]
    keep: Callable[[bool], None]
    settle: Callable[[], None]
    void: Callable[[int], None]
    abandon: Callable[[int], None]
    discard: Callable[[], None]
    # Of closed buffers that ``is_to_pack`` says are still to be packed: ``runtime/grads/late_gradients.py``.
    pack: Callable[[Sequence[GradientBuffer]], None]

    @property
    def main_grad(self) -> DBuffer:
        """The accumulator, at the gradients' placement."""
        return self.binding.main_grad

    @property
    def is_filled(self) -> bool:
        """Whether the packed buffer holds gradients that are not reduced yet."""
        return 1 in self._filled

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
        if not self._begun[0]:
            self._begin(has_come=True)
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
        params, indices = self._waiting_params, self._waiting
        gradients = _plainly(list, (), (map(_get_grad, params),))
        are_there = bytearray(map(operator.is_not, gradients, repeat(None)))
        if 1 not in are_there:
            return
        _plainly(deque, (), (map(_set_grad, params, repeat(None)), 0))
        if (
            self._copies
            and 0 not in are_there
            and not any(map(self._filled.__getitem__, indices))
            and all(map(self._trained.__getitem__, indices))
            and set(map(_get_layout, gradients)) == {_STRIDED}
        ):
            torch._foreach_copy_(self._waiting_views, gradients)
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
        if self._trained[index]:
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
        unit = self._observer()
        for index in self._fsdp_params.freeze():
            self._trained[index] = 0
            if unit is not None:
                unit.count_gradients()
        if 1 not in self._trained:
            return False
        if unit is not None:
            unit.backward.begin_gradients(unit, packs=not self.packed.storage.is_allocated, has_come=has_come)
            self.backward = unit.backward.number
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
            functools.partial(_start, reductions),
            functools.partial(_fold, reductions),
            functools.partial(_fold_on_host, reductions) if is_for_host else None,
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
