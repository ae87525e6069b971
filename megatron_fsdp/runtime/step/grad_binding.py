"""GradBinding: ``main_grad`` as the ``.grad`` of the sharded parameters, and what users do to that.

A user may set ``.grad`` to None, zero it, add to it, assign another, freeze its parameter or step too early, at any
time between two backwards. Whatever backward brings has to be added to what a plain model would have by then. While a
sum is not reduced over all ranks, ``.grad`` shows a stand-in that says so when it is read (``unreduced_grads.py``).
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer, FlatDTensor
from dbuffer.dtensor.parameter import GradDrops
from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.guards.shown_gradients import CastGradients, allow_any, refuse_late
from megatron_fsdp.runtime.guards.unreduced_grads import PendingSums, adopt_direct, describe, has_had
from megatron_fsdp.runtime.lifecycle.param_layout import own_rows
from megatron_fsdp.runtime.step.fsdp_params import FSDPParams, grads_of, outside
from megatron_fsdp.runtime.step.grad_state import CHANGES, GradState
from megatron_fsdp.runtime.step.lanes import is_capturing

__all__ = ["GradBinding"]

_GRAD: Any = torch._C.TensorBase.grad
_get, _set = _GRAD.__get__, _GRAD.__set__
_get_hooks = operator.attrgetter("_post_accumulate_grad_hooks")


class GradBinding:
    """What the gradients of one parameter group are between backwards.

    Args:
        main_grad: the accumulator. final: the slice of it that the optimizer reads.
        fsdp_params: the parameters; the sharded ones' ``.grad`` is set when gradients are final, and read to see
            ``zero_grad``.
        dtype: of the main weights.

    Attributes:
        state: changed by ``become`` alone. name: of the unit, for messages.
        gaps: views of what no sum writes, which is zeros.
        keeps: the memory of ``main_grad`` stays when every ``.grad`` is None.
        is_taken: every ``.grad`` is None, but somebody has a tensor that lies in ``main_grad``.
        is_under_way: gradients are accumulated that are not final. wanted: of these parameters (nonzero).
        is_void: that sum is none any more, because a backward raised.
        sums: what ``.grad`` shows of it; None where nothing has had to be shown yet.
        trained: by parameter, whether a gradient of it is expected in each backward (nonzero).
        missing: parameters of which this sum has no gradient so far (``missing_gradients.py``).
    """

    def __init__(self, main_grad: DBuffer, final: DBuffer, fsdp_params: FSDPParams, dtype: torch.dtype) -> None:
        self.name = main_grad.name
        self.state = GradState.EMPTY
        self.main_grad, self.final = main_grad, final
        self.fsdp_params = fsdp_params
        self.parameters = tuple(fsdp_params.sharded_params)
        self._dtype = dtype
        self.trained = bytearray(int(parameter.requires_grad) for parameter in self.parameters)
        self.missing = bytearray(len(self.parameters))
        # Parameters that had a gradient before this sum began.
        self.had = bytearray(len(self.parameters))
        # What ``final`` held when this sum began, where its memory takes part in the sum.
        self.carry: torch.Tensor | None = None
        self._gradients: list[DTensor] = []
        self._locals: list[torch.Tensor] = []
        # All of them are looked at when the last one that had a gradient drops it.
        self._drops = GradDrops(_teller(self))
        # What ``_count_references`` returns while nobody has any.
        self._references: tuple[int, ...] = ()
        self._slices: dict[tuple[int, int], torch.Tensor] = {}
        self.gaps: Sequence[torch.Tensor] = ()
        self.keeps = self.is_taken = False
        self.watch()
        self.is_under_way = self.is_void = False
        self.wanted = bytearray()
        self.sums: PendingSums | None = None
        self._cast = CastGradients(dtype, fsdp_params.wrap)

    def become(self, state: GradState) -> None:
        """Change the state.

        Raises:
            StateError: gradients cannot go from what they are to that.
        """
        if (self.state, state) not in CHANGES:
            raise StateError(
                f"{self.name}: main_grad is {self.state.value} and cannot become {state.value}. This is an error of "
                "the engine or of code that calls its methods; please report it."
            )
        self.state = state

    # ------------------------------------------------------------------ memory

    def hold(self) -> bool:
        """Bring the memory of ``main_grad`` back, with zeros in ``gaps`` alone; return whether it was away."""
        storage = self.main_grad.storage
        # A graph writes to the same memory whenever it is replayed.
        self.keeps = self.keeps or is_capturing(self.main_grad.device)
        if storage.is_allocated:
            return False
        storage.reallocate()
        self._drops.last = None
        for gap in self.gaps:
            gap.zero_()
        if not self._references:
            self._references = self._count_references()
        return True

    def keep(self, keeps: bool) -> None:
        """Have the memory of ``main_grad`` from now on also while there are no gradients, or no more."""
        self.keeps = keeps
        if keeps:
            self.hold()
        else:
            self.dropped()

    def let_go(self) -> None:
        """Give the memory of ``main_grad`` back, unless somebody has a tensor that lies in it.

        A plain model's gradients live as long as anybody refers to them, and so does this memory.
        """
        storage = self.main_grad.storage
        if self.keeps or not storage.is_allocated or not storage.nbytes:
            return
        self.is_taken = bool(self._references) and self._is_held()
        if not self.is_taken:
            self.become(GradState.EMPTY)
            storage.release()

    def dropped(self) -> None:
        """Take notice that a ``.grad`` was set to None."""
        if self.state is GradState.PARTIAL or self.is_under_way:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in reversed(self.parameters):
                if _get(parameter) is not None:
                    self._drops.last = weakref.ref(parameter)
                    return
        self.let_go()

    def clear(self) -> None:
        """Set every ``.grad`` to None."""
        _clear_grads(self.parameters)
        self.dropped()

    def slice(self, start: int, stop: int) -> torch.Tensor:
        """Return elements of ``final``, 1-D; the same tensor each time."""
        key = (start, stop)
        if key not in self._slices:
            self._slices[key] = self.final.local_buffer[start:stop]
            if self._references:
                self._references = (self._references[0] + 1, *self._references[1:], _IDLE)
        return self._slices[key]

    def _is_held(self) -> bool:
        """Whether somebody has a tensor that lies in the memory."""
        found = self._count_references()
        is_reduced_last = self.final is not self.main_grad and self.main_grad.device.type == "cpu"
        for _ in range(_LOOKS if is_reduced_last else 0):
            if found == self._references or found[1:] != self._references[1:]:
                break
            # A thread of gloo's may have ended the last reduction and not let go of its tensors yet.
            time.sleep(_PAUSE_S)
            found = self._count_references()
        return found != self._references

    def _count_references(self) -> tuple[int, ...]:
        """Return how many tensors lie in the memory, and how often each that was ever shown is referred to."""
        storage = self.main_grad.storage.tensor.untyped_storage()
        shown = itertools.chain(self._gradients, self._locals, self._slices.values())
        return torch._C._storage_Use_Count(storage._cdata), *map(sys.getrefcount, shown)

    def watch(self) -> None:
        """Hear of each ``.grad`` of the parameters that is set to None, in place of whoever did."""
        self._drops.last = None
        for parameter in self.parameters:
            if isinstance(parameter, FlatDTensor):
                parameter.on_grad_dropped = self._drops

    # ------------------------------------------------------------------ parameters

    def replace(self, index: int, parameter: nn.Parameter) -> None:
        """Show gradients of parameter ``index`` on another object."""
        self.parameters = (*self.parameters[:index], parameter, *self.parameters[index + 1 :])
        self.watch()
        if self._gradients:
            self._tell_owners()
        if self.sums is not None:
            self.sums.follow(self.parameters)

    # ------------------------------------------------------------------ a sum begins

    def begin_sum(self) -> None:
        """Begin a sum, or go on with it: what ``.grad`` was counts as a part of it."""
        if self.is_under_way:
            added = bytearray(map(operator.gt, self.trained, self.wanted))
            self.missing = _either(self.missing, added)
            self.wanted = _either(self.trained, self.wanted)
            self.show_pending()
            return
        self._final_gradients()
        shown = grads_of(self.parameters)
        self.missing, self.wanted = bytearray(self.trained), bytearray(self.trained)
        if True not in _given(shown):
            self.had = bytearray(len(shown))
            self.become(GradState.EMPTY)
            self.is_under_way = True
            return
        self.had = bytearray(map(functools.partial(has_had, self), range(len(shown)), shown))
        self.wanted = _either(self.trained, _given(shown))
        if self.state is GradState.EMPTY:
            self.is_under_way = True
            adopt_direct(self, shown)
            self.pending().show(self.wanted)
        else:
            self._adopt_user_gradients(shown)
            self.is_under_way = True
            _clear_grads(self.parameters)
            self.become(GradState.PARTIAL)
            if self.final is not self.main_grad:
                # The memory around the final slice holds what the last reduction left.
                self.set_aside()

    def set_aside(self) -> None:
        """Keep what ``final`` holds for ``complete`` to add, and start over."""
        kept = self.final.local_buffer.clone()
        self.carry = kept if self.carry is None else kept.add_(self.carry)
        self.become(GradState.EMPTY)

    def pending(self) -> PendingSums:
        """Return what stands for the sum under way in ``.grad``."""
        if self.sums is None:
            self.sums = PendingSums(self.parameters, self._final_gradients(), _describer(self))
        return self.sums

    def show_pending(self) -> None:
        """Let ``.grad`` of all parameters of a sum under way say so."""
        sums, shown = self.pending(), grads_of(self.parameters)
        if not sums.is_untouched(shown):
            adopt_direct(self, shown)
        sums.show(self.wanted)

    # ------------------------------------------------------------------ a sum is thrown away

    def void(self) -> None:
        """Let ``.grad`` of a sum that a backward left incomplete refuse to be read until it is dropped."""
        if not self.is_void:
            self.pending().show(self.wanted)
            self.is_void = True

    def empty(self) -> None:
        """Hold nothing of a sum under way."""
        self.carry = None
        self.become(GradState.EMPTY)
        self.let_go()

    def end_sum(self, *, clears: bool) -> None:
        """Have no sum under way any more; ``clears``: where ``.grad`` says that there is one."""
        if clears:
            _clear_grads(self.parameters)
        self.is_under_way = self.is_void = False
        if self.sums is not None:
            self.sums.end()

    # ------------------------------------------------------------------ a sum is complete

    def complete(self) -> None:
        """Take notice that no axis holds partial sums; ``show`` sets ``.grad`` of the sharded parameters then."""
        if self.carry is not None:
            self.final.local_buffer.add_(self.carry)
            self.carry = None
        self._add_direct_gradients()
        self.become(GradState.FINAL)

    def _add_direct_gradients(self) -> None:
        shown = grads_of(self.parameters)
        if self.sums.is_untouched(shown) if self.sums is not None else True not in _given(shown):
            return
        adopt_direct(self, shown)
        for index in range(len(shown)):
            rows = self.pending()[index].added
            if rows is not None:
                self.final.get_local_tensor(index).view(-1).add_(rows.reshape(-1))

    def show(self) -> None:
        """Set ``.grad`` of every sharded parameter to its part of the final gradients, but of those in ``missing``."""
        gradients, wanted = self._final_gradients(), self.trained
        self._drops.last = None
        is_sum = self.is_under_way
        if is_sum and 0 in self.trained:
            # One that was frozen in between keeps what was accumulated before.
            wanted = _either(self.trained, self.wanted)
        if 1 in self.missing:
            # They keep what they had, and nothing was accumulated of which hooks could be told.
            _clear_grads(itertools.compress(self.parameters, self.missing))
            _assign_grads(self.parameters, gradients, bytes(map(operator.and_, self.missing, self.had)))
            wanted = bytearray(map(operator.gt, wanted, self.missing))
        try:
            hooks = _assign_grads(self.parameters, gradients, wanted)
        except RuntimeError as error:
            refuse_late(self.name, self.fsdp_params, self.final.dtype, error)
        if is_sum:
            self.end_sum(clears=False)
        # Autograd accumulates into the gathered parameters, so it calls no hook of the sharded ones.
        for call_hook in hooks:
            call_hook()
        if 1 not in wanted:
            self.dropped()

    def _final_gradients(self) -> list[DTensor]:
        if not self._gradients:
            self.hold()
            if self.final.dtype is not self._dtype:
                allow_any(self.parameters)
            indices = range(len(self.parameters))
            self._gradients = [
                self.fsdp_params.wrap(index, self.final.get_dtensor(index, is_view=True)) for index in indices
            ]
            self._locals = [gradient._local_tensor for gradient in self._gradients]
            self._tell_owners()
            self._references = self._count_references()
        return self._gradients

    def _tell_owners(self) -> None:
        for gradient, parameter in zip(self._gradients, self.parameters, strict=True):
            if isinstance(gradient, FlatDTensor):
                gradient.gradient_of = weakref.ref(parameter)

    # ------------------------------------------------------------------ the optimizer reads

    def settled(self) -> DBuffer | None:
        """Return the final gradients, with what the user did to ``.grad`` taken over; None where there are none.

        ``.grad`` may be the user's own although no backward made any.

        Raises:
            StateError: a sum is under way.
        """
        if self.sums is not None and self.is_under_way:
            for index, gradient in enumerate(grads_of(self.parameters)):
                pending = self.sums.sum_of(index, gradient)
                if pending is not None:
                    pending.values()
        if self.state is GradState.PARTIAL:
            return None
        shown = grads_of(self.parameters)
        if all(gradient is None for gradient in shown):
            return None
        if self.hold():
            self.main_grad.zero_()
        self._adopt_user_gradients(shown)
        return self.final

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply the gradients that ``settled`` returned, and the user's own tensors where they are not those."""
        for tensor in (self.final.local_buffer, *outside(grads_of(self.parameters), self._gradients, self.final)):
            tensor.mul_(factor.to(tensor) if isinstance(factor, torch.Tensor) else factor)

    def match_parameter_dtype(self) -> None:
        """Show gradients in the parameters' dtype, which PyTorch's optimizers need; ``restore_dtype`` undoes it."""
        if self.final.dtype is not self._dtype and self.state is GradState.FINAL:
            self._cast.show(self.parameters, grads_of(self.parameters), self._gradients, self.final)

    def restore_dtype(self) -> None:
        """Show the gradients themselves again after ``match_parameter_dtype``."""
        self._cast.take_back()

    def _adopt_user_gradients(self, shown: Sequence[torch.Tensor | None]) -> None:
        for index, gradient in enumerate(shown):
            if gradient is not None and self._gradients and gradient is self._gradients[index]:
                continue
            mine = self.final.get_local_tensor(index)
            if gradient is None:
                mine.zero_()
            else:
                rows = own_rows(self.fsdp_params, index, gradient)
                if rows.data_ptr() != mine.data_ptr():
                    mine.view(-1).copy_(rows.reshape(-1))


def _teller(binding: GradBinding) -> Callable[[], None]:
    """Return what is called when a ``.grad`` was set to None; it must not keep the buffer alive."""
    reference = weakref.ref(binding)

    def tell_dropped() -> None:
        found = reference()
        if found is not None:
            found.dropped()

    return tell_dropped


_LOOKS, _PAUSE_S = 10, 0.001
# What ``sys.getrefcount`` says of a value that a dictionary alone refers to.
_IDLE = next(map(sys.getrefcount, {0: object()}.values()))


def _either(ones: Iterable[int], others: Iterable[int]) -> bytearray:
    return bytearray(map(operator.or_, ones, others))


def _given(gradients: Iterable[torch.Tensor | None]) -> Iterable[int]:
    return map(operator.is_not, gradients, repeat(None))


def _describer(binding: GradBinding) -> Callable[[int], str]:
    """Return what the pending gradients ask for their error; they must not keep the buffer alive."""
    reference = weakref.ref(binding)

    def words(index: int) -> str:
        owner = reference()
        return "the model of this gradient is gone" if owner is None else describe(owner, index)

    return words


def _clear_grads(parameters: Iterable[torch.Tensor]) -> None:
    """Set ``.grad`` of each parameter to None."""
    with torch._C.DisableTorchFunctionSubclass():
        collections.deque(map(_set, parameters, repeat(None)), maxlen=0)


def _assign_grads(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], wanted: Sequence[int]
) -> list[Callable[[], object]]:
    """Set ``.grad`` of the parameters that are wanted (nonzero); return the calls of their hooks, in order."""
    if 0 in wanted:
        parameters, gradients = (tuple(itertools.compress(each, wanted)) for each in (parameters, gradients))
    with torch._C.DisableTorchFunctionSubclass():
        collections.deque(map(_set, parameters, gradients), maxlen=0)
        all_hooks = list(map(_get_hooks, parameters))
    return [
        functools.partial(hook, parameter)
        for parameter, hooks in zip(parameters, all_hooks, strict=True)
        if hooks
        for hook in hooks.values()
    ]
