"""What the engine does to memory, and sends, as events of a step: who listens to it notes them."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dbuffer.events import CollectiveCall
from dbuffer.storage import KNOWN, FlatStorage
from megatron_fsdp.planning.group_report import storages_of
from megatron_fsdp.planning.model_spec import Transfer, Use
from megatron_fsdp.runtime.step.unit import Unit
from megatron_fsdp.runtime.weights.memory_slots import BufferPools

__all__ = ["Event", "Phase", "Segments", "StepListener"]


class Phase(str, enum.Enum):
    """The part of an optimizer step: FORWARD (and the refresh of compute weights), BACKWARD, or STEP."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class Event(NamedTuple):
    """What the engine did to memory, or sent.

    Attributes:
        unit, group: positions in the facts, -1 for unknown ones. what: the kind of buffer; the lane of a collective.
        num_bytes: that the engine holds more, or less. transfer: a collective; None for memory.
    """

    unit: int
    group: int
    what: str
    num_bytes: int
    transfer: Transfer | None = None


Segments = tuple[tuple[Phase | None, tuple[Event, ...]], ...]
"""Of a step, in order; what is of no phase is what was there before."""


class StepListener:
    """Hears what the engine does, and notes it by segments: of a phase, and of backward what comes after all units."""

    def __init__(self) -> None:
        self.segments: list[tuple[Phase | None, list[Event]]] = [(None, [])]
        # By identity: unit, group and kind of what lies in a storage.
        self._owners: dict[int, tuple[int, int, str]] = {}
        self._units: dict[int, int] = {}
        self._names: dict[str, int] = {}
        self._groups: dict[int, int] = {}
        self._pools: list[BufferPools] = []
        self._ticket, self._group = (-1, ""), 0
        self._late: set[Use] = set()
        self._call: CollectiveCall | None = None
        # What nobody need tell the end of.
        self._passing: dict[StorageWeakRef, Event] = {}
        self._held: Counter[tuple[int, int, str]] = Counter()

    @property
    def slot_bytes(self) -> int:
        """Bytes of slots."""
        return self._held[_SLOTS]

    def follow(self, units: Mapping[int, Unit]) -> None:
        """Know the buffers of a model's units, by their positions, which rest."""
        self._units = {id(unit): position for position, unit in units.items()}
        self._names = {unit.name: position for position, unit in units.items()}
        pools = {id(unit.schedule.pools): unit.schedule.pools for unit in units.values()}
        self._pools = [pools[key] for key in pools if any(unit.slots.sizing for unit in units.values())]
        for position, unit in units.items():
            for number, group in enumerate(unit.groups):
                self._groups[id(group)] = number
                if group.gradients is not None and group.gradients.packs_late:
                    self._late |= {Use(position, number, index) for index in range(len(group.parameters))}
                for kind, storage in storages_of(group):
                    self._owners[id(storage)] = position, number, kind

    def enter(self, phase: Phase | None) -> None:
        """Begin a segment."""
        self._settle()
        self.segments.append((phase, []))

    def held(self) -> None:
        """Note, as if it came now, what there is beside what rests. The optimizer's state is counted elsewhere."""
        for memory, event in list(self._passing.items()):
            if event.what == "scratch":
                del self._passing[memory]
                self._held[event[:3]] -= event.num_bytes
        for (unit, group, what), num_bytes in sorted(self._held.items()):
            if num_bytes:
                self.segments[-1][1].append(Event(unit, group, what, num_bytes))

    def taken(self) -> Segments:
        """Return what was noted since it was cleared."""
        self._settle()
        return tuple((phase, tuple(events)) for phase, events in self.segments)

    def gradient(self, use: Use, gradient: torch.Tensor) -> None:
        """Note a gradient that autograd has until a lane packs it."""
        if use in self._late:
            memory = StorageWeakRef(gradient.untyped_storage())
            self._pass(memory, Event(use.unit, use.group, "waiting gradients", gradient.nbytes))

    def __call__(self, action: str, subject: Any) -> None:
        self._settle()
        if action == "issue":
            self._ticket, self._group = (self._units.get(subject.owner, -1), subject.lane), 0
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
        assert self._call is not None
        storages = (KNOWN.get(each.untyped_storage()._cdata) for each in (*subject.reads, *subject.writes))
        known = (self._owners[id(each)] for each in storages if id(each) in self._owners)
        unit, group, _ = next(known, (self._ticket[0], self._group, ""))
        call = self._call
        transfer = Transfer(call.kind, call.axis, call.num_ranks, call.num_bytes)
        self.segments[-1][1].append(Event(unit, group, self._ticket[1], 0, transfer))

    def _allocated(self, storage: FlatStorage) -> None:
        owner = self._owners.get(id(storage))
        if owner is not None:
            self._add(Event(*owner, storage.nbytes))
            return
        what = next((what for end, what in _KINDS.items() if storage.name.endswith(end)), "scratch")
        # Tensors may have the memory when the one that it was allocated for is gone.
        memory = StorageWeakRef(storage.tensor.untyped_storage())
        named = re.match("unit '(.*?)'", storage.name)
        unit = self._names.get(named[1], self._ticket[0]) if named is not None else self._ticket[0]
        self._pass(memory, Event(unit, -1, what, storage.nbytes))

    def _released(self, memory: torch.UntypedStorage) -> None:
        storage = KNOWN.get(memory._cdata)
        if storage is not None and id(storage) in self._owners:
            self._add(Event(*self._owners[id(storage)], -storage.nbytes))
        else:
            self._end(StorageWeakRef(memory))

    def _pass(self, memory: StorageWeakRef, event: Event) -> None:
        self._passing[memory] = event
        self._add(event)

    def _end(self, memory: StorageWeakRef) -> None:
        event = self._passing.pop(memory, None)
        if event is not None:
            self._add(event._replace(num_bytes=-event.num_bytes))

    def _settle(self) -> None:
        """Note what has gone since, and what slots have come."""
        for memory in [memory for memory in self._passing if memory.expired()]:
            self._end(memory)
        slots = sum(each.num_bytes for each in self._pools) - self._held[_SLOTS] if self._pools else 0
        if slots:
            self._add(Event(*_SLOTS, slots))

    def _add(self, event: Event) -> None:
        if event.num_bytes:
            self._held[event[:3]] += event.num_bytes
            self.segments[-1][1].append(event)


_SLOTS = (-1, -1, "slots")
_KINDS = {": sums": "sums", "gradients that others sent": "received"}
