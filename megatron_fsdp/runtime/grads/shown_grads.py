"""ShownGrads: what users do to ``.grad`` between backwards, and what it shows of sums that go on.

While a sum is not reduced over all ranks, ``.grad`` shows a stand-in that says so when it is read
(``unreduced_grads.py``).
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat

import torch

from dbuffer import DBuffer, FlatDTensor
from megatron_fsdp.errors import StateError
from megatron_fsdp.policy.precision import grad_dtype_of
from megatron_fsdp.runtime.grads.unreduced_grads import PendingGradient, refuse_pending
from megatron_fsdp.runtime.step.freshness import CHECKS
from megatron_fsdp.runtime.step.fsdp_params import FSDPParams, grads_of
from megatron_fsdp.runtime.step.grad_binding import GradBinding, GradState, clear_grads
from megatron_fsdp.runtime.step.streams import compute_of
from megatron_fsdp.runtime.weights.param_layout import own_rows

__all__ = ["ShownGrads"]


class ShownGrads(GradBinding):
    """The gradients of one parameter group between backwards.

    Args:
        main_grad, final, fsdp_params: see ``GradBinding``. dtype: of the main weights.
    """

    def __init__(self, main_grad: DBuffer, final: DBuffer, fsdp_params: FSDPParams, dtype: torch.dtype) -> None:
        super().__init__(main_grad, final, fsdp_params, compute_of(main_grad.device))
        self._dtype = dtype
        # What ``.grad`` shows of sums under way; nothing where nothing has had to be shown yet.
        self._pending: list[PendingGradient] = []
        self._refuses_steps = False
        # What ``match_parameter_dtype`` has replaced: parameter, gradient, and the ``grad_dtype`` that was allowed.
        self._replaced: list[tuple[torch.Tensor, torch.Tensor, torch.dtype | None]] = []
        self.watch()

    def keep(self, keeps: bool) -> None:
        """Have the memory of ``main_grad`` from now on also while there are no gradients, or no more."""
        self.keeps = keeps
        if keeps:
            self.hold()
        else:
            self.dropped()

    def clear(self) -> None:
        """Set every ``.grad`` to None."""
        clear_grads(self.parameters)
        if self.is_shown:
            self._end_pending()
        self.dropped()

    def watch(self) -> None:
        """Hear of each ``.grad`` of the parameters that is set to None, in place of whoever did."""
        self._drops.last = None
        for parameter in self.parameters:
            if isinstance(parameter, FlatDTensor):
                parameter.on_grad_dropped = self._drops

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

    # ------------------------------------------------------------------ a sum begins

    def _go_on(self) -> None:
        added = bytearray(map(operator.gt, self.trained, self.wanted))
        self.missing = _either(self.missing, added)
        self.wanted = _either(self.trained, self.wanted)

    def _begin_with(self, shown: Sequence[torch.Tensor | None]) -> None:
        """Begin a sum where ``.grad`` holds something."""
        self.had = bytearray(map(operator.is_not, shown, repeat(None)))
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
            self._pending = [PendingGradient.of(partial(_describe, me, index)) for index in indices]
        self.is_shown = True
        if not self._refuses_steps:
            CHECKS.append(refuse_pending)
            self._refuses_steps = True
        for parameter, pending in itertools.compress(zip(self.parameters, self._pending, strict=True), self.wanted):
            parameter.pending_grad = pending  # type: ignore[attr-defined]  # a PlacedTensor's

    # ------------------------------------------------------------------ a sum ends

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

    def _end_pending(self) -> None:
        if self._refuses_steps:
            CHECKS.remove(refuse_pending)
        self._refuses_steps = False
        for parameter in self.parameters:
            parameter.pending_grad = None  # type: ignore[attr-defined]  # a PlacedTensor's

    def _add_direct(self, shown: Sequence[torch.Tensor | None]) -> None:
        """Add what autograd or the user put into ``.grad`` beside the sum, which is complete."""
        for index, gradient in enumerate(shown):
            if gradient is not None:
                self.wanted[index] = self.had[index] = 1
                rows = own_rows(self.fsdp_params, index, gradient)
                self.final.get_local_tensor(index).view(-1).add_(rows.reshape(-1))

    def _show_wanted(self) -> bytearray:
        """Return which parameters' ``.grad`` is to be set; set those of parameters that keep what they had."""
        wanted = bytearray(self.trained)
        if self.is_under_way and 0 in self.trained:
            # One that was frozen in between keeps what was accumulated before.
            wanted = _either(self.trained, self.wanted)
        if 1 in self.missing:
            # They keep what they had, and nothing was accumulated of which hooks could be told.
            clear_grads(itertools.compress(self.parameters, self.missing))
            kept = map(operator.and_, self.missing, self.had)
            for parameter, gradient in itertools.compress(zip(self.parameters, self._gradients, strict=True), kept):
                parameter.grad = gradient
            wanted = bytearray(map(operator.gt, wanted, self.missing))
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

    # ------------------------------------------------------------------ users drop a sum

    def settle_sum(self) -> bool:
        """Return whether users have dropped ``.grad`` of a sum under way, which is looked at before a backward.

        Raises:
            StateError: of some parameters alone, or not after a backward that raised.
        """
        if not self.is_under_way:
            return False
        kept = self._shows_pending()
        if 1 not in itertools.compress(kept, self.wanted):
            return True
        if self.is_void:
            raise StateError(self.describe(kept.index(1)))
        dropped = bytearray(map(operator.gt, self.wanted, kept))
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


def _either(ones: Iterable[int], others: Iterable[int]) -> bytearray:
    return bytearray(map(operator.or_, ones, others))


def _describe(binding: weakref.ref[ShownGrads], index: int) -> str:
    """Return the words of the error for who reads a sum under way, which must not keep the buffer alive."""
    owner = binding()
    return "the model of this gradient is gone" if owner is None else owner.describe(index)
