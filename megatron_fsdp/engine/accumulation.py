"""Gradient accumulation: ``main_grad`` as the ``.grad`` of the sharded parameters, and what users do to it.

A user may set ``.grad`` to None, set it to zero, add to it, assign another one, freeze its parameter or step too early,
at any time between two backwards. What a backward brings is added to what a plain model would have by then.

While a sum is not reduced over all ranks, ``.grad`` shows a ``PendingGradient``, which raises when it is read.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dbuffer import DBuffer, FlatDTensor
from dbuffer.dtensor.placed_tensor import GradDrops, PlacedTensor
from megatron_fsdp.engine.freshness import CHECKS
from megatron_fsdp.engine.params import FSDPParams, own_rows
from megatron_fsdp.engine.passes import clear_grads, grads_of, hooks_of, set_grads
from megatron_fsdp.engine.streams import compute_of
from megatron_fsdp.errors import StateError
from megatron_fsdp.policy.precision import grad_dtype_of

__all__ = ["GradBinding", "GradState", "PendingGradient", "refuse_pending"]


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
        dtype: of the main weights.

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
        has_exact_norms: whether norms of the gradients are the same however they are sharded.
    """

    is_void = False
    is_shown = is_sent_last = has_exact_norms = False
    carry: torch.Tensor | None = None

    def __init__(self, main_grad: DBuffer, final: DBuffer, fsdp_params: FSDPParams, dtype: torch.dtype) -> None:
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
        self._dtype = dtype
        self._compute = compute_of(main_grad.device)
        # All of them are looked at when the last one that had a gradient drops it.
        self._drops = GradDrops(functools.partial(_drop, weakref.ref(self)))
        self._last_one: weakref.ref[torch.Tensor] = weakref.ref(self.parameters[-1])
        # What ``_count_references`` returns while nobody has any.
        self._references: tuple[int, ...] = ()
        # What ``.grad`` shows of sums under way; nothing where nothing has had to be shown yet.
        self._pending: list[PendingGradient] = []
        self._refuses_steps = False
        # What ``match_parameter_dtype`` has replaced: parameter, gradient, and the ``grad_dtype`` that was allowed.
        self._replaced: list[tuple[torch.Tensor, torch.Tensor, torch.dtype | None]] = []
        self.watch()

    # ------------------------------------------------------------------ memory

    def keep(self, keeps: bool) -> None:
        """Have the memory of ``main_grad`` from now on also while there are no gradients, or no more."""
        self.keeps = keeps
        if keeps:
            self.hold()
        else:
            self.dropped()

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

    def watch(self) -> None:
        """Hear of each ``.grad`` of the parameters that is set to None, in place of whoever did."""
        self._drops.last = None
        for parameter in self.parameters:
            if isinstance(parameter, FlatDTensor):
                parameter.on_grad_dropped = self._drops

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

    def _make_gradients(self) -> None:
        self.hold()
        if self.final.dtype is not self._dtype:
            for parameter in self.parameters:
                if grad_dtype_of(parameter) == "own":
                    # A gradient of any dtype may be assigned where the user did not say which.
                    parameter.grad_dtype = None
        indices = range(len(self.parameters))
        self._gradients = [
            self.fsdp_params.wrap(index, self.final.get_dtensor(index, is_view=True)) for index in indices
        ]
        self._locals = [gradient._local_tensor for gradient in self._gradients]
        self._tell_owners()
        self._references = self._count_references()

    def _tell_owners(self) -> None:
        # Apart, as a name for a gradient would count as a reference to it.
        for gradient, parameter in zip(self._gradients, self.parameters, strict=True):
            if isinstance(gradient, FlatDTensor):
                gradient.gradient_of = weakref.ref(parameter)
            if self.has_exact_norms and isinstance(gradient, PlacedTensor):
                gradient.has_exact_norms = True

    def _count_references(self) -> tuple[int, ...]:
        """Return how many tensors lie in the memory, and how often each that was ever shown is referred to."""
        storage = self.main_grad.storage.tensor.untyped_storage()
        shown = itertools.chain(self._gradients, self._locals)
        return torch._C._storage_Use_Count(storage._cdata), *map(sys.getrefcount, shown)

    # ------------------------------------------------------------------ a sum begins, or goes on

    def begin_sum(self) -> None:
        """Begin a sum, or go on with it: what ``.grad`` was counts as a part of it."""
        if self.is_under_way:
            self._go_on()
            return
        if not self._gradients:
            self._make_gradients()
        shown = grads_of(self.parameters)
        self.missing, self.wanted = bytearray(self.trained), bytearray(self.trained)
        for gradient in shown:
            if gradient is not None:
                self._begin_with(shown)
                return
        self.had = bytearray(len(shown))
        self.state = GradState.EMPTY
        self.is_under_way = True

    def _go_on(self) -> None:
        for index, is_trained in enumerate(self.trained):
            if is_trained and not self.wanted[index]:
                # Unfrozen since the sum began.
                self.missing[index] = self.wanted[index] = 1

    def _begin_with(self, shown: Sequence[torch.Tensor | None]) -> None:
        """Begin a sum where ``.grad`` holds something."""
        self.had = bytearray(gradient is not None for gradient in shown)
        self.wanted = _either(self.trained, self.had)
        if self.state is GradState.EMPTY:
            # The user's own, which ``complete`` adds.
            self.is_under_way = True
            return
        self._adopt_user_gradients(shown)
        self.is_under_way = True
        clear_grads(self.parameters)
        self.state = GradState.PARTIAL
        if self.final is not self.main_grad:
            # The memory around the final slice holds what the last reduction left.
            self.set_aside()

    def set_aside(self) -> None:
        """Keep what ``final`` holds for ``complete`` to add, and start over."""
        kept = self.final.local_buffer.clone()
        self.carry = kept if self.carry is None else kept.add_(self.carry)
        self.state = GradState.EMPTY

    def show_pending(self) -> None:
        """Let ``.grad`` of the parameters whose sum is under way say so, which no optimizer may step.

        What lies there beside the sum stays beneath, until ``complete`` adds it.
        """
        if not self._pending:
            me, indices = weakref.ref(self), range(len(self.parameters))
            self._pending = [PendingGradient.of(me, index) for index in indices]
        self.is_shown = True
        if not self._refuses_steps:
            CHECKS.append(refuse_pending)
            self._refuses_steps = True
        for parameter, pending, is_wanted in zip(self.parameters, self._pending, self.wanted, strict=True):
            if is_wanted:
                parameter.pending_grad = pending  # type: ignore[attr-defined]  # a PlacedTensor's

    # ------------------------------------------------------------------ a sum ends

    def complete(self) -> None:
        """Take notice that no axis holds partial sums; ``show`` sets ``.grad`` of the sharded parameters then."""
        if self.carry is not None:
            self.final.local_buffer.add_(self.carry)
            self.carry = None
        shown = grads_of(self.parameters)
        for gradient in shown:
            if gradient is not None:
                self._add_direct(shown)
                break
        self.state = GradState.FINAL

    def _add_direct(self, shown: Sequence[torch.Tensor | None]) -> None:
        """Add what autograd or the user put into ``.grad`` beside the sum, which is complete."""
        for index, gradient in enumerate(shown):
            if gradient is not None:
                self.wanted[index] = self.had[index] = 1
                rows = own_rows(self.fsdp_params, index, gradient)
                self.final.get_local_tensor(index).view(-1).add_(rows.reshape(-1))

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

    def _show_wanted(self) -> bytearray:
        """Return which parameters' ``.grad`` is to be set; set those of parameters that keep what they had."""
        wanted = bytearray(self.trained)
        if self.is_under_way and 0 in self.trained:
            # One that was frozen in between keeps what was accumulated before.
            wanted = _either(self.trained, self.wanted)
        if 1 in self.missing:
            # They keep what they had, and nothing was accumulated of which hooks could be told.
            for index, is_missing in enumerate(self.missing):
                if is_missing:
                    wanted[index] = 0
                    self.parameters[index].grad = self._gradients[index] if self.had[index] else None
        return wanted

    def _refuse_late(self, error: RuntimeError) -> None:
        """Name the parameter to which no gradient could be assigned, and take back what was set.

        Raises:
            StateError: its ``grad_dtype`` is another one; nothing is raised where that of none is.
        """
        dtype = self.final.dtype
        for owned, parameter in zip(self.fsdp_params.owned, self.fsdp_params.sharded_params, strict=True):
            if parameter.grad_dtype not in (None, dtype):
                found, parameter.grad_dtype = parameter.grad_dtype, dtype
                raise StateError(
                    f"{self.name}: grad_dtype of parameter {owned.name!r} was set to {found} after gradients of "
                    f"{dtype} were laid out for it; set it before the first forward"
                ) from error

    def end_sum(self, *, clears: bool) -> None:
        """Have no sum under way any more; ``clears``: where ``.grad`` says that there is one."""
        if clears:
            clear_grads(self.parameters)
        self.is_under_way = self.is_void = False
        if self.is_shown:
            self._end_pending()

    def _end_pending(self) -> None:
        if self._refuses_steps:
            CHECKS.remove(refuse_pending)
        self._refuses_steps = False
        for parameter in self.parameters:
            parameter.pending_grad = None  # type: ignore[attr-defined]  # a PlacedTensor's

    # ------------------------------------------------------------------ a sum is given up

    def settle_sum(self) -> bool:
        """Return whether users have dropped ``.grad`` of a sum under way, which is looked at before a backward.

        Raises:
            StateError: of some parameters alone, or not after a backward that raised.
        """
        if not self.is_under_way:
            return False
        kept = self._shows_pending()
        if 1 not in [is_kept for is_kept, is_wanted in zip(kept, self.wanted, strict=True) if is_wanted]:
            return True
        if self.is_void:
            raise StateError(self.describe(kept.index(1)))
        dropped = [int(is_wanted > is_kept) for is_wanted, is_kept in zip(self.wanted, kept, strict=True)]
        if 1 in dropped:
            first, other = (self.fsdp_params.owned[each.index(1)].name for each in (dropped, kept))
            raise StateError(
                f"{self.name}: .grad of parameter {first!r} was dropped or replaced while its sum is under way, and "
                f"that of {other!r}, which is summed up with it, was not. Call zero_grad() of the model, which drops "
                "all of them, or change gradients after the last microbatch."
            )
        return False

    def _shows_pending(self) -> bytearray:
        """Return, by parameter, whether ``.grad`` says that its sum is under way (nonzero)."""
        return bytearray(getattr(parameter, "pending_grad", None) is not None for parameter in self.parameters)

    def void(self) -> None:
        """Let ``.grad`` of a sum that a backward left incomplete refuse to be read until it is dropped."""
        if not self.is_void:
            self.show_pending()
            self.is_void = True

    def empty(self) -> None:
        """Hold nothing of a sum under way."""
        self.carry = None
        self.state = GradState.EMPTY
        self.let_go()

    def clear(self) -> None:
        """Set every ``.grad`` to None."""
        clear_grads(self.parameters)
        if self.is_shown:
            self._end_pending()
        self.dropped()

    def describe(self, index: int) -> str:
        """Return the words of the error for who reads the ``.grad`` of a parameter while it is such a sum."""
        name = f"{self.name}: the gradient of parameter {self.fsdp_params.owned[index].name!r}"
        if self.is_void:
            return (
                f"{name} is incomplete, because the last backward raised. Drop it, with what was accumulated before: "
                "call zero_grad() of the optimizer or the model, or model.reset_iter_state()."
            )
        return (
            f"{name} is a sum under way, not reduced over all ranks yet. Run the last microbatch outside of no_sync() "
            "and of microbatch(model, False), and call finalize_backward() if that is manual, before .grad is used or "
            "an optimizer steps. zero_grad(set_to_none=True) drops it, as is to be done after a backward that raised."
        )

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

    def _settle_others(self) -> DBuffer | None:
        """Return the final gradients where some of ``.grad`` may be others; see ``settled``."""
        shown = grads_of(self.parameters)
        if self.is_under_way and 1 in (pending := self._shows_pending()):
            raise StateError(self.describe(pending.index(1)))
        if self.state is GradState.PARTIAL or all(gradient is None for gradient in shown):
            return None
        if self.hold():
            self.main_grad.zero_()
        self._adopt_user_gradients(shown)
        return self.final

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

    def match_parameter_dtype(self) -> None:
        """Show gradients in the parameters' dtype, which PyTorch's optimizers need; ``restore_dtype`` undoes it.

        Those of the buffer by one cast, the user's own one by one.
        """
        if self.final.dtype is self._dtype or self.state is not GradState.FINAL:
            return
        cast: DBuffer | None = None
        for index, (parameter, gradient) in enumerate(zip(self.parameters, grads_of(self.parameters), strict=True)):
            if gradient is None or gradient.dtype is self._dtype:
                continue
            self._replaced.append((parameter, gradient, parameter.grad_dtype))
            parameter.grad_dtype = None
            if gradient is self._gradients[index]:
                cast = cast or self.final.cast(self._dtype)
                parameter.grad = self.fsdp_params.wrap(index, cast.get_dtensor(index))
            else:
                parameter.grad = gradient.to(self._dtype)

    def restore_dtype(self) -> None:
        """Show the gradients themselves again after ``match_parameter_dtype``, but where the step dropped them."""
        replaced, self._replaced = self._replaced, []
        for parameter, gradient, allowed in replaced:
            parameter.grad = gradient if parameter.grad is not None else None
            parameter.grad_dtype = allowed


def _drop(binding: weakref.ref[GradBinding]) -> None:
    found = binding()
    if found is not None:
        found.dropped()


def _assign_grads(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], wanted: Sequence[int]
) -> list[Callable[[], object]]:
    """Set ``.grad`` of the parameters that are wanted (nonzero); return the calls of their hooks, in order."""
    if 0 in wanted:
        indices = [index for index, is_wanted in enumerate(wanted) if is_wanted]
        parameters, gradients = [parameters[index] for index in indices], [gradients[index] for index in indices]
    set_grads(parameters, gradients)
    return [
        functools.partial(hook, parameter)
        for parameter, hooks in zip(parameters, hooks_of(parameters), strict=True)
        if hooks
        for hook in hooks.values()
    ]


def _either(ones: Sequence[int], others: Sequence[int]) -> bytearray:
    return bytearray(one | other for one, other in zip(ones, others, strict=True))


class PendingGradient(torch.Tensor):
    """The ``.grad`` of a sharded parameter while its gradient is a sum under way: every use of it raises.

    Between microbatches that keep gradients on this rank, and after a backward that raised, there is nothing that a
    reader of ``.grad`` could be shown. None would hide what users do meanwhile: who sets ``.grad`` to None drops the
    sum, and who steps an optimizer would step without it.

    It does not keep the buffer of gradients alive.
    """

    _fsdp_binding: weakref.ref[GradBinding]
    _fsdp_index: int

    @staticmethod
    def of(binding: weakref.ref[GradBinding], index: int) -> PendingGradient:
        """Make the one of a parameter."""
        made = torch.empty(0).as_subclass(PendingGradient)
        made._fsdp_binding, made._fsdp_index = binding, index
        return made

    def describe(self) -> str:
        """Return the words of the error."""
        owner = self._fsdp_binding()
        return "the model of this gradient is gone" if owner is None else owner.describe(self._fsdp_index)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise a StateError."""
        raise StateError(next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)).describe())

    def __getattr__(self, name: str) -> Any:
        raise StateError(self.describe())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        return "a sum under way"


def refuse_pending(optimizer: Optimizer) -> None:
    """Refuse to step parameters whose gradients are sums under way, before anything is changed.

    Raises:
        StateError: there is one; it names the first.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if isinstance(parameter.grad, PendingGradient):
            raise StateError(parameter.grad.describe())
