"""Facts: what decides the memory and traffic of a model's units, as plain data.

Shapes (in plans), placements, dtypes and the order of modules: no module, process group or device. They are read off a
live model, or made from shapes alone.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from dbuffer import BufferPlacement, Flat, Partial, Plan, Replicate
from dbuffer.placements import flat_axes, shard_index
from dbuffer_kernels.quantize import wire_bytes
from megatron_fsdp.build.grouping import gathers_main_weights
from megatron_fsdp.build.invariant_exchange import (
    Cut,
    ExchangePlan,
    cut_order,
    gather_turns,
    num_counters,
    piece_of,
)
from megatron_fsdp.build.packed_layout import amax_numel, num_grids
from megatron_fsdp.policy.precision import GroupDtypes
from megatron_fsdp.policy.strategy import Placements

__all__ = [
    "AxisFacts",
    "BufferFacts",
    "GroupFacts",
    "ModelFacts",
    "Redistribution",
    "Transfer",
    "UnitFacts",
    "Visit",
    "VisitKind",
    "WireFacts",
    "reshard_reason",
]


@dataclass(frozen=True, slots=True)
class AxisFacts:
    """One axis of the mesh: its name, its number of ranks, and the place of the rank that is reported on."""

    name: str
    size: int
    rank: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective: ``num_bytes`` is the full (unsharded) side, as in ``dbuffer.CollectiveCall``."""

    kind: str
    axis: str
    num_ranks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Redistribution:
    """The collectives of one change of placements, and the most bytes its intermediate buffers take."""

    transfers: tuple[Transfer, ...] = ()
    scratch_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BufferFacts:
    """One buffer of a group.

    Attributes:
        shares: names the buffer whose memory it is a part of, empty when it has its own.
        num_parts: it is one part in so many of what the placements say; 0 and 1: all of it.
        num_bytes: of all ranks' parts, where these are no elements of the plan; 0: as the dtype says.
    """

    kind: str
    placements: tuple[BufferPlacement, ...]
    dtype: torch.dtype
    shares: str = ""
    num_parts: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WireFacts:
    """Weights that are gathered as other bytes than the compute dtype's.

    Attributes:
        num_bytes: of all ranks' parts on the wire. num_copies: of a rank's part that rest beside main weights.
        gathered_bytes: what the gathered bytes become, on each rank.
        exchanged_bytes: of magnitudes that ranks reduce after an optimizer step.
    """

    num_bytes: int
    num_copies: int
    gathered_bytes: int
    exchanged_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What decides the memory and the traffic of one parameter group.

    Attributes:
        names: of the parameters, in plan order. axes: of the data-parallel mesh, outermost first.
        requires_grad: any of them is trained. frozen: positions of those that are not, beside others that are.
        holds_gradients: the gradient accumulator is there all the time: in CPU memory, or in use and then frozen;
            with slots it is so anyway.
        part_of: between forward and backward a rank keeps one part in so many of the whole weights, and as many
            neighbours gather them; 0: nothing but its shard.
        is_offloaded: what rests lies in CPU memory.
        keeps_gathered: gathered weights have their memory all the time.
        hooks_bytes: what all ranks send where the parameter's class says what is gathered; 0 for any other.
        weight_slot, gradient_slot: what gathered weights and packed gradients take turns in: some key of the pool, and
            the bytes of a slot, 0 for a place in an arena; None: memory of the allocator.
    """

    names: tuple[str, ...]
    plan: Plan
    axes: tuple[AxisFacts, ...]
    placements: Placements
    dtypes: GroupDtypes
    requires_grad: bool
    frozen: frozenset[int] = frozenset()
    holds_gradients: bool = False
    part_of: int = 0
    weight_slot: tuple[int, int] | None = None
    gradient_slot: tuple[int, int] | None = None
    hooks_bytes: int = 0
    is_offloaded: bool = False
    keeps_gathered: bool = False

    @property
    def wire(self) -> WireFacts | None:
        """How the weights travel where that is not in their compute dtype."""
        gather = self.dtypes.gather
        if self.hooks_bytes:
            return WireFacts(self.hooks_bytes, 1, self.hooks_bytes)
        if gather is None:
            return None
        numel, whole = self.plan.numel, self.plan.numel * self.dtypes.compute.itemsize
        exchanged = 4 * amax_numel(self.plan, gather)
        return WireFacts(wire_bytes(gather, numel), num_grids(gather), whole, exchanged)

    @property
    def whole(self) -> tuple[BufferPlacement, ...]:
        """The placements of gathered weights."""
        return tuple(Replicate() for _ in self.axes)

    @property
    def partial(self) -> tuple[BufferPlacement, ...]:
        """The placements of gradients as autograd produces them."""
        return tuple(Partial("sum") for _ in self.axes)

    @property
    def rests_whole(self) -> bool:
        """Whether compute weights are whole on every rank all the time."""
        return self.placements.parameter == self.whole

    @property
    def whole_bytes(self) -> int:
        """Bytes of all weights in compute dtype, padding included."""
        return self.plan.numel * self.dtypes.compute.itemsize

    @property
    def gathered_bytes(self) -> int:
        """Bytes that are allocated to use the weights; 0 where weights rest whole, or their memory stays."""
        if self.rests_whole:
            return 0
        num_bytes = self.whole_bytes if self.wire is None else self.wire.gathered_bytes
        return num_bytes - self.whole_bytes if self.keeps_gathered else num_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes that are kept from forward to backward, in place of the whole weights."""
        return self.whole_bytes // self.part_of if self.part_of and not self.rests_whole else 0

    @property
    def packed_bytes(self) -> int:
        """Bytes of the buffer that gradients are packed into; 0 where there is none beside ``main_grad``."""
        is_packed = self.requires_grad and (self._is_invariant or self.placements.gradient != self.partial)
        return self.plan.numel * self.dtypes.reduce.itemsize if is_packed else 0

    @property
    def reduced_bytes(self) -> int:
        """Bytes of the sum of packed gradients while it has memory of its own, because it is of a wider dtype."""
        return sum(self.bytes_of(buffer) for buffer in self._reduced(rest=False))

    def _reduced(self, *, rest: bool) -> tuple[BufferFacts, ...]:
        """Return that sum's buffer if it is one that rests, as with slots, or one that comes and goes."""
        accumulate = self.dtypes.accumulate
        if accumulate is None or not self.packed_bytes or rest is (self.gradient_slot is None):
            return ()
        return (BufferFacts("reduced gradients", self.placements.gradient, accumulate),)

    @property
    def cast_bytes(self) -> int:
        """Bytes of the gradients' copy in the main weights' dtype while the optimizer steps; 0 where they have it."""
        # Only the flat AdamW steps split weights, and it casts nothing.
        if not self.requires_grad or self.dtypes.is_split or self.dtypes.main_grad is self.dtypes.main:
            return 0
        return self.local_numel(self.placements.optimizer) * self.dtypes.main.itemsize

    def local_numel(self, placements: Sequence[BufferPlacement]) -> int:
        """Return the elements of one rank's part of the flat buffer, padding included; the same on every rank."""
        return self.plan.numel // math.prod(self.axes[axis].size for axis in flat_axes(placements))

    def trained_numel(self) -> int:
        """Return the elements of the optimizer's part that belong to trained parameters."""
        return self.owned_numel(self.placements.optimizer, self.frozen) if self.requires_grad else 0

    def owned_numel(self, placements: Sequence[BufferPlacement], without: Collection[int] = ()) -> int:
        """Return the elements of one rank's part that belong to parameters, some of them left out by position."""
        axes, sizes = flat_axes(placements), [axis.size for axis in self.axes]
        part = self.local_numel(placements)
        start = part * shard_index(axes, [axis.rank for axis in self.axes], sizes)
        offsets = ((index, offset) for index, offset in enumerate(self.plan.offsets) if index not in without)
        held = (
            min(offset + self.plan.tensor_numel(index), start + part) - max(offset, start) for index, offset in offsets
        )
        return sum(max(numel, 0) for numel in held)

    def padding_numel(self, placements: Sequence[BufferPlacement]) -> int:
        """Return the elements of one rank's part that belong to no parameter."""
        return self.local_numel(placements) - self.owned_numel(placements)

    def resting(self) -> tuple[BufferFacts, ...]:
        """Return the buffers that are always there."""
        placements, dtypes = self.placements, self.dtypes
        kept = (BufferFacts("gathered weights", self.whole, dtypes.compute),) * self._keeps_whole
        if self.wire is not None:
            return (*self._resting_packed(self.wire), *kept)
        # Of one dtype, the optimizer's shard is a slice of the compute weights.
        is_alone = gathers_main_weights(placements, dtypes, is_offloaded=self.is_offloaded)
        shares = "model_weight" if not is_alone and not self.has_compute_copy else ""
        weights = (
            BufferFacts("main_weight", placements.optimizer, dtypes.main, shares),
            *(BufferFacts("remainder", placements.optimizer, torch.int16),) * dtypes.is_split,
            *(BufferFacts("model_weight", placements.parameter, dtypes.compute),) * (not is_alone),
        )
        return (*weights, *kept, *self._gradients(rest=True), *self._reduced(rest=True))

    @property
    def _keeps_whole(self) -> bool:
        return self.keeps_gathered and not self.rests_whole

    def _gradients(self, *, rest: bool) -> tuple[BufferFacts, ...]:
        """Return the gradient accumulator if it is one that rests, or one that comes and goes."""
        rests = self.holds_gradients or (self.requires_grad and self.gradient_slot is not None)
        is_there = rests if rest else self.requires_grad and not rests
        placements = self.placements.optimizer if self._is_invariant else self.placements.gradient
        return (BufferFacts("main_grad", placements, self.dtypes.main_grad),) * is_there

    @property
    def _is_invariant(self) -> bool:
        return self.dtypes.reduction == "invariant"

    def _exchanges(self) -> tuple[list[AxisFacts], ExchangePlan]:
        """Return the axes that gradients are exchanged over one after the other, and how."""
        axes = [self.axes[index] for index in cut_order([axis.size for axis in self.axes], self.placements.optimizer)]
        return axes, ExchangePlan.of(self.plan.numel, [Cut(axis.size, axis.rank) for axis in axes])

    @property
    def scratch_bytes(self) -> int:
        """Bytes in which exchanged gradients are received; 0 where there is no exchange."""
        is_there = self.requires_grad and self._is_invariant
        return self._exchanges()[1].scratch_bytes(self.dtypes.reduce.itemsize) if is_there else 0

    def counter_bytes(self, num_microbatches: int) -> int:
        """Return the bytes that sums of so many microbatches of each rank take beside ``main_grad``, for good."""
        if not self.requires_grad or not self._is_invariant:
            return 0
        numel, axes = self.plan.numel, self._exchanges()[0]
        for axis in axes:
            part = piece_of(numel, axis.size, axis.rank)
            numel = part.stop - part.start
        num_leaves = num_microbatches * math.prod(axis.size for axis in axes)
        dtype = torch.promote_types(torch.float32, self.dtypes.reduce)
        # Sums of another dtype are added up in a tensor beside them.
        beside = num_leaves.bit_count() + 1 if self.dtypes.main_grad is not dtype or self.is_offloaded else 0
        return max(num_counters(num_leaves), beside) * numel * dtype.itemsize

    def _resting_packed(self, wire: WireFacts) -> tuple[BufferFacts, ...]:
        placements, dtypes = self.placements, self.dtypes
        buffers = (
            BufferFacts("main_weight", placements.optimizer, dtypes.main),
            *(BufferFacts("remainder", placements.optimizer, torch.int16),) * dtypes.is_split,
            *(BufferFacts("packed weights", placements.parameter, torch.uint8, num_bytes=wire.num_bytes),)
            * wire.num_copies,
        )
        return (*buffers, *self._gradients(rest=True), *self._reduced(rest=True))

    @property
    def has_compute_copy(self) -> bool:
        """Whether compute weights rest in memory of their own."""
        is_alone = gathers_main_weights(self.placements, self.dtypes, is_offloaded=self.is_offloaded)
        return self.wire is None and self.dtypes.main is not self.dtypes.compute and not is_alone

    def bytes_of(self, buffer: BufferFacts) -> int:
        """Return the bytes of one rank's part of one of the group's buffers, padding included."""
        if buffer.num_bytes:
            return buffer.num_bytes // math.prod(self.axes[axis].size for axis in flat_axes(buffer.placements))
        return self.local_numel(buffer.placements) * buffer.dtype.itemsize // max(buffer.num_parts, 1)

    def transient(self) -> tuple[BufferFacts, ...]:
        """Return the buffers that are allocated while in use."""
        gathered = BufferFacts("gathered weights", self.whole, self.dtypes.compute)
        packed = BufferFacts("packed gradients", self.partial, self.dtypes.reduce)
        part = BufferFacts("post-forward shard", self.whole, self.dtypes.compute, num_parts=self.part_of)
        return (
            *(gathered,) * (bool(self.gathered_bytes) and not self._keeps_whole),
            *(part,) * bool(self.part_bytes),
            *(packed,) * bool(self.packed_bytes),
            *self._reduced(rest=False),
            *self._gradients(rest=False),
        )

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients from backward to ``zero_grad``; 0 where there are none, or their memory stays."""
        return sum(self.bytes_of(buffer) for buffer in self._gradients(rest=False))

    def gather(self) -> Redistribution:
        """Return how the weights are gathered."""
        if self.wire is not None:
            axis = self.axes[flat_axes(self.placements.parameter)[0]]
            transfer = Transfer("all_gather", axis.name, axis.size, self.wire.num_bytes)
            return Redistribution((transfer,) * (axis.size > 1), self.wire.num_bytes)
        return self._change(self.placements.parameter, self.whole, self.dtypes.compute.itemsize)

    def gather_part(self) -> Redistribution:
        """Return how the weights are gathered from the parts that a smaller group kept."""
        if not self.part_bytes:
            return self.gather()
        sharded = self.axes[flat_axes(self.placements.parameter)[0]]
        name = f"{sharded.name}, runs of {self.part_of}"
        transfer = Transfer("all_gather", name, self.part_of, self.whole_bytes)
        return Redistribution((transfer,) if self.part_of > 1 else ())

    def reduce(self) -> Redistribution:
        """Return how the packed gradients of one microbatch are reduced."""
        if not self.packed_bytes:
            return Redistribution()
        if self._is_invariant:
            return self._invariant_exchange()
        return self._change(self.partial, self.placements.gradient, self.dtypes.reduce.itemsize)

    def _invariant_exchange(self) -> Redistribution:
        axes, plan = self._exchanges()
        transfers = []
        for hop in plan.hops:
            num_bytes = hop.pieces[-1].stop * self.dtypes.reduce.itemsize
            transfers.append(Transfer("all_to_all", axes[hop.axis].name, axes[hop.axis].size, num_bytes))
        return Redistribution(tuple(transfers))

    def finalize(self) -> Redistribution:
        """Return how what is still partial after the last microbatch is reduced."""
        if not self.requires_grad:
            return Redistribution()
        if self._is_invariant:
            return self._invariant_gather()
        return self._change(self.placements.gradient, self.placements.optimizer, self.dtypes.main_grad.itemsize)

    def _invariant_gather(self) -> Redistribution:
        """Return how what the optimizer holds whole is put together from what each rank added up."""
        transfers, numel = [], self.local_numel(self.placements.optimizer)
        itemsize, scratch = self.dtypes.main_grad.itemsize, self.scratch_bytes
        for axis in self._exchanges()[0]:
            if self.placements.optimizer[self.axes.index(axis)] != Flat():
                part = range(numel)[piece_of(numel, axis.size, axis.rank)]
                for turn in gather_turns(numel, axis.size, scratch, itemsize):
                    num_bytes = axis.size * len(part[turn]) * itemsize
                    transfers.append(Transfer("all_to_all", axis.name, axis.size, num_bytes))
                numel = len(part)
        return Redistribution(tuple(reversed(transfers)))

    def refresh(self) -> Redistribution:
        """Return how compute weights are made from main weights after an optimizer step."""
        if not self.requires_grad:
            return Redistribution()
        if self.wire is not None:
            axis = self.axes[flat_axes(self.placements.parameter)[0]]
            transfer = Transfer("all_reduce", axis.name, axis.size, self.wire.exchanged_bytes)
            return Redistribution((transfer,) * (axis.size > 1 and self.wire.exchanged_bytes > 0))
        return self._change(self.placements.optimizer, self.placements.parameter, self.dtypes.compute.itemsize)

    def _change(
        self, source: tuple[BufferPlacement, ...], target: tuple[BufferPlacement, ...], itemsize: int
    ) -> Redistribution:
        """Follow ``DBuffer.redistribute`` axis by axis; the last step writes into a buffer that is there already."""
        changed = [axis for axis in range(len(self.axes)) if source[axis] != target[axis]]
        gathers = [axis for axis in changed if isinstance(source[axis], Flat)]
        order = [axis for axis in reversed(changed) if axis not in gathers] + gathers
        transfers: list[Transfer] = []
        current = list(source)
        held = scratch = 0
        for position, axis in enumerate(order):
            before = self.local_numel(current) * itemsize
            kind = _kind(source[axis], target[axis])
            current[axis] = target[axis]
            after = self.local_numel(current) * itemsize
            if kind and self.axes[axis].size > 1:
                transfers.append(Transfer(kind, self.axes[axis].name, self.axes[axis].size, max(before, after)))
            # A slice shares the memory of what it was cut from.
            made = after if position < len(order) - 1 and kind else 0
            scratch = max(scratch, held + made)
            held = made if kind else held
        return Redistribution(tuple(transfers), scratch)


def _kind(source: BufferPlacement, target: BufferPlacement) -> str:
    if isinstance(source, Flat):
        return "all_gather"
    if isinstance(source, Partial):
        return "reduce_scatter" if isinstance(target, Flat) else "all_reduce"
    return ""


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """What decides when a unit is gathered and released.

    Attributes:
        name: path of its (first) module below the model; the class name where that is the model itself.
        modules: class names. reason: why it keeps or releases its weights after forward, in words.
        ties: for every parameter that is registered in several places, their full names.
        is_root: no unit is around it.
        schedule: units of one root share a number; prefetching and draining happen within it.
        lingers: weights that forward is done with are released when the next unit runs, so the last unit of a forward
            keeps them for its backward; False: at once, if ``reshards_after_forward``.
        unshards_in_backward: False leaves weights sharded in backward, for a unit that does not need them there.
        max_packed_buffers: units of its root whose packed gradients may live at once.
        forward_prefetch, backward_prefetch: positions of the units to gather ahead when the user set them; empty: the
            unit that follows in the recorded order.
    """

    name: str
    groups: tuple[GroupFacts, ...]
    schedule: int = 0
    reshards_after_forward: bool = True
    reshards_after_backward: bool = True
    lingers: bool = False
    unshards_in_backward: bool = True
    max_packed_buffers: int = 1
    forward_prefetch: tuple[int, ...] = ()
    backward_prefetch: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()
    reason: str = ""
    ties: tuple[tuple[str, ...], ...] = ()
    is_root: bool = False

    @property
    def whole_bytes(self) -> int:
        """Bytes of all of its weights in compute dtype."""
        return sum(group.whole_bytes for group in self.groups)


def reshard_reason(groups: Sequence[GroupFacts], asked: bool | int | None, *, is_root: bool) -> str:
    """Return in words why a unit keeps or releases its weights after forward; ``asked``: reshard_after_forward."""
    if not groups:
        return "nothing to release: it has no parameters of its own"
    if all(group.rests_whole for group in groups):
        return "nothing to release: its weights rest whole on every rank"
    if asked is not None and not isinstance(asked, bool):
        return f"released after forward but for one part in {asked}: reshard_after_forward={asked}"
    if asked is not None:
        return f"{'released' if asked else 'kept'} after forward: reshard_after_forward={asked}"
    if is_root:
        return "kept after forward: it is the root"
    return "released after forward: the default below the root"


class VisitKind(enum.Enum):
    """What forward does at one point: OPEN a unit's call, USE one of its parameters, CLOSE the call."""

    OPEN = "open"
    USE = "use"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Visit:
    """One point of the forward pass; ``unit`` and ``group`` are positions, ``group`` counts only for USE."""

    kind: VisitKind
    unit: int
    group: int = -1


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The units, and the forward pass over them; backward runs through ``visits`` in reverse.

    Attributes:
        unsharded: names of parameters that belong to no unit. unsharded_bytes: what they take.
    """

    units: tuple[UnitFacts, ...]
    visits: tuple[Visit, ...]
    unsharded: tuple[str, ...] = ()
    unsharded_bytes: int = 0
