"""What the engine holds and sends in an optimizer step, as it tells it: peaks, lifetimes and collectives."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dbuffer.events import CollectiveCall
from dbuffer.planner.arena import Lifetime, Recorder
from dbuffer.storage import KNOWN, FlatStorage
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.planning.stand_in import StoodIn
from megatron_fsdp.planning.unit_report import storages_of
from megatron_fsdp.variants.memory_slots import pools_of

__all__ = ["Forecast", "Issue", "Peak", "Phase", "StepListener"]


class Phase(str, enum.Enum):
    """The part of an optimizer step: FORWARD (and the refresh of compute weights), BACKWARD, or STEP."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


Issue = tuple[Phase, CollectiveCall]
"""A collective, and when it is sent."""


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
        lifetimes: of gathered weights, packed gradients, parts kept after forward and scratch, in the order in which
            they come.
        counter_bytes: what ``reduction="invariant"`` adds up in, in all phases.
        slot_bytes: likewise, of slots.
        heights: the bytes held when some were added, in each phase of each microbatch.
    """

    peaks: dict[Phase, Peak]
    issues: Counter[Issue]
    lifetimes: tuple[Lifetime, ...] = field(repr=False)
    counter_bytes: int
    slot_bytes: int
    heights: tuple[tuple[int, ...], ...] = field(repr=False)

    def highest(self, more: Forecast, times: int) -> int:
        """Return the most bytes held beyond what rests, of a model with ``times`` more layers.

        Layers between the first and the last ones do all the same, so each height grows by as much with each of them
        more as it does from here to ``more``: those of the first half counted from the begin of their phase, those of
        the second half from its end.

        Args:
            more: the step of a model with one layer more.
        """
        pairs = list(zip(self.heights, more.heights, strict=True))
        pairs += [(few[::-1], many[::-1]) for few, many in pairs]
        halves = ((few[: (len(few) + 1) // 2], many) for few, many in pairs)
        return max(at + times * (then - at) for few, many in halves for at, then in zip(few, many, strict=False))


class _Owner(NamedTuple):
    """Whose a buffer is, by position, -1 for nobody's; and its kind."""

    unit: int
    group: int
    what: str


_SLOTS = _Owner(-1, -1, "slots")
_LIVES = frozenset(("gathered weights", "packed gradients", "post-forward shard", "scratch"))


class StepListener:
    """Hears what the engine does with stand-ins, and notes what a step takes; ``begin`` begins a step.

    Args:
        units: of the model, at rest.
    """

    def __init__(self, units: Sequence[StoodIn]) -> None:
        self._units = tuple(units)
        self._pools = list(dict.fromkeys(pools_of(each.unit) for each in units if each.unit.slots.sizing))
        self._positions = {id(each.unit): position for position, each in enumerate(units)}
        self._names = {each.name: position for position, each in enumerate(units)}
        self._owners: dict[int, _Owner] = {}
        for position, each in enumerate(units):
            for number, group in enumerate(each.unit.groups):
                for kind, storage in storages_of(group):
                    self._owners[id(storage)] = _Owner(position, number, kind)
        # Of whom the host does the work.
        self._unit = -1
        # What nobody need tell the end of.
        self._passing: dict[StorageWeakRef, tuple[_Owner, int]] = {}
        self._held: Counter[_Owner] = Counter()
        self._kinds: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """Begin to note a step. The optimizer's state, which is there, is counted elsewhere."""
        for memory, (owner, _) in list(self._passing.items()):
            if owner.what == "scratch":
                self._end(memory)
        self._peaks = {phase: Peak() for phase in Phase}
        self._sent: list[Counter[Issue]] = []
        self._phase: Phase | None = None
        self._heights: list[list[int]] = []
        held = {owner: size for owner, size in sorted(self._held.items()) if size and owner.what in _LIVES}
        self._lifetimes = Recorder()
        for owner, num_bytes in held.items():
            self._lifetimes.begin(owner, num_bytes)

    def forecast(self, num_microbatches: int) -> Forecast:
        """Return what the noted step takes with other microbatches: the one before the last comes again."""
        self._settle()
        issues: Counter[Issue] = sum(self._sent, Counter())
        for issue, count in self._sent[-2].items() if num_microbatches != len(self._sent) else ():
            issues[issue] += (num_microbatches - len(self._sent)) * count
        held = self._kinds
        return Forecast(
            dict(self._peaks), +issues, self._lifetimes.lifetimes(), held["sums"],
            held["slots"], tuple(map(tuple, self._heights)),
        )  # fmt: skip

    def enter(self, phase: Phase | None) -> None:
        """Go on with another phase of the step; a forward begins a microbatch."""
        self._settle()
        if phase is Phase.FORWARD:
            self._sent.append(Counter())
        self._phase = phase
        self._heights += [[]] * (phase is not None)
        self._note("")

    def __call__(self, action: str, subject: Any) -> None:
        """Hear of an event; what takes or gives memory has a method of its name."""
        if action == "issue":
            self._unit = self._positions.get(subject.owner, -1)
        elif action == "collective" and self._phase is not None and self._sent:
            # What the optimizer's step sends is no microbatch's.
            self._sent[0 if self._phase is Phase.STEP else -1][self._phase, subject] += 1
        elif action in ("allocated", "released", "computed"):
            getattr(self, f"_{action}")(subject)
        if self._pools:
            self._settle()

    def _allocated(self, storage: FlatStorage) -> None:
        owner = self._owners.get(id(storage))
        if owner is not None:
            self._add(owner, storage.nbytes)
            return
        what = "sums" if storage.name.endswith(": sums") else "scratch"
        named = re.match("unit '(.*?)'", storage.name)
        unit = self._names.get(named[1], self._unit) if named is not None else self._unit
        # Tensors may have the memory when the one that it was allocated for is gone.
        self._pass(storage.tensor, _Owner(unit, -1, what))

    def _released(self, memory: torch.UntypedStorage) -> None:
        storage = KNOWN.get(memory._cdata)
        if storage is not None and id(storage) in self._owners:
            self._add(self._owners[id(storage)], -storage.nbytes)
        else:
            self._end(StorageWeakRef(memory))

    def _computed(self, found: tuple[ParameterGroup, torch.Tensor]) -> None:
        group, gradient = found
        if group.gradients is not None and group.gradients.packs_late:
            # Autograd has it until a lane packs it.
            self._pass(gradient, self._owners[id(group.main_weight.storage)]._replace(what="waiting gradients"))

    def _pass(self, tensor: torch.Tensor, owner: _Owner) -> None:
        self._passing[StorageWeakRef(tensor.untyped_storage())] = owner, tensor.nbytes
        self._add(owner, tensor.nbytes)

    def _end(self, memory: StorageWeakRef) -> None:
        owner, num_bytes = self._passing.pop(memory, (_SLOTS, 0))
        self._add(owner, -num_bytes)

    def _settle(self) -> None:
        """Note what has gone since, and what slots have come."""
        for memory in [memory for memory in self._passing if memory.expired()]:
            self._end(memory)
        if self._pools and (more := sum(each.num_bytes for each in self._pools) - self._held[_SLOTS]):
            self._add(_SLOTS, more)

    def _add(self, owner: _Owner, num_bytes: int) -> None:
        if num_bytes > 0 and owner is not _SLOTS:
            self._settle()
        self._held[owner] += num_bytes
        self._kinds[owner.what] += num_bytes
        if num_bytes > 0:
            if owner.what in _LIVES:
                self._lifetimes.begin(owner, num_bytes)
            self._note(self._units[owner.unit].name if owner.unit >= 0 else "")
        elif num_bytes and owner.what in _LIVES:
            self._lifetimes.end(owner)

    def _note(self, unit: str) -> None:
        """Note the highest point of a phase."""
        total = self._kinds.total()
        if self._phase is None:
            return
        self._heights[-1].append(total)
        if total > self._peaks[self._phase].num_bytes:
            self._peaks[self._phase] = Peak(total, unit, self._kinds["main_grad"])
