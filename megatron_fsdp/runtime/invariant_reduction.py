"""Gradients whose bits do not depend on the number of ranks: every microbatch's is added up in an order of its own.

Microbatch t of rank r of W is number ``t * W + r`` of its step. Ranks exchange their parts, and the owner of a shard
adds them in the order of these numbers into a binary counter: number i merges with its neighbours as its bits carry,
so that the shape of the sum depends on how many there are alone (docs/design/invariance.md).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dbuffer import DBuffer, Flat, Partial
from dbuffer.collectives import Part, all_gather, all_to_all
from dbuffer.dtensor.placed_tensor import PlacedTensor
from dbuffer.mesh import MeshAxis
from dbuffer.placements import BufferPlacement
from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.grad_binding import GradBinding
from megatron_fsdp.runtime.grad_state import GradState
from megatron_fsdp.runtime.gradients import GradientBuffer
from megatron_fsdp.runtime.parameter_group import group_of_parameter
from megatron_fsdp.runtime.reduction import Reduction, Stages

if TYPE_CHECKING:
    from megatron_fsdp.runtime.backward import Backward

__all__ = ["BinaryCounter", "InvariantGradients"]

# The kernel of ``fused=True`` on CPU treats the last elements of a tensor, which are others in each sharding, by other
# instructions than those before.
_HOOKS: list[RemovableHandle] = []
_FLAG = 'MixedPrecisionPolicy(reduction="invariant")'


def _refuse_fused(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for options in optimizer.param_groups if optimizer.defaults.get("fused") else ():
        for parameter in options["params"]:
            group = group_of_parameter(parameter)
            if group is not None and isinstance(group.gradients, InvariantGradients) and parameter.is_cpu:
                raise StateError(
                    f"unit {group.name!r}: {type(optimizer).__name__}(fused=True) on CPU rounds the last elements of "
                    f"each shard in another way than the others, and {_FLAG} promises the same bits; give foreach=True"
                )


class BinaryCounter:
    """A sum of tensors, added in the order in which a binary counter carries.

    Attributes:
        count: of the tensors that are in it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.count = 0
        self._dtype = dtype
        self._has_zeros = False
        # By the power of two of the tensors that each adds up; None where all of them were zeros.
        self._levels: dict[int, torch.Tensor | None] = {}
        self._free: list[torch.Tensor] = []

    def clear(self) -> None:
        """Hold nothing; memory stays for the next sum."""
        self._free += [level for level in self._levels.values() if level is not None]
        self._levels, self.count, self._has_zeros = {}, 0, False

    def push(self, leaf: torch.Tensor | None) -> None:
        """Add the next tensor; None stands for zeros."""
        self._has_zeros |= leaf is None
        if not self.count & 1:
            carried = self._take(leaf)
        else:
            carried = self._levels.pop(0)
            if carried is None:
                carried = self._take(leaf)
            elif leaf is not None:
                carried.add_(leaf)
        level = self.count & 1
        while self.count >> level & 1:
            held = self._levels.pop(level)
            if held is not None and carried is not None:
                self._free.append(carried)
                carried = held.add_(carried)
            elif held is not None:
                carried = held
            level += 1
        self._levels[level] = carried
        self.count += 1

    def _take(self, leaf: torch.Tensor | None) -> torch.Tensor | None:
        if leaf is None:
            return None
        with torch.inference_mode(False):
            memory = self._free.pop() if self._free else torch.empty_like(leaf, dtype=self._dtype)
        return memory.copy_(leaf)

    def total(self) -> torch.Tensor | None:
        """Return what is left, added from the smallest up; None where all of it is zeros."""
        held = [level for _, level in sorted(self._levels.items()) if level is not None]
        if not held:
            return None
        total = held[0]
        for level in held[1:]:
            total = total + level
        # Zeros that another number of ranks would have packed make +0.0 of a sum of -0.0.
        return total + 0.0 if self._has_zeros else total


@dataclass(slots=True)
class _Step:
    """The step that the backwards of one root belong to: the number of its first one."""

    first: int = 0


_STEPS: weakref.WeakKeyDictionary[Backward, _Step] = weakref.WeakKeyDictionary()


class _InvariantBinding(GradBinding):
    """Shows gradients whose norms are the same however they are sharded, as ``torch.nn.utils.clip_grad_norm_`` asks."""

    def _final_gradients(self) -> list[DTensor]:
        gradients = super()._final_gradients()
        for gradient in gradients:
            if isinstance(gradient, PlacedTensor):
                gradient.has_exact_norms = True
        return gradients


class InvariantGradients(GradientBuffer):
    """The gradients of one parameter group, exchanged in every backward, whatever the strategy."""

    reduction: _InvariantReduction

    def _make_buffers(self) -> None:
        spec = self._spec
        partial: tuple[BufferPlacement, ...] = tuple(Partial("sum") for _ in spec.placements.gradient)
        self.rests_partial = self.rests_final = False
        self.packed = self._buffer(partial, spec.reduce_dtype, "packed gradients", spec.device)
        main_grad = self._buffer(spec.placements.optimizer, spec.main_dtype, "main_grad", self._template.device)
        self.binding = _InvariantBinding(main_grad, main_grad, self._fsdp_params, self._template.dtype)
        self.binding.keeps = spec.is_offloaded
        self.reduction = _InvariantReduction(self.packed, main_grad)
        self._last = 0
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_pre_hook(_refuse_fused))

    def _begin_sum(self) -> None:
        observer = self._observer() if self._observer is not None else None
        if observer is not None and not observer.requires_gradient_sync:
            raise StateError(
                f"{self.binding.name}: no_sync() or set_requires_gradient_sync(False) adds up microbatches on a rank "
                f"before others' are seen, and {_FLAG} adds them up one by one. Leave it out; "
                "set_is_last_backward(False) says that more microbatches follow."
            )
        before = self.binding.state
        super()._begin_sum()
        self.reduction.check_kept(before, self.binding)

    def _stages(self) -> Stages:
        observer = self._observer() if self._observer is not None else None
        assert observer is not None
        step = _STEPS.setdefault(observer.backward, _Step())
        if self.binding.state is GradState.EMPTY:
            if self._last >= step.first:
                # What it had of this step is dropped, or the step is over: a new one begins.
                step.first = observer.backward.number
            self.reduction.counter.clear()
        self._last = observer.backward.number
        self.reduction.skip_to(self._last - step.first)
        return super()._stages()


class _InvariantReduction(Reduction):
    """Exchanges packed gradients, adds them up in a counter, and writes the sum into ``main_grad``.

    Args:
        packed: receives autograd's gradients. main_grad: what the optimizer reads.
    """

    def __init__(self, packed: DBuffer, main_grad: DBuffer) -> None:
        super().__init__(packed, packed, main_grad, main_grad, is_offloaded=False, is_pinned=False)
        # Not what ``finish`` may leave out.
        self.is_last = False
        self.counter = BinaryCounter(torch.promote_types(torch.float32, packed.dtype))
        self._scale = 0.0
        self._version = -1
        axes = packed.axes
        self._num_ranks = math.prod(axis.size for axis in axes)
        # Shards are cut from major to minor, and what the optimizer holds whole is cut after them.
        order = sorted(
            (index for index in range(len(axes)) if axes[index].size > 1),
            key=lambda index: (main_grad.placements[index] != Flat(), -index),
        )
        self._cut = [axes[index] for index in order]
        self._whole = [axes[index] for index in reversed(order) if main_grad.placements[index] != Flat()]
        grid = torch.arange(self._num_ranks).view([axes[index].size for index in reversed(order)])
        places = [len(order) - 1 - order.index(index) for index in sorted(order)]
        # Where what each rank sent is found among what is received.
        self._rows: list[int] = grid.permute(places).flatten().tolist()

    def skip_to(self, microbatch: int) -> None:
        """Count zeros for microbatches in which no rank has used the group."""
        while self.counter.count < microbatch * self._num_ranks:
            self.counter.push(None)

    def stages(self, scale: float, *, overwrite: bool) -> Stages:
        """Return the exchange of the packed buffer, and the additions."""
        if scale == 0.0:
            raise StateError(
                f"{self._packed.name}: {_FLAG} divides once, after the last addition, and by what does not depend on "
                "the number of ranks: call set_gradient_divide_factor(G) of every unit, where G is the number of "
                "microbatches of a step on all ranks together, and do not divide their losses"
            )
        self._scale = scale
        self._version = self._main_grad.local_buffer._version
        # Not self: a ticket that nobody waits for must not keep this object alive.
        packed, cut, rows, counter = self._packed, self._cut, self._rows, self.counter
        received: list[torch.Tensor] = []

        def start(works: list[dist.Work] | None) -> list[Part]:
            parts = packed.local_buffer.view(1, -1)
            for axis in cut:
                parts = _exchanged(parts, axis, works if axis is cut[-1] else None)
            received.append(parts)
            return []

        def fold() -> None:
            for row in rows:
                counter.push(received[0][row])
            received.clear()

        return Stages(start, fold, None)

    def _last_on_all(self) -> Part | None:
        return None

    def _last_parts(self) -> list[Part]:
        target = self._main_grad.local_buffer
        self._write(target)
        self._version = target._version
        return []

    def _write(self, target: torch.Tensor) -> None:
        total = self.counter.total()
        if total is None:
            target.zero_()
            return
        if not self._whole and target.dtype is total.dtype and target.device == total.device:
            torch.mul(total, self._scale, out=target)
            return
        shard = (total * self._scale).to(target.dtype)
        for axis, numel in zip(self._whole, self._sizes(), strict=True):
            gathered = shard.new_empty(axis.size * shard.numel())
            all_gather(gathered, shard, axis)
            shard = gathered[:numel]
        target.copy_(shard)

    def _sizes(self) -> list[int]:
        """Return the elements that each axis of ``_whole`` was cut from."""
        sizes, numel = [], self._main_grad.local_buffer.numel()
        for axis in reversed(self._whole):
            sizes.append(numel)
            numel = -(-numel // axis.size)
        return sizes[::-1]

    def check_kept(self, before: GradState, binding: GradBinding) -> None:
        """Refuse to go on with a sum that somebody changed a part of; one that was set to zero begins anew.

        Args:
            before: what gradients were when the sum was begun, or gone on with.
        Raises:
            StateError: ``.grad`` is not what the last backward made of it.
        """
        if binding.state is GradState.EMPTY:
            return
        target = binding.main_grad.local_buffer
        if target._version == self._version:
            return
        if before is GradState.FINAL:
            if not target.any():
                binding.become(GradState.EMPTY)
                return
            found = target.clone()
            self._write(target)
            self._version = target._version
            if torch.equal(found, target):
                return
        raise StateError(
            f"{binding.name}: gradients were changed, or those of some parameters dropped, between two microbatches "
            f"of a step, which {_FLAG} adds up one by one. Change them after the last one, or drop all of them."
        )


def _exchanged(rows: torch.Tensor, axis: MeshAxis, works: list[dist.Work] | None) -> torch.Tensor:
    """Return (ranks * rows, elements): this rank's part of the rows of every rank of an axis."""
    num_rows, numel = rows.shape
    share = -(-numel // axis.size)
    if share * axis.size != numel:
        rows = pad(rows, (0, share * axis.size - numel))
    sent = rows.view(num_rows, axis.size, share).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    sizes: Sequence[int] = [num_rows * share] * axis.size
    all_to_all(received.view(-1), sent.view(-1), axis, (sizes, sizes), works)
    return received.view(axis.size * num_rows, share)
