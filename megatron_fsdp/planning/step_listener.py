"""StepListener: records the memory peaks and collectives of an optimizer step from engine events."""

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
from dbuffer.storage import KNOWN, FlatStorage
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.planning.stand_in import StoodIn
from megatron_fsdp.planning.unit_report import storages_of
from megatron_fsdp.variants.memory_slots import pools_of

__all__ = ["Forecast", "Issue", "Peak", "Phase", "StepListener"]


class Phase(str, enum.Enum):
    """A phase of a training step: FORWARD (with the refresh of compute weights), BACKWARD or STEP (optimizer)."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


Issue = tuple[Phase, CollectiveCall]
"""A collective, and the phase in which it is issued."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes held in a phase beyond the resting buffers, the unit that reached it, and the gradients' part."""

    num_bytes: int = 0
    unit: str = ""
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """The memory and collectives of one optimizer step.

    Attributes:
        peaks: for each phase, the most bytes held beyond the resting buffers, and the unit that reached them.
        issues: how often each collective is issued.
        counter_bytes: bytes of the sums of ``reduction="invariant"``, which are held in all phases.
        slot_bytes: bytes of slots; slots exist in all phases.
        heights: the bytes held after each allocation, one tuple per phase and microbatch.
    """

    peaks: dict[Phase, Peak]
    issues: Counter[Issue]
    counter_bytes: int
    slot_bytes: int
    heights: tuple[tuple[int, ...], ...] = field(repr=False)

    def highest(self, more: Forecast, times: int) -> int:
        """Return the most bytes held beyond the resting buffers, for a model with ``times`` more layers.

        Layers between the first and the last ones all behave alike. Each further layer therefore raises each height by
        the difference to ``more``. Heights of the first half of a phase are matched from its start, those of the second
        half from its end.

        Args:
            more: the step of a model with one more layer.
        """
        pairs = list(zip(self.heights, more.heights, strict=True))
        pairs += [(few[::-1], many[::-1]) for few, many in pairs]
        halves = ((few[: (len(few) + 1) // 2], many) for few, many in pairs)
        return max(at + times * (then - at) for few, many in halves for at, then in zip(few, many, strict=False))


class _Owner(NamedTuple):
    """The owner of a buffer: positions of its unit and group, -1 for none; and the buffer's kind."""

    unit: int
    group: int
    what: str


_SLOTS = _Owner(-1, -1, "slots")


class StepListener:
    """Records memory and collectives of the engine's steps on stand-ins; ``begin`` starts a step.

    Args:
        units: the units of the model, at rest.
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
        # The unit that the host currently works for.
        self._unit = -1
        # Memory whose end no event tells; its weak references expire.
        self._passing: dict[StorageWeakRef, tuple[_Owner, int]] = {}
        self._held: Counter[_Owner] = Counter()
        self._kinds: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """Start recording a step. The optimizer's state is counted elsewhere."""
        for memory, (owner, _) in list(self._passing.items()):
            if owner.what == "scratch":
                self._end(memory)
        self._peaks = {phase: Peak() for phase in Phase}
        self._sent: list[Counter[Issue]] = []
        self._phase: Phase | None = None
        self._heights: list[list[int]] = []

    def forecast(self, num_microbatches: int) -> Forecast:
        """Return the forecast for a number of microbatches; further ones repeat the one before the last."""
        self._settle()
        issues: Counter[Issue] = sum(self._sent, Counter())
        for issue, count in self._sent[-2].items() if num_microbatches != len(self._sent) else ():
            issues[issue] += (num_microbatches - len(self._sent)) * count
        held = self._kinds
        return Forecast(
            dict(self._peaks), +issues, held["sums"],
            held["slots"], tuple(map(tuple, self._heights)),
        )  # fmt: skip

    def enter(self, phase: Phase | None) -> None:
        """Enter a phase of the step; FORWARD starts a microbatch."""
        self._settle()
        if phase is Phase.FORWARD:
            self._sent.append(Counter())
        self._phase = phase
        self._heights += [[]] * (phase is not None)
        self._note("")

    def __call__(self, action: str, subject: Any) -> None:
        """Handle an event; events about memory have a method with their name."""
        if action == "issue":
            self._unit = self._positions.get(subject.owner, -1)
        elif action == "collective" and self._phase is not None and self._sent:
            # Collectives of the optimizer step belong to no microbatch, so they count once.
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
        # The memory is tracked, because tensors may keep it after the FlatStorage was deleted.
        self._pass(storage.tensor, _Owner(unit, -1, what))

    def _released(self, memory: torch.UntypedStorage) -> None:
        storage = KNOWN.get(memory._cdata)
        if storage is not None and id(storage) in self._owners:
            self._add(self._owners[id(storage)], -storage.nbytes)
        else:
            self._end(StorageWeakRef(memory))

    def _computed(self, found: tuple[ParameterGroup, torch.Tensor]) -> None:
        group, gradient = found
        if group.gradient_buffer is not None and group.gradient_buffer.packer is not None:
            # Autograd holds the gradient until a lane packs it.
            self._pass(gradient, self._owners[id(group.main_weight.storage)]._replace(what="waiting gradients"))

    def _pass(self, tensor: torch.Tensor, owner: _Owner) -> None:
        self._passing[StorageWeakRef(tensor.untyped_storage())] = owner, tensor.nbytes
        self._add(owner, tensor.nbytes)

    def _end(self, memory: StorageWeakRef) -> None:
        owner, num_bytes = self._passing.pop(memory, (_SLOTS, 0))
        self._add(owner, -num_bytes)

    def _settle(self) -> None:
        """Record memory that was freed since the last call, and slots that were added."""
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
            self._note(self._units[owner.unit].name if owner.unit >= 0 else "")

    def _note(self, unit: str) -> None:
        """Record the held bytes, and the peak of the phase."""
        total = self._kinds.total()
        if self._phase is None:
            return
        self._heights[-1].append(total)
        if total > self._peaks[self._phase].num_bytes:
            self._peaks[self._phase] = Peak(total, unit, self._kinds["main_grad"])
