"""What the engine holds and sends in an optimizer step, as it tells it: peaks, lifetimes and collectives."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dbuffer.events import CollectiveCall
from dbuffer.planner.arena import Lifetime, Recorder
from dbuffer.storage import KNOWN, FlatStorage
from megatron_fsdp.planning.stand_in import StandIn, StoodIn
from megatron_fsdp.planning.unit_report import storages_of
from megatron_fsdp.runtime.weights.memory_slots import BufferPools

__all__ = ["Forecast", "Issue", "Peak", "Phase", "StepListener", "Transfer"]


class Phase(str, enum.Enum):
    """The part of an optimizer step: FORWARD (and the refresh of compute weights), BACKWARD, or STEP."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class Transfer(NamedTuple):
    """One collective: ``num_bytes`` is the full (unsharded) side, as in ``dbuffer.CollectiveCall``."""

    kind: str
    axis: str
    num_ranks: int
    num_bytes: int


class Issue(NamedTuple):
    """A collective: for which unit and group (the first that shares it), by position, when, and on which lane."""

    unit: int
    group: int
    phase: Phase
    lane: str
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes held in a phase beyond what rests, the gradients among them, and the unit that reached it."""

    num_bytes: int = 0
    unit: str = ""
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one optimizer step takes.

    Attributes:
        issues: how often each collective is sent.
        kept: the units that wait for their backward with weights gathered, though units like them are released.
        lifetimes: of gathered weights, packed gradients, parts kept after forward and scratch, in the order in which
            they come.
        counter_bytes: what ``reduction="invariant"`` adds up in, in all phases.
        slot_bytes: likewise, of slots.
    """

    peaks: dict[Phase, Peak]
    issues: Counter[Issue]
    kept: frozenset[int]
    lifetimes: tuple[Lifetime, ...] = field(repr=False)
    counter_bytes: int
    slot_bytes: int


class _Owner(NamedTuple):
    """Whose a buffer is, by position, -1 for nobody's; and its kind."""

    unit: int
    group: int
    what: str


_SLOTS = _Owner(-1, -1, "slots")
_KINDS = {": sums": "sums", "gradients that others sent": "received"}
_LIVES = frozenset(("gathered weights", "packed gradients", "post-forward shard", "scratch"))


class StepListener:
    """Hears what the engine does with stand-ins, and notes what a step takes."""

    def __init__(self) -> None:
        self._units: tuple[StoodIn, ...] = ()
        self._owners: dict[int, _Owner] = {}
        self._positions: dict[int, int] = {}
        self._names: dict[str, int] = {}
        self._groups: dict[int, int] = {}
        self._pools: list[BufferPools] = []
        self._late: dict[tuple[int, str], _Owner] = {}
        self._ticket, self._group = (-1, ""), 0
        self._call: CollectiveCall | None = None
        # What nobody need tell the end of.
        self._passing: dict[StorageWeakRef, tuple[_Owner, int]] = {}
        self._held: Counter[_Owner] = Counter()
        self._kinds: Counter[str] = Counter()
        self._phase: Phase | None = None
        self.begin()

    def begin(self) -> None:
        """Begin to note a step. The optimizer's state, which is there, is counted elsewhere."""
        for memory, (owner, _) in list(self._passing.items()):
            if owner.what == "scratch":
                self._end(memory)
        self._peaks = {phase: Peak() for phase in Phase}
        self._sent: list[Counter[Issue]] = []
        self._kept: set[int] = set()
        self._lifetimes = Recorder()
        for owner, num_bytes in sorted(self._held.items()):
            if num_bytes and owner.what in _LIVES:
                self._lifetimes.begin(owner, num_bytes)

    def forecast(self, num_microbatches: int) -> Forecast:
        """Return what the noted step takes if it has more microbatches, which do what the one before the last did."""
        self._settle()
        more = num_microbatches - len(self._sent)
        issues: Counter[Issue] = sum(self._sent, Counter())
        if more:
            issues += Counter({issue: more * count for issue, count in self._sent[-2].items()})
        held = self._kinds
        return Forecast(
            dict(self._peaks), issues, frozenset(self._kept), self._lifetimes.lifetimes(), held["sums"],
            held["slots"],
        )  # fmt: skip

    def follow(self, units: Sequence[StoodIn]) -> None:
        """Know the buffers of a model's units, which rest."""
        self._units = tuple(units)
        pools = {id(each.unit.schedule.pools): each.unit.schedule.pools for each in units}
        self._pools = list(pools.values()) if any(each.unit.slots.sizing for each in units) else []
        for position, each in enumerate(units):
            self._positions[id(each.unit)], self._names[each.unit.name] = position, position
            for number, group in enumerate(each.unit.groups):
                self._groups[id(group)] = number
                if group.gradients is not None and group.gradients.packs_late:
                    waiting = _Owner(position, number, "waiting gradients")
                    places = (owned.param_module_infos[0] for owned in group.owned)
                    self._late |= {(id(place.module), place.attribute): waiting for place in places}
                for kind, storage in storages_of(group):
                    self._owners[id(storage)] = _Owner(position, number, kind)

    def enter(self, phase: Phase | None) -> None:
        """Go on with another phase of the step; a forward begins a microbatch."""
        self._settle()
        if (self._phase, phase) == (Phase.FORWARD, Phase.BACKWARD):
            self._kept |= set(self._lingering())
        if phase is Phase.FORWARD:
            self._sent.append(Counter())
        self._phase = phase
        self._note("")

    def _lingering(self) -> Iterator[int]:
        """Yield the units that hold their weights though they were not told to."""
        for owner, num_bytes in self._held.items():
            if owner.what == "gathered weights" and num_bytes:
                unit = self._units[owner.unit].unit
                if unit.reshard_after_forward is None and unit is not unit.schedule.root_ref():
                    yield owner.unit

    def gradient(self, module: StandIn, name: str, gradient: torch.Tensor) -> None:
        """Note a gradient that autograd has until a lane packs it."""
        waiting = self._late.get((id(module), name))
        if waiting is not None:
            self._pass(StorageWeakRef(gradient.untyped_storage()), waiting, gradient.nbytes)

    def __call__(self, action: str, subject: Any) -> None:
        self._settle()
        if action == "issue":
            self._ticket, self._group = (self._positions.get(subject.owner, -1), subject.lane), 0
        elif action == "finish":
            self.enter(Phase.BACKWARD)
        elif action == "collective":
            self._call = subject
        elif action == "transfer":
            self._transfer(subject)
        elif action == "allocated":
            self._allocated(subject)
        elif action == "released":
            self._released(subject)
        elif action == "refresh":
            self._group = self._groups.get(id(subject), 0)
        elif action == "summing":
            unit, self._group, _ = self._owners[id(subject.storage)]
            self._ticket = unit, "last"

    def _transfer(self, subject: Any) -> None:
        call = self._call
        assert call is not None
        storages = (KNOWN.get(each.untyped_storage()._cdata) for each in (*subject.reads, *subject.writes))
        known = (self._owners[id(each)] for each in storages if id(each) in self._owners)
        owner = next(known, _Owner(self._ticket[0], self._group, ""))
        if self._phase is not None and self._sent:
            transfer = Transfer(call.kind, call.axis, call.num_ranks, call.num_bytes)
            # What the optimizer's step sends is no microbatch's.
            number = 0 if self._phase is Phase.STEP else -1
            self._sent[number][Issue(owner.unit, owner.group, self._phase, self._ticket[1], transfer)] += 1

    def _allocated(self, storage: FlatStorage) -> None:
        owner = self._owners.get(id(storage))
        if owner is not None:
            self._add(owner, storage.nbytes)
            return
        what = next((what for end, what in _KINDS.items() if storage.name.endswith(end)), "scratch")
        named = re.match("unit '(.*?)'", storage.name)
        unit = self._names.get(named[1], self._ticket[0]) if named is not None else self._ticket[0]
        # Tensors may have the memory when the one that it was allocated for is gone.
        self._pass(StorageWeakRef(storage.tensor.untyped_storage()), _Owner(unit, -1, what), storage.nbytes)

    def _released(self, memory: torch.UntypedStorage) -> None:
        storage = KNOWN.get(memory._cdata)
        if storage is not None and id(storage) in self._owners:
            self._add(self._owners[id(storage)], -storage.nbytes)
        else:
            self._end(StorageWeakRef(memory))

    def _pass(self, memory: StorageWeakRef, owner: _Owner, num_bytes: int) -> None:
        self._passing[memory] = owner, num_bytes
        self._add(owner, num_bytes)

    def _end(self, memory: StorageWeakRef) -> None:
        owner, num_bytes = self._passing.pop(memory, (_SLOTS, 0))
        self._add(owner, -num_bytes)

    def _settle(self) -> None:
        """Note what has gone since, and what slots have come."""
        for memory in [memory for memory in self._passing if memory.expired()]:
            self._end(memory)
        if self._pools:
            self._add(_SLOTS, sum(each.num_bytes for each in self._pools) - self._held[_SLOTS])

    def _add(self, owner: _Owner, num_bytes: int) -> None:
        self._held[owner] += num_bytes
        self._kinds[owner.what] += num_bytes
        if num_bytes and owner.what in _LIVES:
            if num_bytes > 0:
                self._lifetimes.begin(owner, num_bytes)
            else:
                self._lifetimes.end(owner)
        if num_bytes > 0:
            self._note(self._units[owner.unit].name if owner.unit >= 0 else "")

    def _note(self, unit: str) -> None:
        """Note the highest point of a phase."""
        total = self._kinds.total()
        if self._phase is not None and total > self._peaks[self._phase].num_bytes:
            self._peaks[self._phase] = Peak(total, unit, self._kinds["main_grad"])
