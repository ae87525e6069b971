"""Gradient accumulation: the sum of a group's gradients, and how ``.grad`` of the sharded parameters shows it.

A user may set ``.grad`` to None, set it to zero, add to it, assign another tensor, freeze its parameter or step too
early, at any time between two backwards. The next backward adds its gradients to the values that ``.grad`` of a plain
model would have by then.

In order of time: ``begin_sum`` at the first gradient of a backward, ``complete`` when all axes are reduced, ``show``
when ``.grad`` is set. Until then ``.grad`` is None or a ``PendingGradient``, which raises when it is read.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer, FlatDTensor
from dbuffer.dtensor.autograd import is_reached, own_kind_of_grad
from dbuffer.dtensor.placed_tensor import GradDrops, PlacedTensor, words_of
from megatron_fsdp.engine.grad_memory import GradMemory
from megatron_fsdp.engine.optimizer_steps import STEP_CHECKS
from megatron_fsdp.engine.param_loops import clear_grads, grads_of, hooks_of, set_grads
from megatron_fsdp.engine.params import FSDPParams, own_rows
from megatron_fsdp.engine.pending_gradient import PendingGradient, refuse_pending
from megatron_fsdp.errors import StateError
from megatron_fsdp.policy.precision import grad_dtype_of

__all__ = ["Accumulation", "GradBinding"]


class Accumulation:
    """The sum of one group's gradients, from the first gradient until ``.grad`` shows it.

    ``GradBinding.sum`` is this object, or None while no sum is under way:

    | ``sum`` | flags | ``main_grad`` holds |
    |---|---|---|
    | None | ``has_final`` is False | nothing; ``.grad`` is None or the user's own |
    | None | ``has_final`` is True | the final gradients, which ``.grad`` shows |
    | a sum | ``is_in_main_grad`` is False | nothing of it: the next reduction overwrites |
    | a sum | ``is_in_main_grad`` is True | a partial sum; from ``complete`` to ``show`` the whole sum |
    | a sum | ``is_incomplete`` is True | nothing of use: a backward raised, and ``.grad`` refuses to be read |

    The arrays have one byte per parameter, 0 or 1.

    Attributes:
        covered: the parameters that the sum covers: trained ones, and those that had a ``.grad``.
        missing: the trained parameters without a gradient so far (``checks/missing_gradients.py``).
        had: the parameters that had a ``.grad`` before the sum began.
        carry: an earlier part of the sum that ``complete`` adds, copied from ``main_grad`` before that is overwritten.
        is_pending: ``.grad`` of the covered parameters shows a ``PendingGradient``.
    """

    __slots__ = ("carry", "covered", "had", "is_in_main_grad", "is_incomplete", "is_pending", "missing")

    def __init__(self, trained: bytearray, had: bytearray) -> None:
        self.covered = _either(trained, had) if 1 in had else bytearray(trained)
        self.missing = bytearray(trained)
        self.had = had
        self.carry: torch.Tensor | None = None
        self.is_in_main_grad = self.is_pending = self.is_incomplete = False

    def include(self, trained: Sequence[int]) -> None:
        """Cover the parameters that were unfrozen since the sum began."""
        for index, is_trained in enumerate(trained):
            if is_trained and not self.covered[index]:
                self.missing[index] = self.covered[index] = 1


class GradBinding:
    """Binds ``main_grad`` of one parameter group to ``.grad`` of its sharded parameters.

    ``GradientBuffer`` calls it when a backward brings gradients; ``final_callback`` when the backward ends; optimizers
    and gradient clipping when they read gradients.

    Args:
        main_grad: the buffer that gradients are accumulated in. final: the slice of it that the optimizer reads.
        fsdp_params: the parameters. The engine sets ``.grad`` of the sharded ones when gradients are final, and reads
            it to see ``zero_grad``.
        dtype: of the main weights.

    Attributes:
        sum: the sum under way, or None; the table of states is in ``Accumulation``.
        has_final: ``main_grad`` holds final gradients.
        memory: allocates and releases ``main_grad``.
        name: of the unit, for messages.
        trained: one byte per parameter: 1 if each backward is expected to bring a gradient of it.
        has_exact_norms: norms of the gradients have the same bits for any sharding.
    """

    has_exact_norms = False

    def __init__(self, main_grad: DBuffer, final: DBuffer, fsdp_params: FSDPParams, dtype: torch.dtype) -> None:
        self.name = main_grad.name
        self.sum: Accumulation | None = None
        self.has_final = False
        self.main_grad, self.final = main_grad, final
        # After a backward that set every ``.grad``, zero_grad drops them in order, and only the last drop is reported.
        self._drops = GradDrops(functools.partial(_drop, weakref.ref(self)))
        self.memory = GradMemory(main_grad, self._drops, is_sent_last=final is not main_grad)
        self.fsdp_params, self.parameters = fsdp_params, tuple(fsdp_params.sharded_params)
        self.trained = bytearray(int(parameter.requires_grad) for parameter in self.parameters)
        # Made at the first sum.
        self._gradients: list[DTensor] = []
        self._pending: list[PendingGradient] = []
        self._dtype = dtype
        self._last_one: weakref.ref[torch.Tensor] = weakref.ref(self.parameters[-1])
        # Replaced by ``match_parameter_dtype``: parameter, gradient, and the parameter's ``grad_dtype`` before.
        self._replaced: list[tuple[torch.Tensor, torch.Tensor, torch.dtype | None]] = []
        self.watch()

    # ------------------------------------------------------------------ a sum begins, or goes on

    def begin_sum(self) -> Accumulation:
        """Begin a sum at the first gradient of a backward, or continue the sum under way, and return it.

        Gradients that ``.grad`` shows by then become a part of a new sum.
        """
        if self.sum is not None:
            self.sum.include(self.trained)
            return self.sum
        if not self._gradients:
            self._make_gradients()
        shown = grads_of(self.parameters)
        had = bytearray(len(shown))
        for index, gradient in enumerate(shown):
            if gradient is not None:
                had[index] = 1
        begun = Accumulation(self.trained, had)
        # Without final gradients ``.grad`` is the user's own, and ``complete`` adds it.
        continues = self.has_final and 1 in had
        if continues:
            self._adopt_user_gradients(shown)
        self.sum = begun
        if continues:
            clear_grads(self.parameters)
            begun.is_in_main_grad = True
            if self.final is not self.main_grad:
                # Outside of the final slice ``main_grad`` holds values of the last reduction.
                self.set_aside()
        self.has_final = False
        return begun

    def set_aside(self) -> None:
        """Copy the values of ``final`` to ``carry``, so that the next reduction may overwrite ``main_grad``."""
        under_way = self.sum
        assert under_way is not None
        kept = self.final.local_buffer.clone()
        under_way.carry = kept if under_way.carry is None else kept.add_(under_way.carry)
        under_way.is_in_main_grad = False

    def _make_gradients(self) -> None:
        """Make the tensors that ``.grad`` of the parameters will show, views of ``final``."""
        self.memory.allocate()
        if self.final.dtype is not self._dtype:
            for parameter in self.parameters:
                if grad_dtype_of(parameter) == "own":
                    # The user did not choose a dtype, so a gradient of any dtype may be assigned.
                    parameter.grad_dtype = None
        indices = range(len(self.parameters))
        self._gradients = [
            self.fsdp_params.wrap(index, self.final.get_dtensor(index, is_view=True)) for index in indices
        ]
        self._tell_owners()
        self.memory.count_references_to(self._gradients)

    def _tell_owners(self) -> None:
        # A separate function, because a local variable would count as a reference to a gradient.
        for gradient, parameter in zip(self._gradients, self.parameters, strict=True):
            if isinstance(gradient, FlatDTensor):
                gradient.gradient_of = weakref.ref(parameter)
            if self.has_exact_norms and isinstance(gradient, PlacedTensor):
                gradient.has_exact_norms = True

    def show_pending(self, under_way: Accumulation) -> None:
        """Make ``.grad`` of the covered parameters a ``PendingGradient``, and make optimizers refuse to step them.

        The ``.grad`` that the user set before stays underneath, until ``complete`` adds it.
        """
        if not self._pending:
            me, indices = weakref.ref(self), range(len(self.parameters))
            self._pending = [PendingGradient.of(functools.partial(_describe, me, index)) for index in indices]
        if not under_way.is_pending:
            STEP_CHECKS.append(refuse_pending)
            under_way.is_pending = True
        for parameter, pending, is_covered in zip(self.parameters, self._pending, under_way.covered, strict=True):
            if is_covered:
                parameter.pending_grad = pending  # type: ignore[attr-defined]  # a PlacedTensor's

    def _end_pending(self, under_way: Accumulation) -> None:
        STEP_CHECKS.remove(refuse_pending)
        under_way.is_pending = False
        for parameter in self.parameters:
            parameter.pending_grad = None  # type: ignore[attr-defined]  # a PlacedTensor's

    # ------------------------------------------------------------------ a sum ends

    def complete(self) -> None:
        """Add ``carry`` and the user's own ``.grad`` to ``final``, after the reduction over all axes."""
        under_way = self.sum
        assert under_way is not None
        if under_way.carry is not None:
            self.final.local_buffer.add_(under_way.carry)
            under_way.carry = None
        for index, gradient in enumerate(grads_of(self.parameters)):
            if gradient is not None:
                # Set by autograd or by the user while the sum was under way, or before it began.
                under_way.covered[index] = under_way.had[index] = 1
                rows = own_rows(self.fsdp_params, index, gradient)
                self.final.get_local_tensor(index).view(-1).add_(rows.reshape(-1))

    def show(self) -> list[Callable[[], object]]:
        """End the sum: set ``.grad`` of each parameter to its part of ``final``.

        Parameters in ``missing`` keep the ``.grad`` that they had.

        Returns:
            The calls of the parameters' post-accumulate-grad hooks, which autograd does not call: it accumulates into
            the gathered parameters.
        """
        under_way = self.sum
        assert under_way is not None
        wanted = self.trained
        # If all parameters have a gradient, only a drop of the last one is reported.
        self._drops.last = self._last_one if 0 not in wanted else None
        if 0 in wanted or 1 in under_way.missing:
            self._drops.last, wanted = None, self._show_wanted(under_way)
        try:
            hooks = _assign_grads(self.parameters, self._gradients, wanted)
        except RuntimeError as error:
            self._refuse_late(error)
            raise
        self.sum, self.has_final = None, True
        if under_way.is_pending:
            self._end_pending(under_way)
        if 1 not in wanted:
            self.release_if_dropped()
        return hooks

    def _show_wanted(self, under_way: Accumulation) -> bytearray:
        """Return the parameters whose ``.grad`` to set, one byte each; restore ``.grad`` of ``missing`` ones."""
        wanted = bytearray(self.trained)
        if 0 in wanted:
            # A parameter that was frozen since the sum began shows the gradients accumulated before.
            wanted = _either(self.trained, under_way.covered)
        for index, is_missing in enumerate(under_way.missing):
            if is_missing:
                # Nothing was accumulated, so no hook is called.
                wanted[index] = 0
                self.parameters[index].grad = self._gradients[index] if under_way.had[index] else None
        return wanted

    def _refuse_late(self, error: RuntimeError) -> None:
        """Name the parameter whose ``grad_dtype`` did not allow its gradient, and restore that ``grad_dtype``.

        Raises:
            StateError: a parameter's ``grad_dtype`` is not the gradients' dtype; nothing is raised if all are.
        """
        dtype = self.final.dtype
        for owned, parameter in zip(self.fsdp_params.owned, self.fsdp_params.sharded_params, strict=True):
            if parameter.grad_dtype not in (None, dtype):
                found, parameter.grad_dtype = parameter.grad_dtype, dtype
                raise StateError(
                    f"{self.name}: grad_dtype of parameter {owned.name!r} was set to {found} after gradients of "
                    f"{dtype} were laid out for it. fix: set it before the first forward"
                ) from error

    def forget_sum(self) -> None:
        """Forget the sum under way."""
        under_way, self.sum = self.sum, None
        if under_way is not None and under_way.is_pending:
            self._end_pending(under_way)

    # ------------------------------------------------------------------ a sum is given up

    def is_dropped(self) -> bool:
        """Return whether the user has dropped ``.grad`` of all parameters of the sum under way; False without a sum.

        Raises:
            StateError: ``.grad`` of some of the parameters was dropped, or the sum is incomplete because a backward
                raised.
        """
        under_way = self.sum
        if under_way is None:
            return False
        kept = self._shows_pending()
        if 1 not in [is_kept for is_kept, is_covered in zip(kept, under_way.covered, strict=True) if is_covered]:
            return True
        if under_way.is_incomplete:
            raise StateError(self.describe(kept.index(1)))
        dropped = [int(is_covered > is_kept) for is_covered, is_kept in zip(under_way.covered, kept, strict=True)]
        if 1 in dropped:
            first, other = (self.fsdp_params.owned[each.index(1)].name for each in (dropped, kept))
            raise StateError(
                f"{self.name}: .grad of parameter {first!r} was dropped or replaced while its sum is under way, and "
                f"that of {other!r}, which is summed up with it, was not. fix: call zero_grad() of the model, which "
                "drops all of them, or change gradients after the last microbatch"
            )
        return False

    def _shows_pending(self) -> bytearray:
        """Return one byte per parameter: 1 if its ``.grad`` is a ``PendingGradient``."""
        return bytearray(getattr(parameter, "pending_grad", None) is not None for parameter in self.parameters)

    def mark_incomplete(self) -> None:
        """Mark the sum under way incomplete: ``.grad`` refuses to be read until the user drops it."""
        if self.sum is not None and not self.sum.is_incomplete:
            self.show_pending(self.sum)
            self.sum.is_incomplete = True

    def discard_values(self) -> None:
        """Discard the values of the sum under way, and release the memory of ``main_grad``."""
        if self.sum is not None:
            self.sum.carry = None
            self.sum.is_in_main_grad = False
            self.has_final = False
            self.memory.release_unless_held()

    def discard_sum(self) -> None:
        """Forget the sum under way, and set ``.grad`` to None."""
        clear_grads(self.parameters)
        self.forget_sum()

    def zero_grad(self) -> None:
        """Set every ``.grad`` to None, as ``zero_grad`` does; the next backward finds that a sum was dropped."""
        clear_grads(self.parameters)
        if self.sum is not None and self.sum.is_pending:
            self._end_pending(self.sum)
        self.release_if_dropped()

    def describe(self, index: int) -> str:
        """Return the message for reading ``.grad`` of parameter ``index`` while its sum is under way."""
        name = f"{self.name}: the gradient of parameter {self.fsdp_params.owned[index].name!r}"
        if self.sum is not None and self.sum.is_incomplete:
            return (
                f"{name} is incomplete, because the last backward raised. fix: drop it with earlier microbatches: "
                "call zero_grad() of the optimizer or the model, or model.reset_iter_state()"
            )
        return (
            f"{name} is a sum under way, not reduced over all ranks yet. fix: run the last microbatch outside of "
            "no_sync() and of microbatch(model, False), and call finalize_backward() if that is manual, before .grad "
            "is used or an optimizer steps; or drop it with zero_grad(set_to_none=True), as after a backward that "
            "raised"
        )

    # ------------------------------------------------------------------ the optimizer reads

    def final_gradients(self) -> DBuffer | None:
        """Return the final gradients, after copying the user's own ``.grad`` into them; None if there are none.

        ``.grad`` may be the user's own without any backward.

        Raises:
            StateError: a sum is under way.
        """
        if self.sum is not None or not self.are_own(grads_of(self.parameters)):
            return self._gradients_of_user()
        self.memory.allocate()
        return self.final

    def are_own(self, shown: Sequence[torch.Tensor | None]) -> bool:
        """Return whether ``.grad`` of all parameters, which the caller gives, is what ``show`` has set."""
        return bool(self._gradients) and all(map(operator.is_, shown, self._gradients))

    def _gradients_of_user(self) -> DBuffer | None:
        """Return the final gradients where ``.grad`` may be the user's own; see ``final_gradients``."""
        shown = grads_of(self.parameters)
        if self.sum is not None:
            if 1 in (pending := self._shows_pending()):
                raise StateError(self.describe(pending.index(1)))
            if self.sum.is_in_main_grad:
                return None
        if all(gradient is None for gradient in shown):
            return None
        if self.memory.allocate():
            self.main_grad.zero_()
        self._adopt_user_gradients(shown)
        return self.final

    def _adopt_user_gradients(self, shown: Sequence[torch.Tensor | None]) -> None:
        """Copy the user's own gradients into ``final``; zeros for None."""
        for index, gradient in enumerate(shown):
            if gradient is not None and self._gradients and gradient is self._gradients[index]:
                continue
            mine = self.final.get_local_tensor(index)
            rows = None if gradient is None else own_rows(self.fsdp_params, index, gradient)
            if rows is not None and rows.data_ptr() == mine.data_ptr():
                continue
            if self._gradients and self.memory.is_gradient_held(index):
                self._detach_held(index)
            if rows is None:
                mine.zero_()
            else:
                mine.view(-1).copy_(rows.reshape(-1))

    def _detach_held(self, index: int) -> None:
        """Copy a gradient that the user holds to memory of its own; later sums of the parameter show another tensor."""
        local = self._gradients[index]._local_tensor
        local.data = local.clone()
        self._gradients[index] = self.fsdp_params.wrap(index, self.final.get_dtensor(index, is_view=True))
        self._tell_owners()
        self.memory.replace_gradient(index, self._gradients)

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply the gradients that ``final_gradients`` returned, and the user's own tensors that lie elsewhere."""
        scaled, shown = [self.final.local_buffer], grads_of(self.parameters)
        if not self.are_own(shown):
            for index, gradient in enumerate(shown):
                local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
                mine = self.final.get_local_tensor(index)
                if local is not None and local.numel() and local.data_ptr() != mine.data_ptr():
                    scaled.append(local)
        for tensor in scaled:
            tensor.mul_(factor.to(tensor) if isinstance(factor, torch.Tensor) else factor)

    def match_parameter_dtype(self) -> None:
        """Show gradients in the parameters' dtype, which PyTorch's optimizers need; ``restore_dtype`` undoes it.

        The buffer is cast as a whole, the user's own gradients one by one.
        """
        if self.final.dtype is self._dtype or not self.has_final:
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
        """Show the original gradients again after ``match_parameter_dtype``, except those that the step dropped."""
        replaced, self._replaced = self._replaced, []
        for parameter, gradient, allowed in replaced:
            parameter.grad = gradient if parameter.grad is not None else None
            parameter.grad_dtype = allowed

    # ------------------------------------------------------------------ memory

    def keep(self, keeps: bool) -> None:
        """Keep ``main_grad`` allocated permanently (True) or only while gradients exist (False)."""
        self.memory.keeps = keeps
        if keeps:
            self.memory.allocate()
        else:
            self.release_if_dropped()

    def watch(self) -> None:
        """Call ``release_if_dropped`` when Python code sets ``.grad`` of a parameter to None."""
        self._drops.last = None
        for parameter in self.parameters:
            if isinstance(parameter, FlatDTensor):
                parameter.on_grad_dropped = self._drops

    def release_if_dropped(self) -> None:
        """Release ``main_grad`` if no sum is under way and every ``.grad`` is None."""
        if self.sum is not None:
            return
        for parameter, gradient in zip(reversed(self.parameters), reversed(grads_of(self.parameters)), strict=True):
            if gradient is not None:
                self._drops.last = weakref.ref(parameter)
                return
        if self.memory.release_unless_held():
            self.has_final = False


def _describe(binding: weakref.ref[GradBinding], index: int) -> str:
    found = binding()
    return "the model of this gradient is gone" if found is None else found.describe(index)


def _drop(binding: weakref.ref[GradBinding]) -> None:
    found = binding()
    if found is not None:
        found.release_if_dropped()


def _assign_grads(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], wanted: Sequence[int]
) -> list[Callable[[], object]]:
    """Set ``.grad`` of the parameters that are wanted (nonzero); return the calls of their hooks, in order.

    Raises:
        StateError: autograd has called the hooks of one of them already in this backward.
    """
    if 0 in wanted:
        indices = [index for index, is_wanted in enumerate(wanted) if is_wanted]
        parameters, gradients = [parameters[index] for index in indices], [gradients[index] for index in indices]
    calls: list[Callable[[], object]] = []
    for parameter, hooks in zip(parameters, hooks_of(parameters), strict=True):
        if hooks:
            if any(hook is not own_kind_of_grad for hook in hooks.values()):
                _refuse_second_call(parameter)
            calls += [functools.partial(hook, parameter) for hook in hooks.values()]
    set_grads(parameters, gradients)
    return calls


def _refuse_second_call(parameter: torch.Tensor) -> None:
    if is_reached(parameter):
        raise StateError(
            f"{words_of(parameter)} has a post-accumulate-grad hook, and this backward reached it twice: in its unit, "
            "and where the sharded parameter itself was used (outside of its unit's forward, or in a penalty). A plain "
            "model calls the hook once, with the sum. fix: use the parameter inside of its unit's forward only, or do "
            "what the hook does after loss.backward()"
        )


def _either(ones: Sequence[int], others: Sequence[int]) -> bytearray:
    return bytearray(one | other for one, other in zip(ones, others, strict=True))
