"""What the engine is run with, as plain data: units, layouts and the forward pass, of a live model or of shapes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dbuffer import BufferPlacement, Plan, Replicate
from dbuffer.placements import flat_axes, shard_index
from megatron_fsdp.policy.precision import GroupDtypes, MixedPrecisionPolicy
from megatron_fsdp.policy.slots import SlotChoice
from megatron_fsdp.policy.strategy import Placements

__all__ = ["AxisFacts", "Call", "GroupFacts", "ModelFacts", "Transfer", "UnitFacts", "Use", "reshard_reason"]


@dataclass(frozen=True, slots=True)
class AxisFacts:
    """One axis of the mesh: its name, its number of ranks, and the place of the rank that is reported on."""

    name: str
    size: int
    rank: int


class Transfer(NamedTuple):
    """One collective: ``num_bytes`` is the full (unsharded) side, as in ``dbuffer.CollectiveCall``."""

    kind: str
    axis: str
    num_ranks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What one parameter group is built from.

    Attributes:
        names: of the parameters, in plan order. axes: of the data-parallel mesh, outermost first.
        requires_grad: any of them is trained, or was when it was sharded. frozen: positions of those that are not.
        keeps_gathered: gathered weights have their memory all the time. holds_gradients: so has their sum.
        has_hooks: a class of the user's says what is gathered, which stand-ins do not know.
    """

    names: tuple[str, ...]
    plan: Plan
    axes: tuple[AxisFacts, ...]
    placements: Placements
    dtypes: GroupDtypes
    requires_grad: bool
    frozen: frozenset[int] = frozenset()
    is_offloaded: bool = False
    keeps_gathered: bool = False
    holds_gradients: bool = False
    has_hooks: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether any of its parameters is trained."""
        return self.requires_grad and len(self.frozen) < len(self.names)

    @property
    def rests_whole(self) -> bool:
        """Whether compute weights are whole on every rank all the time."""
        return all(placement == Replicate() for placement in self.placements.parameter)

    @property
    def whole_bytes(self) -> int:
        """Bytes of all weights in compute dtype, padding included."""
        return self.plan.numel * self.dtypes.compute.itemsize

    def local_numel(self, placements: Sequence[BufferPlacement]) -> int:
        """Return the elements of one rank's part of the flat buffer, padding included; the same on every rank."""
        return self.plan.numel // math.prod(self.axes[axis].size for axis in flat_axes(placements))

    def owned_numel(self, placements: Sequence[BufferPlacement], without: Collection[int] = ()) -> int:
        """Return the elements of one rank's part that belong to parameters, some of them left out by position."""
        axes, sizes = flat_axes(placements), [axis.size for axis in self.axes]
        part = self.local_numel(placements)
        start = part * shard_index(axes, [axis.rank for axis in self.axes], sizes)
        held = (
            min(offset + self.plan.tensor_numel(index), start + part) - max(offset, start)
            for index, offset in enumerate(self.plan.offsets)
            if index not in without
        )
        return sum(max(numel, 0) for numel in held)


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """What one unit is built from.

    Attributes:
        name: path of its (first) module below the model; the class name where that is the model itself.
        modules: class names. reason: why it keeps or releases its weights after forward, in words.
        ties: for every parameter that is registered in several places, their full names.
        is_root: no unit is around it.
        reshard_after_forward: as asked of ``fully_shard``. forward_prefetch, backward_prefetch: positions of the units
            to gather ahead when the user set them. max_packed_buffers: 0 for the engine's own choice.
    """

    name: str
    groups: tuple[GroupFacts, ...]
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    reshard_after_forward: bool | int | None = None
    reshards_after_backward: bool = True
    unshards_in_backward: bool = True
    max_packed_buffers: int = 0
    forward_prefetch: tuple[int, ...] = ()
    backward_prefetch: tuple[int, ...] = ()
    slots: SlotChoice = field(default_factory=SlotChoice)
    modules: tuple[str, ...] = ()
    reason: str = ""
    ties: tuple[tuple[str, ...], ...] = ()
    is_root: bool = False

    @property
    def reshards_after_forward(self) -> bool:
        """Whether it gives its weights back between forward and backward."""
        return not self.is_root if self.reshard_after_forward is None else self.reshard_after_forward is not False

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


class Use(NamedTuple):
    """A use of a parameter, by the position of its group in the unit and its own in that."""

    unit: int
    group: int
    position: int


@dataclass(frozen=True, slots=True)
class Call:
    """The call of a module of a unit (-1: of no unit): what it uses and calls, in order. Backward goes back."""

    unit: int
    steps: tuple[Use | Call, ...]

    def inner(self) -> Iterator[Call]:
        """Yield it, and all calls inside."""
        yield self
        for step in self.steps:
            if isinstance(step, Call):
                yield from step.inner()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The units, and the forward pass over them.

    Attributes:
        unsharded: names of parameters that belong to no unit. unsharded_bytes: what they take.
        has_streams: lanes are streams, as on a GPU.
    """

    units: tuple[UnitFacts, ...]
    call: Call
    unsharded: tuple[str, ...] = ()
    unsharded_bytes: int = 0
    has_streams: bool = True
