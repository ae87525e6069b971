"""Sum gradients in an order that does not depend on the number of ranks, so that the result has the same bits.

Microbatch t of rank r of W has number ``t * W + r`` in its step. Ranks exchange slices of gradients. The owner of a
shard adds them in the order of these numbers, as a binary counter carries: two partial sums of equal size are added as
soon as both exist. So the order depends only on the number of microbatches (docs/design/invariance.md).
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dbuffer import DBuffer, Flat, Partial
from dbuffer.collectives import Part
from dbuffer.collectives_rare import exchange
from dbuffer.events import listeners, tell
from dbuffer.mesh import MeshAxis, flattened_mesh, make_groups
from dbuffer.placements import BufferPlacement
from dbuffer.storage import FlatStorage
from megatron_fsdp.engine.accumulation import GradBinding, GradState
from megatron_fsdp.engine.backward import GradientsOfUnit
from megatron_fsdp.engine.grads import GradientBuffer
from megatron_fsdp.engine.param_group import group_of_parameter
from megatron_fsdp.engine.params import FSDPParams
from megatron_fsdp.engine.reduce import Reduction
from megatron_fsdp.engine.unit import Root, Unit
from megatron_fsdp.errors import StateError

__all__ = ["InvariantGradients"]

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
    """Sum tensors in the order of a binary counter: partial sums of equal size are added.

    The memory (one tensor per bit of ``count``) is kept for the next sum.

    Attributes:
        count: the number of tensors added.
    """

    def __init__(self, dtype: torch.dtype, name: str = "") -> None:
        self.count = 0
        self._dtype, self._name = dtype, name
        # Maps a power of two to the partial sum of that many tensors.
        self._levels: dict[int, torch.Tensor] = {}
        self._memory: dict[int, FlatStorage] = {}
        self._free: list[torch.Tensor] = []

    def clear(self) -> None:
        """Hold nothing; memory stays for the next sum."""
        self._free += self._levels.values()
        self._levels, self.count = {}, 0

    def push(self, *leaves: torch.Tensor) -> None:
        """Add 1-D tensors to the sum. A tensor that stays a partial sum of its own is copied."""
        for leaf in leaves:
            carried, level = leaf, 0
            while self.count >> level & 1:
                carried = self._merged(self._levels.pop(level), carried)
                level += 1
            self._levels[level] = carried
            self.count += 1
        for level, held in self._levels.items():
            if id(held) not in self._memory:
                self._levels[level] = self._take(held).copy_(held)

    def _merged(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Add two partial sums in the memory of one of them. Tensors passed to ``push`` are not modified."""
        if id(first) not in self._memory:
            first, second = second, first
        if id(first) in self._memory:
            if id(second) in self._memory:
                self._free.append(second)
            return first.add_(second)
        memory = self._take(first)
        if first.dtype is self._dtype:
            return torch.add(first, second, out=memory)
        return memory.copy_(first).add_(second)

    def _take(self, like: torch.Tensor) -> torch.Tensor:
        if not self._free:
            storage = FlatStorage(like.numel(), self._dtype, like.device, name=f"{self._name}: sums")
            self._memory[id(storage.tensor)] = storage
            return storage.tensor
        return self._free.pop()

    def write(self, out: torch.Tensor, scale: float) -> None:
        """Add the partial sums from the smallest to the largest and write the result times ``scale``."""
        held = [level for _, level in sorted(self._levels.items())]
        is_direct = out.dtype is self._dtype and out.device == held[0].device
        total = out if is_direct else self._take(held[0])
        total.copy_(held[0])
        for level in held[1:]:
            total.add_(level)
        total.mul_(scale)
        if not is_direct:
            self._free.append(total)
            out.copy_(total)


class _Step:
    """The current step of one root: its backwards until the optimizer steps.

    Attributes:
        first: the number of its first backward.
        last: by group, the number of the last backward that used it; its gradients may be new since.
    """

    def __init__(self) -> None:
        self.first = 0
        self.last: weakref.WeakKeyDictionary[FSDPParams, int] = weakref.WeakKeyDictionary()


_STEPS: weakref.WeakKeyDictionary[Root, _Step] = weakref.WeakKeyDictionary()


class InvariantGradients(GradientBuffer):
    """The gradients of one parameter group. Ranks exchange them in every backward, with every strategy."""

    reduction: _InvariantReduction

    def _make_buffers(self) -> None:
        dtypes, placements = self._spec.dtypes, self._spec.placements
        self.rests_partial = self.rests_final = False
        partial: tuple[BufferPlacement, ...] = (Partial("sum"),) * len(placements.gradient)
        self.packed = self._buffer(partial, dtypes.reduce, "packed gradients", self._device)
        main_grad = self._buffer(placements.optimizer, dtypes.main_grad, "main_grad", self._template.device)
        self._bind(GradBinding(main_grad, main_grad, self._fsdp_params, self._template.dtype))
        # Gradients of a replicated optimizer are all-gathered in place. clip_grad_norm_ computes exact norms.
        self.binding.is_sent_last = self.binding.has_exact_norms = True
        self.reduction = _InvariantReduction(self.packed, main_grad)
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_pre_hook(_refuse_fused))

    def _unit(self) -> Unit | None:
        return self.listener.unit() if isinstance(self.listener, GradientsOfUnit) else None

    def _begin_sum(self) -> None:
        unit = self._unit()
        if unit is not None and not unit.requires_gradient_sync:
            raise StateError(
                f"{self.binding.name}: no_sync() or set_requires_gradient_sync(False) adds up microbatches on a rank "
                f"before others' are seen, and {_FLAG} adds them up one by one. Leave it out; "
                "set_is_last_backward(False) says that more microbatches follow."
            )
        super()._begin_sum()
        self.reduction.look_for_changes(self.binding)

    def _prepare(self) -> None:
        unit = self._unit()
        assert unit is not None
        step = _STEPS.setdefault(unit.root, _Step())
        number = unit.root.backward.number
        if self.binding.state is GradState.EMPTY:
            if step.last.get(self._fsdp_params, 0) >= step.first:
                # Its gradients were dropped, or the step is over: a new step begins.
                step.first = number
            self.reduction.counter.clear()
        step.last[self._fsdp_params] = number
        self.reduction.begin_microbatch(number - step.first)
        super()._prepare()


class _InvariantReduction(Reduction):
    """Exchange packed gradients, sum them in a counter, and write the sum to ``main_grad``.

    Args:
        packed: buffer of autograd's gradients. main_grad: buffer that the optimizer reads.
    """

    # The last sum also issues an all-gather.
    finishes_on_lane = False

    def __init__(self, packed: DBuffer, main_grad: DBuffer) -> None:
        super().__init__(packed, packed, main_grad, main_grad, wire=None)
        self.counter = BinaryCounter(torch.promote_types(torch.float32, packed.dtype), packed.name)
        self._version = -1
        axes, sizes = packed.axes, [axis.size for axis in packed.axes]
        order = cut_order(sizes, main_grad.placements)
        self._whole = [axes[index] for index in order if main_grad.placements[index] != Flat()]
        self._axis = axes[order[0] if len(order) == 1 else 0]
        self._num_ranks = math.prod(sizes)
        # The slice that each rank sums, in the order of ranks.
        places = itertools.product(*map(range, sizes))
        self._pieces = [owned_piece(packed.plan.numel, sizes, order, place) for place in places]
        room = (self._num_ranks - 1) * max(piece.stop - piece.start for piece in self._pieces)
        self._received = FlatStorage(room, packed.dtype, packed.device, name="gradients that others sent")

    def begin_microbatch(self, microbatch: int) -> None:
        """Count zeros for microbatches without gradients of this group on any rank; allocate the receive buffer."""
        if self._axis.size < self._num_ranks:
            # Creating the group is collective, so it waits until all ranks come here.
            group = flattened_mesh(self._packed.mesh).get_group()
            self._axis = MeshAxis(self._axis.name, self._num_ranks, dist.get_rank(group), group)
            make_groups([self._axis])
        piece, packed = self._pieces[self._axis.rank], self._packed
        zeros = torch.zeros((), dtype=packed.dtype, device=packed.device).expand(piece.stop - piece.start)
        while self.counter.count < microbatch * self._num_ranks:
            self.counter.push(zeros)
        self._received.reallocate()

    def release(self) -> None:
        """Release the receive buffer, whose content has been added."""
        self._received.release()

    def prepare(self, scale: float, *, overwrites: bool) -> None:
        """Prepare the exchange of the packed buffer."""
        if scale == 0.0:
            raise StateError(
                f"{self._packed.name}: {_FLAG} divides once, after the last addition, and by what does not depend on "
                "the number of ranks: call set_gradient_divide_factor(G) of every unit, where G is the number of "
                "microbatches of a step on all ranks together, and do not divide their losses"
            )
        self._scale = scale
        self._version = self._main_grad.local_buffer._version

    def start(self, works: list[dist.Work] | None) -> list[Part]:
        """Issue the exchange."""
        exchange(*self._rows(), self._axis, works)
        return []

    def fold(self) -> None:
        """Add the received slices to the sum."""
        self.counter.push(*self._rows()[0])

    def _rows(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the slices that this rank receives from each rank, and those that it sends to each."""
        sent = [self._packed.local_buffer[piece] for piece in self._pieces]
        mine, others = sent[self._axis.rank], self._num_ranks - 1
        rooms = self._received.tensor[: others * mine.numel()].view(others, mine.numel()).unbind()
        return [*rooms[: self._axis.rank], mine, *rooms[self._axis.rank :]], sent

    def start_last(self, on_all: list[Part], scattered: list[Part], works: list[dist.Work] | None) -> None:
        """Write the sum, and all-gather it over the axes on which the optimizer is replicated."""
        target = self._main_grad.local_buffer
        if listeners:
            tell("summing", self._main_grad)
        held = self._held(target)
        self.counter.write(held[-1], self._scale)
        for axis, whole in zip(reversed(self._whole), reversed(held[:-1]), strict=True):
            parts = [whole[piece_of(whole.numel(), axis.size, rank)] for rank in range(axis.size)]
            exchange(parts, [parts[axis.rank]] * axis.size, axis)
        self._version = target._version

    def _held(self, target: torch.Tensor) -> list[torch.Tensor]:
        """Return the slices of the target, one per replicated axis; the last one is the slice that this rank sums."""
        pieces = [target]
        for axis in self._whole:
            pieces.append(pieces[-1][piece_of(pieces[-1].numel(), axis.size, axis.rank)])
        return pieces

    def look_for_changes(self, binding: GradBinding) -> None:
        """Start a new sum if the user set the visible partial sum to zero.

        Raises:
            StateError: it was changed into anything else.
        """
        if binding.state is GradState.EMPTY or binding.main_grad.local_buffer._version == self._version:
            return
        if binding.main_grad.local_buffer.any():
            raise StateError(
                f"{binding.name}: a gradient was changed between two microbatches, and {_FLAG} goes on with the sum as "
                "it was. Change gradients after the last microbatch, or set them to zero"
            )
        binding.state = GradState.EMPTY


def piece_of(numel: int, size: int, rank: int) -> slice:
    """Return the elements that one rank of an axis sums. The last ranks have fewer, or none."""
    share = -(-numel // size)
    return slice(min(rank * share, numel), min((rank + 1) * share, numel))


def cut_order(sizes: Sequence[int], placements: Sequence[BufferPlacement]) -> list[int]:
    """Return the axes over which a buffer is cut, from major to minor: sharded axes, then replicated ones."""
    axes = (index for index in range(len(sizes)) if sizes[index] > 1)
    return sorted(axes, key=lambda index: (placements[index] != Flat(), -index))


def owned_piece(numel: int, sizes: Sequence[int], order: Iterable[int], place: Sequence[int]) -> slice:
    """Return the elements of a buffer that the rank at these mesh coordinates sums."""
    start, length = 0, numel
    for index in order:
        piece = piece_of(length, sizes[index], place[index])
        start, length = start + piece.start, piece.stop - piece.start
    return slice(start, start + length)
