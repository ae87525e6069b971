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
from megatron_fsdp.runtime.grads.binary_counter import BinaryCounter
from megatron_fsdp.runtime.grads.last_reduction import LastReduction
from megatron_fsdp.runtime.grads.packed_gradients import PackedGradients
from megatron_fsdp.runtime.grads.shown_grads import ShownGrads
from megatron_fsdp.runtime.step.backward import Backward
from megatron_fsdp.runtime.step.fsdp_params import FSDPParams
from megatron_fsdp.runtime.step.grad_binding import GradBinding, GradState
from megatron_fsdp.runtime.step.parameter_group import group_of_parameter
from megatron_fsdp.runtime.step.unit import Unit

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


class _Step:
    """The step that the backwards of one root belong to, and the scratch where its units receive, in turns.

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
            needs = [each.reduction for each in unit.gradients if isinstance(each, InvariantGradients)]
            num_bytes = sum(each.scratch_bytes for each in needs)
            if self._storage is None or self._storage.nbytes < num_bytes:
                self._storage = None
                self._storage = FlatStorage(num_bytes, torch.uint8, reduction.device, name="gradients that others sent")
            self._unit, self._stop = unit.reference, 0
        start, self._stop = self._stop, self._stop + reduction.scratch_bytes
        assert self._storage is not None
        return self._storage.tensor[start : self._stop]

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Return the first bytes of it, in which a group has received before, until the next turn."""
        self._wait()
        self.end_turn()
        assert self._storage is not None
        return self._storage.tensor[:num_bytes]

    def _wait(self) -> None:
        unit = self._unit() if self._unit is not None else None
        for buffer in unit.gradients if unit is not None else ():
            buffer.wait()

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
        dtypes, placements = self._spec.dtypes, self._spec.placements
        self.rests_partial = self.rests_final = False
        partial: tuple[BufferPlacement, ...] = (Partial("sum"),) * len(placements.gradient)
        self.packed = self._buffer(partial, dtypes.reduce, "packed gradients", self._device)
        main_grad = self._buffer(placements.optimizer, dtypes.main_grad, "main_grad", self._template.device)
        self._bind(_InvariantBinding(main_grad, main_grad, self._fsdp_params, self._template.dtype))
        self.reduction = _InvariantReduction(self.packed, main_grad)
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_pre_hook(_refuse_fused))

    def _begin_sum(self) -> None:
        unit = self._observer()
        if unit is not None and not unit.requires_gradient_sync:
            raise StateError(
                f"{self.binding.name}: no_sync() or set_requires_gradient_sync(False) adds up microbatches on a rank "
                f"before others' are seen, and {_FLAG} adds them up one by one. Leave it out; "
                "set_is_last_backward(False) says that more microbatches follow."
            )
        before = self.binding.state
        super()._begin_sum()
        self.reduction.look_for_changes(before, self.binding)

    def _prepare(self) -> None:
        unit = self._observer()
        assert isinstance(unit, Unit)
        step = _STEPS.setdefault(unit.backward, _Step())
        number = unit.backward.number
        if self.binding.state is GradState.EMPTY:
            if step.last.get(self._fsdp_params, 0) >= step.first:
                # What it had of this step is dropped, or the step is over: a new one begins.
                step.first = number
            self.reduction.clear()
        step.last[self._fsdp_params] = number
        self.reduction.take_turn(number - step.first, step, unit)
        super()._prepare()


class _InvariantReduction(LastReduction):
    """Exchanges packed gradients, adds them up in a counter, and writes the sum into ``main_grad``.

    Args:
        packed: receives autograd's gradients. main_grad: what the optimizer reads.
    """

    # What is added up last gathers as well.
    finishes_on_lane = False
    _exchanges: _Exchanges | None = None

    def __init__(self, packed: DBuffer, main_grad: DBuffer) -> None:
        super().__init__(packed, packed, main_grad, main_grad, wire=None)
        self.counter = BinaryCounter(torch.promote_types(torch.float32, packed.dtype), packed.name)
        self.device = packed.device
        # What a user made of this rank's piece of the sum so far, to which the counter's is added.
        self._changed: torch.Tensor | None = None
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

    def clear(self) -> None:
        """Hold nothing of a sum."""
        self.counter.clear()
        self._changed = None

    def take_turn(self, microbatch: int, step: _Step, unit: Unit) -> None:
        """Count zeros for microbatches in which no rank has used the group; receive in scratch until ``release``."""
        while self.counter.count < microbatch * self._num_ranks:
            self.counter.push(None)
        self._receives = step.take(unit, self)
        self._scratch = step

    def release(self) -> None:
        """Let others receive where this one has, which is folded; all groups of a unit are, when one is."""
        if self._scratch is not None and self._receives is not None:
            self._scratch.end_turn()
            self._receives = self._exchanges = None

    def prepare(self, scale: float, *, overwrites: bool) -> None:
        """Get ready for the exchange of the packed buffer."""
        if scale == 0.0:
            raise StateError(
                f"{self._packed.name}: {_FLAG} divides once, after the last addition, and by what does not depend on "
                "the number of ranks: call set_gradient_divide_factor(G) of every unit, where G is the number of "
                "microbatches of a step on all ranks together, and do not divide their losses"
            )
        assert self._receives is not None
        self._scale = scale
        self._version = self._main_grad.local_buffer._version
        self._exchanges = _Exchanges(self._plan, self._cut, self._packed.local_buffer, self._receives)

    def start(self, works: list[dist.Work] | None) -> list[Part]:
        """Issue the exchange over the first axis."""
        assert self._exchanges is not None
        self._exchanges.over(0, works)
        return []

    def fold(self) -> None:
        """Exchange over the others, and add up."""
        exchanges = self._exchanges
        assert exchanges is not None
        # What comes over the second axis was received over the first.
        for position in range(1, len(exchanges.cut)):
            exchanges.over(position, None)
        self.counter.push(*map(exchanges.rows.__getitem__, self._rows))
        exchanges.rows.clear()

    def start_last(self, on_all: list[Part], scattered: list[Part], works: list[dist.Work] | None) -> None:
        """Write the sum, and gather what the optimizer holds whole."""
        target = self._main_grad.local_buffer
        if listeners:
            tell("summing", self._main_grad)
        pieces = self._pieces(target)
        self._write(pieces[-1])
        for axis, whole in zip(reversed(self._whole), reversed(pieces[:-1]), strict=True):
            self._gather(whole, axis)
        self._version = target._version

    def _pieces(self, target: torch.Tensor) -> list[torch.Tensor]:
        """Return what is cut over each axis that the optimizer holds whole, and last what this rank adds up."""
        pieces = [target]
        for axis in self._whole:
            pieces.append(pieces[-1][piece_of(pieces[-1].numel(), axis.size, axis.rank)])
        return pieces

    def _write(self, piece: torch.Tensor) -> None:
        self.counter.write(piece, self._scale)
        if self._changed is not None:
            piece.add_(self._changed)

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

    def look_for_changes(self, before: GradState, binding: GradBinding) -> None:
        """Go on with what users made of the sum so far; a change on one rank is that rank's, so no other one is asked.

        Values that are as they were go on as they would have, and zeros begin anew; to others what follows is added.

        Args:
            before: what gradients were when the sum was begun, or gone on with.
        Raises:
            StateError: a part was dropped of a sum that is not written yet.
        """
        if binding.state is GradState.EMPTY:
            return
        target = binding.main_grad.local_buffer
        if target._version == self._version:
            return
        if before is not GradState.FINAL:
            raise StateError(
                f"{binding.name}: gradients of some parameters were dropped between two microbatches of a step, which "
                f"{_FLAG} adds up one by one. Drop them after the last one, or drop all of them."
            )
        if not target.any():
            binding.state = GradState.EMPTY
            return
        piece = self._pieces(target)[-1]
        found = piece.clone()
        self._write(piece)
        if not torch.equal(piece, found):
            self.counter.clear()
            self._changed = found
        self._version = target._version


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
