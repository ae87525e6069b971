"""Forecast: what one optimizer step allocates and sends.

The schedule is played through on paper: the same gathers, prefetches, packed buffers and reductions in the same order,
with byte counts for tensors.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_fsdp.facts import ModelFacts, Redistribution, Transfer, Visit, VisitKind

__all__ = ["Forecast", "Issue", "Peak", "Phase", "forecast_step"]


class Phase(str, enum.Enum):
    """The part of an optimizer step: FORWARD, BACKWARD, or STEP (the optimizer, and the refresh of compute weights)."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class Peak:
    """The most transient bytes of a phase, beyond what rests, and the unit whose buffer reached it."""

    num_bytes: int = 0
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Issue:
    """A collective of one group, with how often one optimizer step issues it."""

    unit: int
    group: int
    phase: Phase
    transfer: Transfer
    count: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one optimizer step takes."""

    peaks: dict[Phase, Peak]
    issues: tuple[Issue, ...]


def forecast_step(facts: ModelFacts, num_microbatches: int) -> Forecast:
    """Play one optimizer step of ``num_microbatches`` forward and backward passes, with the order of units known
    from before.

    Every unit is called once per forward, in the order of ``facts.visits``; every trainable parameter gets a
    gradient; the
    optimizer steps the trainable parameters and refreshes compute weights once (``fully_shard_optimizer``).
    """
    # What stays gathered after a backward is there when the next step begins.
    warm = _Playback(facts, held=frozenset())
    warm.step(1)
    playback = _Playback(facts, held=frozenset(warm.gathered))
    playback.step(num_microbatches)
    issues = (
        Issue(unit, group, phase, transfer, count) for (unit, group, phase, transfer), count in playback.issued.items()
    )
    return Forecast({phase: playback.peaks.get(phase, Peak()) for phase in Phase}, tuple(issues))


class _Playback:
    """The state of the schedule: which units are gathered, active in backward, or being reduced."""

    def __init__(self, facts: ModelFacts, held: frozenset[int]) -> None:
        self._units = facts.units
        self._visits = facts.visits
        self._opened = {visit.unit: at for at, visit in enumerate(facts.visits) if visit.kind is VisitKind.OPEN}
        self._closed = {visit.unit: at for at, visit in enumerate(facts.visits) if visit.kind is VisitKind.CLOSE}
        self._awaited = Counter(visit.unit for visit in facts.visits if self._is_trained(visit))
        trained_from = next((at for at, visit in enumerate(facts.visits) if self._is_trained(visit)), len(facts.visits))
        # Outputs of units that close before the first trainable parameter need no gradient, and backward never gets
        # there.
        self._watched = {unit for unit, at in self._closed.items() if at > trained_from}
        self.gathered = set(held)
        self.peaks: dict[Phase, Peak] = {}
        self.issued: Counter[tuple[int, int, Phase, Transfer]] = Counter()
        self._stale = set(held)
        self._phase = Phase.FORWARD
        self._bytes = sum(group.gathered_bytes for unit in held for group in self._units[unit].groups)
        self._packed: set[tuple[int, int]] = set()
        self._reducing: set[int] = set()
        self._active: list[int] = []
        self._arrived: Counter[int] = Counter()

    def step(self, num_microbatches: int) -> None:
        for microbatch in range(num_microbatches):
            self._enter(Phase.FORWARD)
            self._forward()
            self._enter(Phase.BACKWARD)
            self._backward(is_last=microbatch == num_microbatches - 1)
        self._enter(Phase.STEP)
        self._cast_gradients()
        for unit, facts in enumerate(self._units):
            for group, member in enumerate(facts.groups):
                self._transfer(unit, group, member.refresh())

    def _cast_gradients(self) -> None:
        for unit, facts in enumerate(self._units):
            self._hold(sum(group.cast_bytes for group in facts.groups), unit)
        self._bytes -= sum(group.cast_bytes for facts in self._units for group in facts.groups)

    def _is_trained(self, visit: Visit) -> bool:
        return visit.kind is VisitKind.USE and self._units[visit.unit].groups[visit.group].requires_grad

    # ------------------------------------------------------------------ forward

    def _forward(self) -> None:
        orders: dict[int, list[int]] = {}
        for unit in sorted(self._opened, key=self._opened.__getitem__):
            orders.setdefault(self._units[unit].schedule, []).append(unit)
        for visit in self._visits:
            facts = self._units[visit.unit]
            order = orders[facts.schedule]
            if visit.kind is VisitKind.OPEN:
                if visit.unit in self._stale:
                    self._release(visit.unit)
                self._gather(visit.unit)
                self._prefetch_forward(visit.unit, order)
            elif visit.kind is VisitKind.CLOSE:
                if facts.reshards_after_forward:
                    self._release(visit.unit)
                if visit.unit == order[0]:
                    self._release_unused(order)

    def _release_unused(self, units: Iterable[int]) -> None:
        # Explicit prefetching can gather a unit that forward has already left.
        for unit in units:
            if self._units[unit].reshards_after_forward:
                self._release(unit)

    def _prefetch_forward(self, unit: int, order: list[int]) -> None:
        following = order.index(unit) + 1
        ahead = [other for other in order[following : following + 2] if self._units[other].groups][:1]
        for other in self._units[unit].forward_prefetch or ahead:
            self._gather(other)

    # ------------------------------------------------------------------ backward

    def _backward(self, *, is_last: bool) -> None:
        trail = sorted(self._watched, key=self._closed.__getitem__)
        for visit in reversed(self._visits):
            if visit.kind is VisitKind.CLOSE and visit.unit in self._watched:
                self._leave_passed(visit.unit)
                self._active.append(visit.unit)
                self._gather(visit.unit)
                self._prefetch_backward(visit.unit, trail)
            elif self._is_trained(visit):
                self._receive(visit.unit, visit.group)
        for unit in tuple(self._active):
            self._leave(unit)
        for schedule in {facts.schedule for facts in self._units}:
            self._drain(schedule)
        for unit, facts in enumerate(self._units):
            if is_last:
                for group, member in enumerate(facts.groups):
                    self._transfer(unit, group, member.finalize())
            if facts.reshards_after_backward:
                self._release(unit)
        self._arrived.clear()

    def _leave_passed(self, unit: int) -> None:
        for other in tuple(self._active):
            is_same_root = self._units[other].schedule == self._units[unit].schedule
            if is_same_root and self._opened[other] > self._closed[unit]:
                self._leave(other)

    def _prefetch_backward(self, unit: int, trail: list[int]) -> None:
        facts = self._units[unit]
        before = [other for other in trail[: trail.index(unit)] if self._units[other].schedule == facts.schedule]
        ahead = [other for other in before if self._units[other].groups][-1:]
        for other in facts.backward_prefetch or ahead:
            self._gather(other)

    def _receive(self, unit: int, group: int) -> None:
        facts = self._units[unit]
        if facts.groups[group].packed_bytes and (unit, group) not in self._packed:
            self._drain(facts.schedule)
            self._packed.add((unit, group))
            self._hold(facts.groups[group].packed_bytes, unit)
        self._arrived[unit] += 1
        if self._arrived[unit] == self._awaited[unit]:
            # A unit with frozen parameters keeps its weights until backward has left it: they may still be in use.
            if all(member.requires_grad for member in facts.groups):
                self._leave(unit)
            for position, member in enumerate(facts.groups):
                self._transfer(unit, position, member.reduce())
            self._reducing.add(unit)

    def _leave(self, unit: int) -> None:
        self._active.remove(unit)
        if self._units[unit].reshards_after_backward:
            self._release(unit)

    def _drain(self, schedule: int) -> None:
        for unit in [unit for unit in self._reducing if self._units[unit].schedule == schedule]:
            self._reducing.remove(unit)
            for key in [key for key in self._packed if key[0] == unit]:
                self._packed.remove(key)
                self._bytes -= self._units[unit].groups[key[1]].packed_bytes

    # ------------------------------------------------------------------ bytes

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        if self._bytes > self.peaks.get(phase, Peak()).num_bytes:
            self.peaks[phase] = Peak(self._bytes, "")

    def _gather(self, unit: int) -> None:
        if unit in self.gathered:
            return
        self.gathered.add(unit)
        self._stale.discard(unit)
        for position, group in enumerate(self._units[unit].groups):
            self._hold(group.gathered_bytes, unit)
            self._transfer(unit, position, group.gather())

    def _release(self, unit: int) -> None:
        if unit in self.gathered:
            self.gathered.remove(unit)
            self._stale.discard(unit)
            self._bytes -= sum(group.gathered_bytes for group in self._units[unit].groups)

    def _transfer(self, unit: int, group: int, redistribution: Redistribution) -> None:
        self._hold(0, unit, redistribution.scratch_bytes)
        for transfer in redistribution.transfers:
            self.issued[unit, group, self._phase, transfer] += 1

    def _hold(self, num_bytes: int, unit: int, scratch_bytes: int = 0) -> None:
        self._bytes += num_bytes
        if self._bytes + scratch_bytes > self.peaks.get(self._phase, Peak()).num_bytes:
            self.peaks[self._phase] = Peak(self._bytes + scratch_bytes, self._units[unit].name)
