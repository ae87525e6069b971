"""What a GradientBuffer is built from, the states it goes through, and who is told about it."""

from __future__ import annotations

import enum
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer, Partial
from dbuffer.buffer import Route
from dbuffer.layout import only_flat_axis
from dbuffer.placements import BufferPlacement
from dbuffer_kernels import accumulate
from megatron_fsdp.errors import StateError
from megatron_fsdp.policy.strategy import Placements
from megatron_fsdp.runtime.fused_linear import add_product, offer_products
from megatron_fsdp.runtime.grad_binding import (
    CastGradients,
    SmallGradients,
    assign_grads,
    clear_grads,
    grads_of,
    outside,
)
from megatron_fsdp.runtime.lanes import Ticket, lane, turns
from megatron_fsdp.runtime.parameters import Faces
from megatron_fsdp.runtime.pending_sums import PendingSums

__all__ = [
    "GradState",
    "GradientBuffer",
    "GradientObserver",
    "GradientSpec",
    "ReduceFunction",
    "Reduction",
]

# Looked up for every gradient.
_GRAD: Any = torch._C.TensorBase.grad

_get_grad, _set_grad = _GRAD.__get__, _GRAD.__set__

_STRIDED = torch.strided

_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class GradientBuffer:
    """The gradients of one parameter group.

    Args:
        main_weight: the group's main weights; gradients share its plan and mesh.
        faces: the parameters; the sharded ones' ``.grad`` is set when gradients are final, and read to see
            ``zero_grad``.
    """

    def __init__(self, main_weight: DBuffer, spec: GradientSpec, faces: Faces) -> None:
        self.name = main_weight.name
        self.state = GradState.EMPTY
        self.divisor = spec.divisor
        self._spec = spec
        self._owner_faces = faces
        self._parameters = tuple(faces.sharded)
        self._observer: weakref.ref[GradientObserver] | None = None
        self._trained = bytearray(int(parameter.requires_grad) for parameter in self._parameters)
        self.num_trained = sum(self._trained)
        self._arrived = bytearray(len(self._parameters))
        self._num_arrived = 0
        # Autograd's number of the backward that entered the unit.
        self.task = -1
        self._filled = bytearray(len(self._parameters))
        # Parameters of which a product was added since their last arrival, and whether this backward has begun here.
        self._multiplied = bytearray(len(self._parameters))
        self._is_begun = False
        # Parameters of which this sum has no gradient so far (``missing_gradients.py``), and those that had one before.
        self.missing = bytearray(len(self._parameters))
        self._had = bytearray(len(self._parameters))
        self._carry: torch.Tensor | None = None
        # The last backward that brought gradients, by the schedule's count.
        self._backward = 0
        partial: tuple[BufferPlacement, ...] = tuple(Partial("sum") for _ in spec.placements.gradient)
        self._template = main_weight
        self.main_grad = self._buffer(spec.placements.gradient, spec.main_dtype, "main_grad", main_weight.device)
        self.main_grad.zero_()
        # Where gradients rest as whole partial sums they are accumulated in place and reduced once, at the end.
        self.rests_partial = spec.placements.gradient == partial
        self._packed = self.main_grad
        self._reduced = self.main_grad
        if not self.rests_partial:
            self._packed = self._buffer(partial, spec.reduce_dtype, "packed gradients", spec.device)
            self._reduced = self._packed.slice_view(spec.placements.gradient)
        self._final = self.main_grad
        if spec.placements.gradient != spec.placements.optimizer:
            self._final = self.main_grad.slice_view(spec.placements.optimizer)
        self.reduction = Reduction(
            self._packed, self._reduced, self.main_grad, self._final, is_offloaded=spec.is_offloaded,
            is_pinned=spec.is_pinned,
        )  # fmt: skip
        self._views = [self._packed.get_local_tensor(index) for index in range(len(self._parameters))]
        self._small = SmallGradients(self._views)
        self._turns = turns(spec.device)
        self._gaps = [self._packed.local_buffer[gap.start : gap.stop] for gap in self._packed.layout.padding()]
        if not self.rests_partial:
            self._packed.release_storage()
        self._faces: list[DTensor] = []
        self._sums: PendingSums | None = None
        # A twin's gradients are none of the parameters' own: ``.grad`` does not show them.
        self._is_twin = False
        self._cast = CastGradients(main_weight.dtype, faces.wrap)
        self._tickets: list[Ticket] = []
        if spec.fuses_weight_gradients:
            is_wide = spec.fuses_weight_gradients == "wide"
            offer_products(faces.gathered, self._views, self, is_wide=is_wide)

    def _buffer(
        self, placements: tuple[BufferPlacement, ...], dtype: torch.dtype, what: str, device: torch.device
    ) -> DBuffer:
        like, pinned = self._template, self._spec.is_pinned and device.type == "cpu"
        name = f"{self.name}: {what}"
        return DBuffer.from_plan(like.plan, like.mesh, placements, dtype, device, name=name, pin_memory=pinned)

    def rename(self, name: str) -> None:
        """Take another name, for messages."""
        self.name = name
        self._packed.rename(f"{name}: packed gradients")
        self.main_grad.rename(f"{name}: main_grad")

    @property
    def packed(self) -> DBuffer:
        """The buffer that receives autograd's gradients; ``main_grad`` itself where gradients rest partial."""
        return self._packed

    @property
    def final(self) -> DBuffer:
        """The gradients at the optimizer's placement, sharing ``main_grad``'s memory; meaningful when FINAL."""
        return self._final

    def set_trained(self, index: int, trained: bool) -> None:
        """Expect a gradient of parameter ``index`` in each backward, or none."""
        self._trained[index] = trained
        self.num_trained = sum(self._trained)

    def replace(self, index: int, parameter: nn.Parameter) -> None:
        """Show gradients of parameter ``index`` on another object."""
        self._parameters = (*self._parameters[:index], parameter, *self._parameters[index + 1 :])
        if self._sums is not None:
            self._sums.follow(self._parameters)

    @property
    def num_arrived(self) -> int:
        """How many parameters got a gradient since ``close``."""
        return self._num_arrived

    @property
    def is_partial(self) -> bool:
        """Whether ``main_grad`` holds a sum that the parameters do not show yet."""
        return self.state is GradState.PARTIAL

    @property
    def rests_final(self) -> bool:
        """Whether each microbatch's reduction gives what the optimizer reads: no axis is left to reduce at the end."""
        return self._final is self.main_grad and not self.rests_partial

    @property
    def is_filled(self) -> bool:
        """Whether the packed buffer holds gradients that are not reduced yet."""
        return 1 in self._filled

    # ------------------------------------------------------------------ receive

    def observe(self, observer: GradientObserver) -> None:
        """Report to ``observer``, which is referred to weakly."""
        self._observer = weakref.ref(observer)

    def receive(self, index: int, parameter: torch.Tensor) -> None:
        """Take over ``parameter.grad``: add it to the packed buffer and drop autograd's copy.

        It is None where autograd has none, or all of it came as products.
        """
        gradient = _get_grad(parameter)
        _set_grad(parameter, None)
        if self._turns is not None:
            self._turns.take(self._small.pack)
        if gradient is not None:
            if not self._is_begun:
                self._begin_once()
            if not self._trained[index]:
                return
            if self._copies and not self._filled[index] and gradient.layout is _STRIDED:
                self._small.copy(index, gradient)
            else:
                self._add(index, gradient)
            self._filled[index] = 1
        elif not self._multiplied[index]:
            if not parameter.requires_grad:
                self._follow_freezing()
            return
        self._multiplied[index] = 0
        self.missing[index] = 0
        is_first = not self._num_arrived
        # One from a backward inside of it, by reentrant checkpointing, need not be all of the gradient.
        if not self._arrived[index] and self.task == _graph_task():
            self._arrived[index] = 1
            self._num_arrived += 1
        # Only the first and the last of a backward mean anything to the schedule.
        if is_first or self._num_arrived == self.num_trained:
            self._report()

    def _report(self) -> None:
        observer = self._observer() if self._observer is not None else None
        if observer is not None:
            observer.gradient_arrived()

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        self._small.pack()
        gradient = self._owner_faces.local_gradient(index, gradient)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        accumulate(gradient, self._views[index], scale=self._pack_scale, overwrite=not self._filled[index])

    def takes_products(self) -> bool:
        """Whether the scale of gradients is a power of two, so that a scaled product is rounded as an unscaled one."""
        return math.frexp(self._pack_scale)[0] == 0.5

    def receive_product(self, index: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add ``left @ right`` to the packed gradient of a parameter; ``receive`` says when all of it is there."""
        if self._turns is not None:
            self._turns.take(self._small.pack)
        self._begin_once()
        if not self._trained[index]:
            return
        self._small.pack()
        add_product(left, right, self._views[index], scale=self._pack_scale, overwrite=not self._filled[index])
        self._filled[index] = self._multiplied[index] = 1

    def _begin_once(self) -> None:
        if not self._is_begun:
            self._follow_freezing()
            if self.num_trained:
                self._is_begun = True
                self._copies = self._pack_scale == 1.0 and not self._owner_faces.has_splits
                self._begin()

    def _follow_freezing(self) -> None:
        """Take notice of parameters that were frozen since forward, which accumulate nothing as in any model."""
        frozen = self._owner_faces.frozen_since_used()
        for index in frozen:
            self._owner_faces.set_requires_grad(index, False)
            self.set_trained(index, False)
        observer = self._observer() if self._observer is not None else None
        if frozen and observer is not None:
            observer.follow_gradients()

    def _begin(self) -> None:
        observer = self._observer() if self._observer is not None else None
        if observer is not None:
            self._backward = observer.begin_backward()
        self.wait()
        if not self._is_twin:
            self._take_over()
        if self.rests_partial:
            self._filled = bytearray(b"\0" if self.state is GradState.EMPTY else b"\1") * len(self._parameters)
        elif not self._packed.is_allocated:
            if observer is not None:
                observer.before_packing()
            self._packed.reallocate_storage()
            for gap in self._gaps:
                gap.zero_()

    @property
    def _pack_scale(self) -> float:
        return 1.0 / self.divisor if self.rests_partial else self._wire_scale

    @property
    def _wire_scale(self) -> float:
        # fp16 sums of many ranks overflow and fp16 averages underflow, so half of the division (in powers of two) is
        # done before.
        if self._packed.dtype is not torch.float16:
            return 1.0
        return 2.0 ** -(math.frexp(max(self.divisor, 1.0))[1] // 2)

    # ------------------------------------------------------------------ reduce

    def close(self, *, reduce: bool) -> None:
        """End this backward's part of the group; ``wait`` completes what is issued here.

        Args:
            reduce: issue the reduction of the packed buffer and its fold into ``main_grad``, with zeros for parameters
                that got no gradient here (other ranks may have one). False keeps it for the next backward to add to.
        """
        if self._turns is not None:
            self._turns.take(self._small.pack)
        self._small.pack()
        num_arrived, self._num_arrived = self._num_arrived, 0
        self._arrived = bytearray(len(self._parameters))
        self._is_begun = False
        if not reduce and not self.rests_partial:
            return
        if not num_arrived and not self.is_filled:
            self._follow_freezing()
            if not any(self._trained):
                return
            self._begin()
        self._fill_missing()
        observer = self._observer() if reduce and 1 in self.missing and self._observer is not None else None
        if observer is not None:
            observer.gradients_missing()
        if self.rests_partial:
            self.state = GradState.PARTIAL
        else:
            self._reduce()
        self._filled = bytearray(len(self._parameters))

    def _reduce(self) -> None:
        overwrite = self.state is GradState.EMPTY
        scale = 1.0 / (self.divisor * self._wire_scale)
        self._tickets.append(self.reduction.submit(scale, overwrite=overwrite))
        self.state = GradState.PARTIAL

    def _fill_missing(self) -> None:
        if 0 in self._filled:
            for index, filled in enumerate(self._filled):
                if not filled:
                    self._views[index].zero_()

    @property
    def is_reducing(self) -> bool:
        """Whether a reduction was issued that nobody has waited for."""
        return bool(self._tickets)

    def wait(self) -> None:
        """Make compute wait for the reduction and release the packed buffer."""
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wait()
        if tickets:
            self._packed.release_storage()

    def abandon(self, backward: int) -> None:
        """Forget what a backward that raised left here; ``.grad`` refuses to be read until it is dropped.

        Args:
            backward: the number of that backward; nothing happens where it brought no gradient, or all of them.
        """
        if self._backward == backward and self._sums is not None and self._sums.is_under_way:
            self._drop()
            if self._sums.is_thrown_away(self._shown()):
                self._sums.end()
            else:
                self._sums.show()
                self._sums.is_void = True

    def discard(self) -> None:
        """Drop a sum under way, and ``.grad`` with it."""
        if self._sums is not None and self._sums.is_under_way:
            self._drop()
            clear_grads(self._parameters)
            self._sums.forget()
            self._sums.end()

    def _drop(self) -> None:
        self.wait()
        self._small.drop()
        self._arrived = bytearray(len(self._parameters))
        self._filled = bytearray(len(self._parameters))
        self._multiplied = bytearray(len(self._parameters))
        self._num_arrived = 0
        self._is_begun = False
        if not self.rests_partial:
            self._packed.release_storage()
        self._carry = None
        self.state = GradState.EMPTY

    # ------------------------------------------------------------------ main_grad over microbatches

    @property
    def has_sum_under_way(self) -> bool:
        """Whether gradients are accumulated that are not final."""
        return self._sums is not None and self._sums.is_under_way

    @property
    def is_void(self) -> bool:
        """Whether a backward raised and left the sum incomplete."""
        return self._sums is not None and self._sums.is_void

    def _take_over(self) -> None:
        """Begin a sum, or go on with it: what ``.grad`` was counts as a part of it."""
        if self._sums is None:
            self._sums = PendingSums(self._parameters, self._final_gradients(), _describer(self))
        if self._sums.is_under_way:
            added = bytearray(map(operator.gt, self._trained, self._sums.wanted))
            self.missing = _either(self.missing, added)
            self._sums.wanted = _either(self._trained, self._sums.wanted)
            self.show_pending()
            return
        shown = self._shown()
        self._had = bytearray(map(self._has_had, range(len(shown)), shown))
        self.missing = bytearray(self._trained)
        if not any(_given(shown)):
            self.state = GradState.EMPTY
            self._sums.begin(bytearray(self._trained))
        elif self.state is GradState.EMPTY:
            self._sums.begin(_either(self._trained, _given(shown)))
            self._adopt_direct(shown)
            self._sums.show()
        else:
            self._adopt_user_gradients(shown)
            clear_grads(self._parameters)
            self._sums.begin(_either(self._trained, _given(shown)))
            self.state = GradState.PARTIAL
            if self._final is not self.main_grad:
                # The memory around the final slice holds what the last reduction left: keep the slice aside, start
                # over.
                self._carry = self._final.local_buffer.clone()
                self.state = GradState.EMPTY

    def _has_had(self, index: int, shown: torch.Tensor | None) -> bool:
        """Whether a plain model would have a gradient beside the one that is summed up next."""
        assert self._sums is not None
        if self._sums.sum_of(index, shown) is None:
            return shown is not None
        # Of a sum that was set to zero: a sum of nothing is none still.
        return bool(self._had[index] or not self.missing[index])

    def show_pending(self) -> None:
        """Let ``.grad`` of all parameters of a sum under way say so."""
        assert self._sums is not None
        shown = self._shown()
        if not self._sums.is_untouched(shown):
            self._adopt_direct(shown)
        self._sums.show()

    def _adopt_direct(self, shown: Sequence[torch.Tensor | None]) -> None:
        """Take what lies in ``.grad`` beside a sum as something to add to it in the end."""
        assert self._sums is not None
        for index, gradient in enumerate(shown):
            pending = self._sums.sum_of(index, gradient)
            if pending is not None:
                if pending.is_added:
                    self.missing[index] = 0
                pending.is_zeroed = False
            elif gradient is not None:
                self._sums[index].add(self._owner_faces.own_rows(index, gradient))
                self._sums.wanted[index] = self._had[index] = 1

    def settle(self) -> None:
        """Take notice, before a backward, of what users did to ``.grad`` while a sum was under way: throw it away.

        Raises:
            StateError: a backward has raised, and ``.grad`` was not dropped since.
        """
        sums = self._sums
        if sums is None or not sums.is_under_way:
            return
        dropped = []
        for index, (gradient, is_wanted) in enumerate(zip(self._shown(), sums.wanted, strict=True)):
            pending = sums.sum_of(index, gradient)
            if pending is None:
                sums[index].forget()
            if is_wanted and (pending is None or pending.is_zeroed):
                dropped.append(index)
        if len(dropped) == sum(sums.wanted):
            self._drop()
            sums.end()
            return
        if sums.is_void:
            raise StateError(self._describe(next(i for i, one in enumerate(sums.wanted) if one and i not in dropped)))
        for index in dropped:
            self._drop_one(index)

    def _drop_one(self, index: int) -> None:
        assert self._sums is not None
        self._had[index] = self._has_had(index, self._shown()[index])
        self._sums.wanted[index] = self.missing[index] = self._trained[index]
        self._filled[index] = 0
        if self.state is GradState.PARTIAL:
            self.main_grad.get_local_tensor(index).zero_()
        if self._carry is not None:
            self._final.layout.piece(index, self._carry).zero_()

    def _describe(self, index: int) -> str:
        name = f"{self.name}: the gradient of parameter {self._owner_faces.name_of(index)!r}"
        if self._sums is not None and self._sums.is_void:
            return (
                f"{name} is incomplete, because the last backward raised. Drop it, with what was accumulated before: "
                "call zero_grad() of the optimizer or the model, or model.reset_iter_state()."
            )
        return (
            f"{name} is a sum under way, not reduced over all ranks yet. Run the last microbatch outside of no_sync() "
            "and of microbatch(model, False) before .grad is read or an optimizer steps; after a backward that raised "
            "call zero_grad() first."
        )

    def _shown(self) -> list[torch.Tensor | None]:
        return grads_of(self._parameters)

    def _adopt_user_gradients(self, shown: Sequence[torch.Tensor | None]) -> None:
        for index, gradient in enumerate(shown):
            mine = self._final.get_local_tensor(index)
            if gradient is None:
                mine.zero_()
            elif not self._faces or gradient is not self._faces[index]:
                rows = self._owner_faces.own_rows(index, gradient)
                if rows.data_ptr() != mine.data_ptr():
                    mine.view(-1).copy_(rows.reshape(-1))

    def complete(self) -> None:
        """Reduce the axes that still hold partial sums; ``show`` sets ``.grad`` of the sharded parameters then."""
        if self.state is not GradState.PARTIAL:
            return
        if self._final is not self.main_grad:
            self.reduction.finish()
            if self._carry is not None:
                self._final.local_buffer.add_(self._carry)
                self._carry = None
        self._add_direct_gradients()
        self.state = GradState.FINAL

    def _add_direct_gradients(self) -> None:
        assert self._sums is not None
        shown = self._shown()
        if self._sums.is_untouched(shown):
            return
        self._adopt_direct(shown)
        for index in range(len(shown)):
            rows = self._sums[index].added
            if rows is not None:
                self._final.get_local_tensor(index).view(-1).add_(rows.reshape(-1))

    def settled(self) -> DBuffer | None:
        """Return the final gradients, with what the user did to ``.grad`` taken over; None where there are none.

        ``.grad`` may be the user's own although no backward made any.

        Raises:
            StateError: a sum is under way.
        """
        if self._sums is not None and self._sums.is_under_way:
            for index, gradient in enumerate(self._shown()):
                pending = self._sums.sum_of(index, gradient)
                if pending is not None:
                    pending.values()
        if self.state is GradState.PARTIAL:
            return None
        shown = self._shown()
        if all(gradient is None for gradient in shown):
            return None
        self._adopt_user_gradients(shown)
        return self._final

    def twin(self) -> GradientBuffer:
        """Return an empty one of the same parameters, strategy and reduction, for gradients that nobody accumulates."""
        made = GradientBuffer(self._template, replace(self._spec, fuses_weight_gradients=False), self._owner_faces)
        made.rename(f"{self.name}: gradients asked for")
        made.divisor, made._is_twin = self.divisor, True
        made.reduction.hook, made.reduction.function = self.reduction.hook, self.reduction.function
        return made

    def collect(self, gradients: Mapping[int, torch.Tensor | None]) -> DBuffer:
        """Reduce these gradients of gathered parameters, by index, and return them all; ``.grad`` is left alone."""
        self._begin_once()
        for index, gradient in gradients.items():
            if gradient is not None:
                self._add(index, gradient)
                self._filled[index] = 1
        self.close(reduce=True)
        self.wait()
        if self._final is not self.main_grad:
            self.reduction.finish()
        return self._final

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply the gradients that ``settled`` returned, and the user's own tensors where they are not those."""
        for tensor in (self._final.local_buffer, *outside(self._shown(), self._faces, self._final)):
            tensor.mul_(factor.to(tensor) if isinstance(factor, torch.Tensor) else factor)

    def match_parameter_dtype(self) -> None:
        """Show gradients in the parameters' dtype, which PyTorch's optimizers need; ``restore_dtype`` undoes it."""
        if self._final.dtype is not self._template.dtype and self.state is GradState.FINAL:
            self._cast.show(self._parameters, self._shown(), self._faces, self._final)

    def restore_dtype(self) -> None:
        """Show the gradients themselves again after ``match_parameter_dtype``."""
        self._cast.take_back()

    def show(self) -> None:
        """Set ``.grad`` of every sharded parameter to its part of the final gradients, but of those in ``missing``."""
        faces, wanted = self._final_gradients(), self._trained
        if self._sums is not None and self._sums.is_under_way:
            if self.num_trained < len(faces):
                # One that was frozen in between keeps what was accumulated before.
                wanted = _either(self._trained, self._sums.wanted)
            self._sums.forget()
            self._sums.end()
        if 1 in self.missing:
            # They keep what they had, and nothing was accumulated of which hooks could be told.
            clear_grads(itertools.compress(self._parameters, self.missing))
            assign_grads(self._parameters, faces, bytes(map(operator.and_, self.missing, self._had)))
            wanted = bytearray(map(operator.gt, wanted, self.missing))
        # Autograd accumulates into the gathered parameters, so it calls no hook of the sharded ones.
        for call_hook in assign_grads(self._parameters, faces, wanted):
            call_hook()

    def _final_gradients(self) -> list[DTensor]:
        if not self._faces:
            self._faces = [
                self._owner_faces.wrap(index, self._final.get_dtensor(index)) for index in range(len(self._parameters))
            ]
            if self._final.dtype is not self._template.dtype:
                for parameter in self._parameters:
                    parameter.grad_dtype = None  # any dtype may be assigned then
        return self._faces


def _either(ones: Iterable[int], others: Iterable[int]) -> bytearray:
    return bytearray(map(operator.or_, ones, others))


def _given(gradients: Iterable[torch.Tensor | None]) -> Iterable[int]:
    return map(operator.is_not, gradients, repeat(None))


def _describer(buffer: GradientBuffer) -> Callable[[int], str]:
    """Return what the pending gradients ask for their error; they must not keep the buffer alive."""
    reference = weakref.ref(buffer)

    def describe(index: int) -> str:
        owner = reference()
        return "the model of this gradient is gone" if owner is None else owner._describe(index)

    return describe


class GradState(enum.Enum):
    """What ``main_grad`` holds: nothing, a sum not reduced over all axes yet, or what the optimizer may read."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """What a gradient buffer is built from besides its weights.

    Attributes:
        placements: the strategy. reduce_dtype: of the packed buffer and the wire. main_dtype: of ``main_grad``.
        divisor: the sum over ranks is divided by it.
        device: where gradients are produced and reduced.
        is_offloaded: ``main_grad`` lies in CPU memory, with the main weights. is_pinned: in pages that a GPU writes.
        fuses_weight_gradients: linear layers may multiply gradients into the packed buffer; "wide": of a wider dtype.
    """

    placements: Placements
    reduce_dtype: torch.dtype
    main_dtype: torch.dtype
    divisor: float
    device: torch.device
    is_offloaded: bool = False
    is_pinned: bool = False
    fuses_weight_gradients: bool | str = True


class GradientObserver(Protocol):
    """Who is told about a buffer's gradients."""

    def begin_backward(self) -> int:
        """Note that a backward is under way, and return its number."""

    def follow_gradients(self) -> None:
        """Parameters were frozen since forward."""

    def before_packing(self) -> None:
        """A packed buffer is about to be allocated."""

    def gradients_missing(self) -> None:
        """A buffer is about to be reduced without gradients of some parameters."""

    def gradient_arrived(self) -> None:
        """A gradient was packed."""


# A replacement for the reduce-scatter: (output, input, group, op, async_op) -> handle or None, as FSDP2's
# ``ReduceScatter``.
ReduceFunction = Callable[
    [torch.Tensor, torch.Tensor, dist.ProcessGroup, dist.ReduceOp.RedOpType, bool], "dist.Work | None"
]

Hook = Callable[[torch.Tensor], None]


class Reduction:
    """The way of one group's gradients from the packed buffer to the optimizer.

    Args:
        packed: receives autograd's gradients. reduced: the slice of it that its reduction leaves to this rank.
        main_grad: the accumulator. final: the slice of it that the optimizer reads.
        is_offloaded: ``main_grad`` lies in CPU memory beside the main weights. is_pinned: in pages that a GPU writes.

    Attributes:
        hook: called with each reduced gradient (1-D, averaged) before it is accumulated, to reduce it further.
        function: used instead of the reduce-scatter.
    """

    def __init__(
        self, packed: DBuffer, reduced: DBuffer, main_grad: DBuffer, final: DBuffer, *, is_offloaded: bool,
        is_pinned: bool,
    ) -> None:  # fmt: skip
        self.hook: Hook | None = None
        self.function: ReduceFunction | None = None
        self._packed, self._reduced = packed, reduced
        self._route = Route(packed, reduced)
        self._main_grad, self._final = main_grad, final
        self.is_offloaded = is_offloaded
        self._is_pinned = is_pinned
        self._staging: torch.Tensor | None = None

    def submit(self, scale: float, *, overwrite: bool) -> Ticket:
        """Issue the reduction of the packed buffer on its lane; ``wait`` sees it folded into ``main_grad``.

        Args:
            scale: the sum over ranks is multiplied by it.
            overwrite: ``main_grad`` holds nothing yet.
        """
        # Not self: a ticket that nobody waits for must not keep this object alive.
        reduced, main_grad = self._reduced, self._main_grad
        # Where axes are left to reduce at the end, the hook's turn comes after them, in ``finish``.
        hook = self.hook if self._final is self._main_grad else None
        staging = self._staged()
        # A hook sees averages, so scaling comes before it.
        factor = scale if hook is None else 1.0

        def fold() -> None:
            source = reduced.local_buffer
            if hook is not None:
                hook(source.mul_(scale))
            if staging is None:
                accumulate(source, main_grad.local_buffer, scale=factor, overwrite=overwrite)
            else:
                staging.copy_(source, non_blocking=True)

        def fold_on_host() -> None:
            assert staging is not None
            accumulate(staging, main_grad.local_buffer, scale=factor, overwrite=overwrite)

        on_host = None if staging is None else fold_on_host
        return lane("reduce", self._packed.device).submit(self._operation(), fold, on_host)

    def _operation(self) -> Callable[[list[dist.Work] | None], None]:
        packed, reduced, function, route = self._packed, self._reduced, self.function, self._route

        def run(works: list[dist.Work] | None) -> None:
            if function is None:
                route(works)
                return
            group = only_flat_axis(reduced.axes, reduced.placements).reduce_group
            output, whole = reduced.local_buffer, packed.local_buffer
            work = function(output, whole, group, dist.ReduceOp.SUM, works is not None)
            if works is not None and work is not None:
                works.append(work)

        return run

    def _staged(self) -> torch.Tensor | None:
        """Return the CPU memory by which reduced gradients reach an offloaded ``main_grad``; None for any other."""
        if self.is_offloaded and self._staging is None:
            numel, pinned = self._reduced.local_buffer.numel(), self._is_pinned and torch.cuda.is_available()
            self._staging = torch.empty(numel, dtype=self._reduced.dtype, pin_memory=pinned)
        return self._staging

    def finish(self) -> None:
        """Reduce ``main_grad`` over the axes that still hold partial sums, into ``final``."""
        main_grad, final = self._main_grad, self._final
        if not self.is_offloaded:
            main_grad.redistribute(final.placements, out=final)
            if self.hook is not None:
                self.hook(final.local_buffer)
            return
        # Collectives run where compute does.
        like, device = main_grad, self._packed.device
        staged = DBuffer.from_plan(like.plan, like.mesh, like.placements, like.dtype, device, name=like.name)
        staged.local_buffer.copy_(main_grad.local_buffer)
        reduced = staged.redistribute(final.placements)
        if self.hook is not None:
            self.hook(reduced.local_buffer)
        final.local_buffer.copy_(reduced.local_buffer)
