"""Gradients whose bits do not depend on the number of ranks: every microbatch's is added up in an order of its own.

Microbatch t of rank r of W is number ``t * W + r`` of its step. Ranks exchange their parts, and the owner of a shard
adds them in the order of these numbers into a binary counter: number i merges with its neighbours as its bits carry,
so that the shape of the sum depends on how many there are alone (docs/design/invariance.md).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dbuffer import DBuffer, Flat, Partial
from dbuffer.collectives import Part
from dbuffer.collectives_rare import exchange
from dbuffer.dtensor.placed_tensor import PlacedTensor
from dbuffer.events import listeners, tell
from dbuffer.mesh import MeshAxis
from dbuffer.placements import BufferPlacement
from dbuffer.storage import FlatStorage
from megatron_fsdp.build.invariant_exchange import Cut, ExchangePlan, cut_order, gather_turns, piece_of
from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.grads.last_reduction import LastReduction
from megatron_fsdp.runtime.grads.packed_gradients import PackedGradients
from megatron_fsdp.runtime.grads.shown_grads import ShownGrads
from megatron_fsdp.runtime.step.backward import Backward
from megatron_fsdp.runtime.step.fsdp_params import FSDPParams
from megatron_fsdp.runtime.step.grad_binding import GradBinding, GradState
from megatron_fsdp.runtime.step.parameter_group import group_of_parameter
from megatron_fsdp.runtime.step.reduction import Stages
from megatron_fsdp.runtime.step.unit import Unit

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

    Its memory, at most ``num_counters`` of its tensors, stays for the next sum.

    Attributes:
        count: of the tensors that are in it.
    """

    def __init__(self, dtype: torch.dtype, name: str = "") -> None:
        self.count = 0
        self._dtype, self._name = dtype, name
        self._has_zeros = False
        # By the power of two of the tensors that each adds up; None where all of them were zeros.
        self._levels: dict[int, FlatStorage | None] = {}
        self._free: list[FlatStorage] = []

    def clear(self) -> None:
        """Hold nothing; memory stays for the next sum."""
        self._free += [level for level in self._levels.values() if level is not None]
        self._levels, self.count, self._has_zeros = {}, 0, False

    def push(self, *leaves: torch.Tensor | None) -> None:
        """Add the next tensors, 1-D; None stands for zeros."""
        self._has_zeros = self._has_zeros or any(leaf is None for leaf in leaves)
        left = list(leaves)[::-1]
        while left:
            leaf = left.pop()
            if self.count & 1:
                self._carry(self._merged(self._levels.pop(0), leaf), 1)
            elif left:
                self._carry(self._merged(leaf, left.pop()), 2)
            else:
                self._levels[0] = self._merged(None, leaf)
                self.count += 1

    def _carry(self, carried: FlatStorage | None, num_leaves: int) -> None:
        """Let two more leaves' sum merge with its neighbours, after ``num_leaves`` of them that are not counted yet."""
        self.count += num_leaves
        # Of the pair's number the bits that carried.
        level, number = 1, (self.count >> 1) - 1
        while number & 1:
            carried = self._merged(self._levels.pop(level), carried)
            level, number = level + 1, number >> 1
        self._levels[level] = carried

    def _merged(
        self, first: FlatStorage | torch.Tensor | None, second: FlatStorage | torch.Tensor | None
    ) -> FlatStorage | None:
        """Return the sum of two, in the memory of the first that has some; leaves stay as they are."""
        if first is None or second is None:
            only = second if first is None else first
            return self._copied(only) if isinstance(only, torch.Tensor) else only
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and first.dtype is self._dtype:
            memory = self._memory(first)
            torch.add(first, second, out=memory.tensor)
            return memory
        held = self._copied(first) if isinstance(first, torch.Tensor) else first
        if isinstance(second, FlatStorage):
            self._free.append(second)
        held.tensor.add_(second if isinstance(second, torch.Tensor) else second.tensor)
        return held

    def _copied(self, leaf: torch.Tensor) -> FlatStorage:
        memory = self._memory(leaf)
        memory.tensor.copy_(leaf)
        return memory

    def _memory(self, like: torch.Tensor) -> FlatStorage:
        if self._free:
            return self._free.pop()
        return FlatStorage(like.numel(), self._dtype, like.device, name=f"{self._name}: sums")

    def write(self, out: torch.Tensor, scale: float) -> None:
        """Write what is left, added from the smallest up, times ``scale``."""
        held = [level.tensor for _, level in sorted(self._levels.items()) if level is not None]
        if not held:
            out.zero_()
        elif len(held) == 1 and not self._has_zeros and out.dtype is self._dtype and out.device == held[0].device:
            torch.mul(held[0], scale, out=out)
        elif out.dtype is self._dtype and out.device == held[0].device:
            self._add_up(held, out).mul_(scale)
        else:
            memory = self._memory(held[0])
            self._free.append(memory)
            out.copy_(self._add_up(held, memory.tensor).mul_(scale))

    def _add_up(self, held: Sequence[torch.Tensor], total: torch.Tensor) -> torch.Tensor:
        if len(held) == 1:
            total.copy_(held[0])
        else:
            torch.add(held[0], held[1], out=total)
        for level in held[2:]:
            total.add_(level)
        # Zeros that another number of ranks would have packed make +0.0 of a sum of -0.0.
        return total.add_(0.0) if self._has_zeros else total


class _Step:
    """The step that the backwards of one root belong to, and where its units receive, in turns.

    Of the scratch there is as much as the neediest unit wants, which stays.

    Attributes:
        first: the number of its first backward.
        last: the number of the backward that each group was in last; its gradients may have been made anew since.
    """

    def __init__(self) -> None:
        self.first = 0
        self.last: weakref.WeakKeyDictionary[FSDPParams, int] = weakref.WeakKeyDictionary()
        self._storage: FlatStorage | None = None
        # Whose turn it is, and how much of the scratch its groups have taken, one after the other.
        self._unit: weakref.ref[Unit] | None = None
        self._stop = 0

    def take(self, unit: Unit, reduction: _InvariantReduction) -> torch.Tensor:
        """Return the bytes that a group of a unit receives in; whoever had its turn before is waited for."""
        if self._unit is None or self._unit() is not unit:
            self._wait()
            self._begin(unit, reduction)
        start, self._stop = self._stop, self._stop + reduction.scratch_bytes
        assert self._storage is not None
        return self._storage.tensor[start : self._stop]

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Return the first bytes of it, which somebody has received in before, until the next turn."""
        self._wait()
        self.end_turn()
        assert self._storage is not None
        return self._storage.tensor[:num_bytes]

    def _wait(self) -> None:
        unit = self._unit() if self._unit is not None else None
        for each in unit.groups if unit is not None else ():
            if each.gradients is not None:
                each.gradients.wait()

    def _begin(self, unit: Unit, reduction: _InvariantReduction) -> None:
        needs = [each.gradients for each in unit.groups if isinstance(each.gradients, InvariantGradients)]
        num_bytes = sum(each.reduction.scratch_bytes for each in needs)
        if self._storage is None or self._storage.nbytes < num_bytes:
            self._storage = None
            self._storage = FlatStorage(num_bytes, torch.uint8, reduction.device, name="gradients that others sent")
        self._unit, self._stop = weakref.ref(unit), 0

    def end_turn(self) -> None:
        """Begin anew with whoever comes next."""
        self._unit = None


_STEPS: weakref.WeakKeyDictionary[Backward, _Step] = weakref.WeakKeyDictionary()


class _InvariantBinding(ShownGrads):
    """Shows gradients whose norms are the same however they are sharded, as ``torch.nn.utils.clip_grad_norm_`` asks."""

    def _make_gradients(self) -> None:
        super()._make_gradients()
        for gradient in self._gradients:
            if isinstance(gradient, PlacedTensor):
                gradient.has_exact_norms = True


class InvariantGradients(PackedGradients):
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
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_pre_hook(_refuse_fused))

    def _begin_sum(self) -> None:
        observer = self._observer()
        if isinstance(observer, Unit) and not observer.requires_gradient_sync:
            raise StateError(
                f"{self.binding.name}: no_sync() or set_requires_gradient_sync(False) adds up microbatches on a rank "
                f"before others' are seen, and {_FLAG} adds them up one by one. Leave it out; "
                "set_is_last_backward(False) says that more microbatches follow."
            )
        before = self.binding.state
        super()._begin_sum()
        self.reduction.check_kept(before, self.binding)

    def _stages(self) -> Stages:
        observer = self._observer()
        assert isinstance(observer, Unit)
        step = _STEPS.setdefault(observer.backward, _Step())
        number = observer.backward.number
        if self.binding.state is GradState.EMPTY:
            if step.last.get(self._fsdp_params, 0) >= step.first:
                # What it had of this step is dropped, or the step is over: a new one begins.
                step.first = number
            self.reduction.counter.clear()
        step.last[self._fsdp_params] = number
        self.reduction.skip_to(number - step.first)
        self.reduction.receive_in(step, observer)
        return super()._stages()


class _InvariantReduction(LastReduction):
    """Exchanges packed gradients, adds them up in a counter, and writes the sum into ``main_grad``.

    Args:
        packed: receives autograd's gradients. main_grad: what the optimizer reads.
    """

    def __init__(self, packed: DBuffer, main_grad: DBuffer) -> None:
        super().__init__(packed, packed, main_grad, main_grad, wire=None)
        # Not what ``finish`` may leave out.
        self.is_last = False
        self.counter = BinaryCounter(torch.promote_types(torch.float32, packed.dtype), packed.name)
        self.device = packed.device
        self._scale = 0.0
        self._version = -1
        axes, placements = packed.axes, main_grad.placements
        self._num_ranks = math.prod(axis.size for axis in axes)
        order = cut_order([axis.size for axis in axes], placements)
        self._cut = [axes[index] for index in order]
        self._whole = [axes[index] for index in order if placements[index] != Flat()]
        self._plan = ExchangePlan.of(packed.plan.numel, [Cut(axis.size, axis.rank) for axis in self._cut])
        self.scratch_bytes = self._plan.scratch_bytes(packed.dtype.itemsize)
        self._scratch: _Step | None = None
        # What it receives in, from its turn on until that is folded.
        self._receives: torch.Tensor | None = None
        grid = torch.arange(self._num_ranks).view([axes[index].size for index in reversed(order)])
        places = [len(order) - 1 - order.index(index) for index in sorted(order)]
        # Where what each rank sent is found among what is received.
        self._rows: list[int] = grid.permute(places).flatten().tolist()

    def skip_to(self, microbatch: int) -> None:
        """Count zeros for microbatches in which no rank has used the group."""
        while self.counter.count < microbatch * self._num_ranks:
            self.counter.push(None)

    def receive_in(self, step: _Step, unit: Unit) -> None:
        """Receive in scratch of the unit's root, until ``release``."""
        self._receives = step.take(unit, self)
        self._scratch = step

    def release(self) -> None:
        """Let others receive where this one has, which is folded; all groups of a unit are, when one is."""
        if self._scratch is not None and self._receives is not None:
            self._scratch.end_turn()
            self._receives = None

    def stages(self, scale: float, *, overwrite: bool) -> Stages:
        """Return the exchange of the packed buffer, and the additions."""
        if scale == 0.0:
            raise StateError(
                f"{self._packed.name}: {_FLAG} divides once, after the last addition, and by what does not depend on "
                "the number of ranks: call set_gradient_divide_factor(G) of every unit, where G is the number of "
                "microbatches of a step on all ranks together, and do not divide their losses"
            )
        assert self._receives is not None
        self._scale = scale
        self._version = self._main_grad.local_buffer._version
        # Not self: a ticket that nobody waits for must not keep this object alive.
        rows, counter = self._rows, self.counter
        exchanges = _Exchanges(self._plan, self._cut, self._packed.local_buffer, self._receives)

        def start(works: list[dist.Work] | None) -> list[Part]:
            exchanges.over(0, works)
            return []

        def fold() -> None:
            # What comes over the second axis was received over the first.
            for position in range(1, len(exchanges.cut)):
                exchanges.over(position, None)
            counter.push(*map(exchanges.rows.__getitem__, rows))
            exchanges.rows.clear()

        return Stages(start, fold, None)

    def _last_on_all(self) -> Part | None:
        return None

    @property
    def finishes_on_lane(self) -> bool:
        """False: what is added up last gathers as well."""
        return False

    def _last_parts(self, works: list[dist.Work] | None) -> list[Part]:
        target = self._main_grad.local_buffer
        if listeners:
            tell("summing", self._main_grad)
        self._write(target)
        self._version = target._version
        return []

    def _write(self, target: torch.Tensor) -> None:
        wholes = [target]
        for axis in self._whole:
            wholes.append(wholes[-1][piece_of(wholes[-1].numel(), axis.size, axis.rank)])
        self.counter.write(wholes.pop(), self._scale)
        for axis, whole in zip(reversed(self._whole), reversed(wholes), strict=True):
            self._gather(whole, axis)

    def _gather(self, whole: torch.Tensor, axis: MeshAxis) -> None:
        """Receive the other ranks' pieces by way of scratch, in as many turns as it takes.

        Not in ``main_grad``: c10d holds what it sends a moment longer, as somebody who has taken gradients does.
        """
        assert self._scratch is not None
        size, lent = axis.size, self._scratch.lend(self.scratch_bytes).view(whole.dtype)
        pieces = [whole[piece_of(whole.numel(), size, rank)] for rank in range(size)]
        for turn in gather_turns(whole.numel(), size, self.scratch_bytes, whole.itemsize):
            parts = [piece[turn] for piece in pieces]
            rooms = [room[: part.numel()] for room, part in zip(lent.tensor_split(size), parts, strict=True)]
            rooms[axis.rank].copy_(parts[axis.rank])
            exchange(rooms, [rooms[axis.rank]] * size, axis)
            for rank, (part, room) in enumerate(zip(parts, rooms, strict=True)):
                if rank != axis.rank:
                    part.copy_(room)

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
                binding.state = GradState.EMPTY
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


class _Exchanges:
    """The exchanges of one packed buffer.

    Attributes:
        rows: of the packed buffer, what each of the ranks that were exchanged with has of this rank's part.
    """

    def __init__(
        self, plan: ExchangePlan, cut: Sequence[MeshAxis], packed: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        self.rows, self.cut = [packed], cut
        self._plan, self._packed, self._scratch = plan, packed, scratch.view(packed.dtype)

    def over(self, position: int, works: list[dist.Work] | None) -> None:
        """Exchange over one axis, and append handles to wait for."""
        if position >= len(self.cut):
            return
        axis = self.cut[position]
        found: list[list[torch.Tensor]] = [[] for _ in range(axis.size)]
        for hop in (hop for hop in self._plan.hops if hop.axis == position):
            sent = [self.rows[hop.row][piece] for piece in hop.pieces]
            mine = sent[axis.rank]
            memory, start = (self._scratch, hop.start) if hop.start >= 0 else (self._packed, -1 - hop.start)
            rooms = memory[start : start + (axis.size - 1) * mine.numel()].view(axis.size - 1, -1).unbind()
            received = [*rooms[: axis.rank], mine, *rooms[axis.rank :]]
            exchange(received, sent, axis, works)
            for rank, part in enumerate(received):
                found[rank].append(part)
        self.rows = [part for parts in found for part in parts]
