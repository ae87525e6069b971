"""GradBinding: ``main_grad`` as the ``.grad`` of the sharded parameters.

A user may set ``.grad`` to None, zero it, add to it, assign another, freeze its parameter or step too early, at any
time between two backwards. Whatever backward brings has to be added to what a plain model would have by then. That is
for ``runtime/grads/shown_grads.py``; here is what becomes of gradients that nobody touches.
"""

from __future__ import annotations

import collections
import enum
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
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer
from dbuffer.dtensor.placed_tensor import GradDrops
from megatron_fsdp.runtime.step.fsdp_params import FSDPParams, grads_of
from megatron_fsdp.runtime.step.streams import Compute

__all__ = ["GradBinding", "GradState", "clear_grads"]

_GRAD: Any = torch._C.TensorBase.grad
_get, _set = _GRAD.__get__, _GRAD.__set__
_get_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
_LOOKS, _PAUSE_S = 10, 0.001


class GradState(enum.Enum):
    """What ``main_grad`` holds: nothing, a sum not reduced over all axes yet, or what the optimizer may read."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FINAL = "final"


class GradBinding:
    """What the gradients of one parameter group are between backwards.

    Args:
        main_grad: the accumulator. final: the slice of it that the optimizer reads.
        fsdp_params: the parameters; the sharded ones' ``.grad`` is set when gradients are final, and read to see
            ``zero_grad``.
        compute: the streams of the device of ``main_grad``; None where it has none.

    Attributes:
        state: what ``main_grad`` holds. name: of the unit, for messages.
        gaps: views of what no sum writes, which is zeros.
        keeps: the memory of ``main_grad`` stays when every ``.grad`` is None.
        is_taken: every ``.grad`` is None, but somebody has a tensor that lies in ``main_grad``.
        is_under_way: gradients are accumulated that are not final. wanted: of these parameters (nonzero).
        trained: by parameter, whether a gradient of it is expected in each backward (nonzero).
        missing: parameters of which this sum has no gradient so far (``missing_gradients.py``).
        had: parameters that had a gradient before this sum began.
        is_void: that sum is none any more, because a backward raised.
        carry: what ``final`` held when this sum began, where its memory takes part in the sum.
        is_shown: whether ``.grad`` shows sums under way, or ever did.
        is_sent_last: whether the last collective of a step sends ``main_grad`` itself, though it is ``final``.
    """

    is_void = False
    is_shown = is_sent_last = False
    carry: torch.Tensor | None = None

    # What users do, and sums that go on: ``runtime/grads/shown_grads.py``.
    keep: Callable[[bool], None]
    clear: Callable[[], None]
    watch: Callable[[], None]
    show_pending: Callable[[], None]
    set_aside: Callable[[], None]
    void: Callable[[], None]
    empty: Callable[[], None]
    settle_sum: Callable[[], bool]
    match_parameter_dtype: Callable[[], None]
    restore_dtype: Callable[[], None]
    _make_gradients: Callable[[], None]
    _go_on: Callable[[], None]
    _begin_with: Callable[[Sequence[torch.Tensor | None]], None]
    _add_direct: Callable[[Sequence[torch.Tensor | None]], None]
    _settle_others: Callable[[], DBuffer | None]
    _show_wanted: Callable[[], bytearray]
    _refuse_late: Callable[[RuntimeError], None]
    _end_pending: Callable[[], None]

    def __init__(self, main_grad: DBuffer, final: DBuffer, fsdp_params: FSDPParams, compute: Compute | None) -> None:
        self.name = main_grad.name
        self.state = GradState.EMPTY
        self.main_grad, self.final = main_grad, final
        self.fsdp_params, self.parameters = fsdp_params, tuple(fsdp_params.sharded_params)
        self.trained = bytearray(int(parameter.requires_grad) for parameter in self.parameters)
        self.missing, self.had, self.wanted = (bytearray(len(self.parameters)) for _ in range(3))
        self.gaps: Sequence[torch.Tensor] = ()
        self.keeps = self.is_taken = self.is_under_way = False
        self._gradients: list[DTensor] = []
        self._locals: list[torch.Tensor] = []
        self._compute = compute
        # All of them are looked at when the last one that had a gradient drops it.
        self._drops = GradDrops(functools.partial(_drop, weakref.ref(self)))
        self._last_one: weakref.ref[torch.Tensor] = weakref.ref(self.parameters[-1])
        # What ``_count_references`` returns while nobody has any.
        self._references: tuple[int, ...] = ()

    # ------------------------------------------------------------------ memory

    def hold(self) -> bool:
        """Bring the memory of ``main_grad`` back, with zeros in ``gaps`` alone; return whether it was away."""
        storage = self.main_grad.storage
        if self._compute is not None and self._compute.streams.is_capturing():
            # A graph writes to the same memory whenever it is replayed.
            self.keeps = True
        if storage.is_allocated:
            return False
        storage.reallocate()
        self._drops.last = None
        for gap in self.gaps:
            gap.zero_()
        if not self._references:
            self._references = self._count_references()
        return True

    def let_go(self) -> None:
        """Give the memory of ``main_grad`` back, unless somebody has a tensor that lies in it.

        A plain model's gradients live as long as anybody refers to them, and so does this memory.
        """
        storage = self.main_grad.storage
        if self.keeps or not storage.is_allocated or not storage.nbytes:
            return
        self.is_taken = bool(self._references) and self._is_held()
        if not self.is_taken:
            self.state = GradState.EMPTY
            storage.release()

    def dropped(self) -> None:
        """Take notice that a ``.grad`` was set to None."""
        if self.state is GradState.PARTIAL or self.is_under_way:
            return
        for parameter, gradient in zip(reversed(self.parameters), reversed(grads_of(self.parameters)), strict=True):
            if gradient is not None:
                self._drops.last = weakref.ref(parameter)
                return
        self.let_go()

    def _is_held(self) -> bool:
        """Whether somebody has a tensor that lies in the memory."""
        found = self._count_references()
        is_reduced_last = (
            self.is_sent_last or self.final is not self.main_grad
        ) and self.main_grad.device.type == "cpu"
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
        shown = itertools.chain(self._gradients, self._locals)
        return torch._C._storage_Use_Count(storage._cdata), *map(sys.getrefcount, shown)

    # ------------------------------------------------------------------ a sum

    def begin_sum(self) -> None:
        """Begin a sum, or go on with it: what ``.grad`` was counts as a part of it."""
        if self.is_under_way:
            self._go_on()
            return
        if not self._gradients:
            self._make_gradients()
        shown = grads_of(self.parameters)
        self.missing, self.wanted = bytearray(self.trained), bytearray(self.trained)
        if any(map(operator.is_not, shown, repeat(None))):
            self._begin_with(shown)
            return
        self.had = bytearray(len(shown))
        self.state = GradState.EMPTY
        self.is_under_way = True

    def end_sum(self, *, clears: bool) -> None:
        """Have no sum under way any more; ``clears``: where ``.grad`` says that there is one."""
        if clears:
            clear_grads(self.parameters)
        self.is_under_way = self.is_void = False
        if self.is_shown:
            self._end_pending()

    def complete(self) -> None:
        """Take notice that no axis holds partial sums; ``show`` sets ``.grad`` of the sharded parameters then."""
        if self.carry is not None:
            self.final.local_buffer.add_(self.carry)
            self.carry = None
        shown = grads_of(self.parameters)
        if any(map(operator.is_not, shown, repeat(None))):
            self._add_direct(shown)
        self.state = GradState.FINAL

    def show(self) -> None:
        """Set ``.grad`` of every sharded parameter to its part of the final gradients, but of those in ``missing``."""
        if not self._gradients:
            self._make_gradients()
        wanted = self.trained
        # Who drops all of them in order is heard of once.
        self._drops.last = self._last_one if 0 not in wanted else None
        is_sum = self.is_under_way
        if 1 in self.missing or (is_sum and 0 in self.trained):
            self._drops.last, wanted = None, self._show_wanted()
        try:
            hooks = _assign_grads(self.parameters, self._gradients, wanted)
        except RuntimeError as error:
            self._refuse_late(error)
            raise
        if is_sum:
            self.end_sum(clears=False)
        # Autograd accumulates into the gathered parameters, so it calls no hook of the sharded ones.
        for call_hook in hooks:
            call_hook()
        if 1 not in wanted:
            self.dropped()

    # ------------------------------------------------------------------ the optimizer reads

    def settled(self) -> DBuffer | None:
        """Return the final gradients, with what the user did to ``.grad`` taken over; None where there are none.

        ``.grad`` may be the user's own although no backward made any.

        Raises:
            StateError: a sum is under way.
        """
        if self.is_under_way or not self._gradients or self.state is GradState.PARTIAL:
            return self._settle_others()
        if not all(map(operator.is_, grads_of(self.parameters), self._gradients)):
            return self._settle_others()
        self.hold()
        return self.final

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply the gradients that ``settled`` returned, and the user's own tensors where they are not those."""
        scaled, shown = [self.final.local_buffer], grads_of(self.parameters)
        if not self._gradients or not all(map(operator.is_, shown, self._gradients)):
            for index, gradient in enumerate(shown):
                local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
                mine = self.final.get_local_tensor(index)
                if local is not None and local.numel() and local.data_ptr() != mine.data_ptr():
                    scaled.append(local)
        for tensor in scaled:
            tensor.mul_(factor.to(tensor) if isinstance(factor, torch.Tensor) else factor)


def _drop(binding: weakref.ref[GradBinding]) -> None:
    found = binding()
    if found is not None:
        found.dropped()


def clear_grads(parameters: Iterable[torch.Tensor]) -> None:
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
    if not any(all_hooks):
        return []
    return [
        functools.partial(hook, parameter)
        for parameter, hooks in zip(parameters, all_hooks, strict=True)
        if hooks
        for hook in hooks.values()
    ]
