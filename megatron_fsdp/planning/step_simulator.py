"""Forecast: what one optimizer step allocates and sends.

The schedule is played through on paper: the same gathers, prefetches, packed buffers and reductions in the same order,
with byte counts for tensors.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dbuffer.planner.arena import ALIGNMENT, ArenaPlan, Lifetime, Recorder, plan_arena
from megatron_fsdp.planning.model_spec import GroupFacts, ModelFacts, Redistribution, Transfer, Visit, VisitKind

__all__ = ["Forecast", "Issue", "Peak", "Phase", "forecast_step"]


class Phase(str, enum.Enum):
    """The part of an optimizer step: FORWARD (and the refresh of compute weights), BACKWARD, or STEP."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes of a phase beyond what rests, the gradients among them, and the unit whose buffer reached it."""

    num_bytes: int = 0
    unit: str = ""
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Issue:
    """A collective, with how often one optimizer step issues it; ``group`` is the first of those that share it."""

    unit: int
    group: int
    phase: Phase
    transfer: Transfer
    count: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one optimizer step takes; ``kept`` holds the units that wait for their backward with weights gathered,
    though units like them are released; ``slot_bytes`` are those of all slots; ``lifetimes`` those of gathered weights,
    packed gradients, parts kept after forward and scratch, in the order in which they come; ``arenas`` the plans of
    those that have places in one; ``counter_bytes`` and ``scratch_bytes`` what ``reduction="invariant"`` adds up and
    receives in, in all phases.
    """

    peaks: dict[Phase, Peak]
    issues: tuple[Issue, ...]
    kept: frozenset[int] = frozenset()
    slot_bytes: int = 0
    lifetimes: tuple[Lifetime, ...] = ()
    arenas: tuple[ArenaPlan, ...] = ()
    counter_bytes: int = 0
    scratch_bytes: int = 0


def forecast_step(facts: ModelFacts, num_microbatches: int) -> Forecast:
    """Play one optimizer step of ``num_microbatches`` forward and backward passes, with the order of units known
    from before.

    Every unit is called once per forward, in the order of ``facts.visits``; every trainable parameter gets a gradient;
    the optimizer steps the trainable parameters and refreshes compute weights once (``fully_shard_optimizer``).
    """
    playback = _Playback(facts)
    # What stays gathered after a backward is there when the next step begins.
    playback.step(1)
    playback.start_counting()
    playback.step(num_microbatches)
    issues = (
        Issue(unit, group, phase, transfer, count) for (unit, group, phase, transfer), count in playback.issued.items()
    )
    lifetimes = playback.held.lifetimes()
    arenas = tuple(playback.arenas(lifetimes))
    # An arena is there in all phases, and its block begins anywhere.
    stays = sum(arena.num_bytes + ALIGNMENT for arena in arenas)
    counters = sum(group.counter_bytes(num_microbatches) for unit in facts.units for group in unit.groups)
    scratch = playback.scratch_bytes()
    found = {phase: playback.peaks.get(phase, Peak()) for phase in Phase}
    peaks = {
        phase: replace(peak, num_bytes=peak.num_bytes + stays + counters + scratch) for phase, peak in found.items()
    }
    slot_bytes = playback.slot_bytes + stays
    kept = frozenset(playback.kept)
    return Forecast(peaks, tuple(issues), kept, slot_bytes, lifetimes, arenas, counters, scratch)


@dataclass(frozen=True, slots=True)
class _Costs:
    """What one group allocates and sends, worked out once for all units that are alike."""

    gathered: int
    part: int
    packed: int
    reduced: int
    gradient: int
    weight_slot: tuple[int, int] | None
    gradient_slot: tuple[int, int] | None
    cast: int
    gather: Redistribution
    gather_part: Redistribution
    reduce: Redistribution
    finalize: Redistribution
    refresh: Redistribution

    @property
    def allocated_part(self) -> int:
        """Bytes of the part kept after forward, unless that has a place in an arena."""
        return 0 if self.weight_slot is not None and not self.weight_slot[1] else self.part

    @classmethod
    def of(cls, group: GroupFacts) -> _Costs:
        return cls(
            group.gathered_bytes,
            group.part_bytes,
            group.packed_bytes,
            group.reduced_bytes,
            group.gradient_bytes,
            group.weight_slot,
            group.gradient_slot,
            group.cast_bytes,
            group.gather(),
            group.gather_part(),
            group.reduce(),
            group.finalize(),
            group.refresh(),
        )


class _Playback:
    """The state of the schedule: which units are gathered, active in backward, or being reduced."""

    def __init__(self, facts: ModelFacts) -> None:
        self._units = facts.units
        self._visits = facts.visits
        groups = {id(group): group for unit in facts.units for group in unit.groups}
        known = {key: _Costs.of(group) for key, group in groups.items()}
        self._costs = [tuple(known[id(group)] for group in unit.groups) for unit in facts.units]
        self._opened = {visit.unit: at for at, visit in enumerate(facts.visits) if visit.kind is VisitKind.OPEN}
        self._closed = {visit.unit: at for at, visit in enumerate(facts.visits) if visit.kind is VisitKind.CLOSE}
        trained_from = next((at for at, visit in enumerate(facts.visits) if self._is_trained(visit)), len(facts.visits))
        # Outputs of units that close before the first trainable parameter need no gradient, and backward never gets
        # there.
        self._watched = {unit for unit, at in self._closed.items() if at > trained_from}
        self._orders = self._make_orders()
        usable = {unit for unit, groups in enumerate(self._costs) if groups}
        self._ahead_in_forward = _neighbours(self._orders.values(), usable, reach=2)
        usable = {unit for unit in usable if facts.units[unit].unshards_in_backward}
        trails = [
            sorted(self._watched.intersection(order), key=self._closed.__getitem__, reverse=True)
            for order in self._orders.values()
        ]
        self._ahead_in_backward = _neighbours(trails, usable, reach=len(facts.units))
        # Units that are left when backward reaches what they were given: no other one's outputs say so.
        self._given = {
            unit
            for order, trail in zip(self._orders.values(), trails, strict=True)
            for unit in order
            if trained_from < self._opened[unit] and (not trail or self._opened[unit] < self._closed[trail[-1]])
        }
        self.gathered: set[int] = set()
        # Units of which a part is kept for backward, in place of the whole weights.
        self._parts: set[int] = set()
        self.kept: set[int] = set()
        self.peaks: dict[Phase, Peak] = {}
        self.issued: Counter[tuple[int, int, Phase, Transfer]] = Counter()
        self._stale: set[int] = set()
        # By schedule: the unit that forward left last.
        self._lingering: dict[int, int] = {}
        self._phase = Phase.FORWARD
        self._bytes = 0
        # Groups that have gradients, and their bytes.
        self._graded: set[tuple[int, int]] = set()
        self._gradient_bytes = 0
        self._packed: set[tuple[int, int]] = set()
        self._reducing: list[int] = []
        # By root: the unit closed last whose last reduction the next one issues, for which the host waits on CPU.
        self._awaited: dict[int, int] = {}
        self._is_last = False
        self._reduced: set[int] = set()
        self._active: list[int] = []
        self._has_arrived: set[int] = set()
        self._free: Counter[tuple[int, int]] = Counter()
        self.slot_bytes = 0
        self.held = Recorder()
        self._arena_of = self._name_arenas()

    def _make_orders(self) -> dict[int, list[int]]:
        """Return, by schedule, its units in the order in which forward opens them."""
        orders: dict[int, list[int]] = {}
        for unit in sorted(self._opened, key=self._opened.__getitem__):
            orders.setdefault(self._units[unit].schedule, []).append(unit)
        return orders

    def _name_arenas(self) -> dict[Hashable, int]:
        """Return, by the name of each buffer that has a place in an arena, which one that is."""
        return {
            (unit, group, kind): slot[0]
            for unit, costs in enumerate(self._costs)
            for group, cost in enumerate(costs)
            for kind, slot in (
                ("gathered", cost.weight_slot),
                ("part", cost.weight_slot),
                ("packed", cost.gradient_slot),
            )
            if slot is not None and not slot[1]
        }

    def start_counting(self) -> None:
        """Forget what was counted; what is gathered stays, but the optimizer has changed the weights since."""
        self.peaks.clear()
        self.issued.clear()
        self._stale = set(self.gathered)
        self.held = Recorder(self.held.held())

    def step(self, num_microbatches: int) -> None:
        self._zero_grad()
        self._enter(Phase.FORWARD)
        self._refresh()
        played = 0
        while played < num_microbatches:
            before, counts = self._held(), self.issued.copy()
            is_last = played == num_microbatches - 1
            self._enter(Phase.FORWARD)
            self._forward()
            self._enter(Phase.BACKWARD)
            self._backward(is_last=is_last)
            played += 1
            if not is_last and self._held() == before:
                # All that follow but the last find what this one found, so they do what it did.
                repeats = num_microbatches - 1 - played
                self.issued.update({key: repeats * (self.issued[key] - counts[key]) for key in tuple(self.issued)})
                played += repeats
        self._enter(Phase.STEP)
        self._cast_gradients()

    def _refresh(self) -> None:
        """Bring weights at rest up to date, each unit's ahead of its use; magnitudes of all units as one."""
        exchanges: dict[tuple[int, str, int], list[tuple[int, int, Transfer]]] = {}
        for unit, costs in enumerate(self._costs):
            gathers = []
            for group, cost in enumerate(costs):
                found = next((each for each in cost.refresh.transfers if each.kind == "all_reduce"), None)
                gathers.append(cost.refresh if found is None else Redistribution())
                if found is not None:
                    key = (self._units[unit].schedule, found.axis, found.num_ranks)
                    exchanges.setdefault(key, []).append((unit, group, found))
            self._together(unit, gathers)
        for alike in exchanges.values():
            unit, group, first = alike[0]
            total = replace(first, num_bytes=sum(transfer.num_bytes for _, _, transfer in alike))
            self.issued[unit, group, self._phase, total] += 1

    def _zero_grad(self) -> None:
        self._graded.clear()
        self._bytes -= self._gradient_bytes
        self._gradient_bytes = 0

    def _grade(self, unit: int, group: int) -> None:
        num_bytes = self._costs[unit][group].gradient
        if num_bytes and (unit, group) not in self._graded:
            self._graded.add((unit, group))
            self._gradient_bytes += num_bytes
            self._hold(num_bytes, unit)

    def arenas(self, lifetimes: Iterable[Lifetime]) -> Iterator[ArenaPlan]:
        """Yield the plan of each arena, of what lies in it among the lifetimes."""
        members: dict[int, list[Lifetime]] = {}
        for lifetime in lifetimes:
            slot = self._arena_of.get(lifetime.name)
            if slot is not None:
                members.setdefault(slot, []).append(lifetime)
        yield from map(plan_arena, members.values())

    def _held(self) -> tuple[object, ...]:
        gathered, stale, parts = frozenset(self.gathered), frozenset(self._stale), frozenset(self._parts)
        return gathered, stale, parts, tuple(self._lingering.items()), self._bytes, tuple(self._free.items())

    def _cast_gradients(self) -> None:
        for unit, costs in enumerate(self._costs):
            self._hold(sum(cost.cast for cost in costs), unit)
        self._bytes -= sum(cost.cast for costs in self._costs for cost in costs)

    def _is_trained(self, visit: Visit) -> bool:
        return visit.kind is VisitKind.USE and self._units[visit.unit].groups[visit.group].requires_grad

    # ------------------------------------------------------------------ forward

    def _forward(self) -> None:
        is_open: set[int] = set()
        for visit in self._visits:
            facts = self._units[visit.unit]
            order = self._orders[facts.schedule]
            if visit.kind is VisitKind.OPEN:
                is_open.add(visit.unit)
                self._release_lingering(visit.unit, is_open)
                if visit.unit in self._stale:
                    self._release(visit.unit)
                self._gather(visit.unit)
                self._drop_part(visit.unit)
                self._prefetch_forward(visit.unit)
            elif visit.kind is VisitKind.CLOSE:
                is_open.discard(visit.unit)
                if facts.lingers:
                    self._release_lingering(visit.unit, is_open)
                    self._lingering[facts.schedule] = visit.unit
                elif facts.reshards_after_forward:
                    self._release(visit.unit, keep_part=True)
                if visit.unit == order[0]:
                    self._release_unused(order)

    def _release_lingering(self, unit: int, is_open: set[int]) -> None:
        """Release the unit that forward left last, unless it is the one that runs next or around it."""
        last = self._lingering.pop(self._units[unit].schedule, unit)
        if last != unit and last not in is_open:
            self._release(last)

    def _release_unused(self, order: list[int]) -> None:
        # Explicit prefetching can gather a unit that forward has already left.
        last = self._lingering.get(self._units[order[0]].schedule, -1)
        kept = {last} & self._watched & self.gathered
        self.kept |= {unit for unit in kept if any(cost.gathered for cost in self._costs[unit])}
        for unit in order:
            if self._units[unit].reshards_after_forward and unit not in kept:
                self._release(unit, keep_part=True)

    def _prefetch_forward(self, unit: int) -> None:
        for other in self._units[unit].forward_prefetch or self._ahead_in_forward[unit]:
            self._gather(other)

    # ------------------------------------------------------------------ backward

    def _backward(self, *, is_last: bool) -> None:
        self._is_last = is_last
        for visit in reversed(self._visits):
            if visit.kind is VisitKind.CLOSE and visit.unit in self._watched:
                self._leave_passed(visit.unit, self._closed[visit.unit])
                self._enter_backward(visit.unit)
            elif visit.kind is VisitKind.OPEN and visit.unit in self._given:
                self._leave_passed(visit.unit, self._opened[visit.unit] - 1)
            elif self._is_trained(visit):
                self._receive(visit.unit, visit.group)
        self._close_open()
        for schedule in {facts.schedule for facts in self._units}:
            self._drain(schedule, 0)
        self._awaited.clear()
        for unit, costs in enumerate(self._costs):
            if is_last:
                self._together(unit, [cost.finalize for cost in costs])
            if self._units[unit].reshards_after_backward:
                self._release(unit)
        self._has_arrived.clear()
        self._reduced.clear()
        # What backward used is for backward to release: it may keep it.
        self._lingering.clear()

    def _close_open(self) -> None:
        for unit in sorted(self._active, key=self._opened.__getitem__, reverse=True):
            self._leave(unit)

    def _enter_backward(self, unit: int) -> None:
        self._active.append(unit)
        if self._units[unit].unshards_in_backward:
            self._gather(unit)
            self._drop_part(unit)
        self._prefetch_backward(unit)

    def _leave_passed(self, unit: int, end: int) -> None:
        for other in sorted(self._active, key=self._opened.__getitem__, reverse=True):
            is_same_root = self._units[other].schedule == self._units[unit].schedule
            if is_same_root and self._opened[other] > end:
                self._leave(other)

    def _prefetch_backward(self, unit: int) -> None:
        for other in self._units[unit].backward_prefetch or self._ahead_in_backward[unit]:
            self._gather(other)

    def _receive(self, unit: int, group: int) -> None:
        facts, costs = self._units[unit], self._costs[unit]
        if costs[group].packed and (unit, group) not in self._packed:
            self._drain(facts.schedule, facts.max_packed_buffers - 1)
            self._packed.add((unit, group))
            self.held.begin((unit, group, "packed"), costs[group].packed)
            self._take(costs[group].packed, costs[group].gradient_slot, unit)
        elif not costs[group].packed:
            self._grade(unit, group)
        self._has_arrived.add(unit)

    def _reduce(self, unit: int) -> None:
        facts = self._units[unit]
        awaited = self._awaited.pop(facts.schedule, None)
        if awaited in self._reducing:
            self._fold(awaited)
        if (
            self._is_last
            and facts.max_packed_buffers == 1
            and any(cost.finalize.transfers for cost in self._costs[unit])
        ):
            self._awaited[facts.schedule] = unit
        if any(group.scratch_bytes for group in self._units[unit].groups):
            # They take turns in one scratch.
            self._drain(self._units[unit].schedule, 0)
        for position, cost in enumerate(self._costs[unit]):
            if cost.packed:
                self._grade(unit, position)
                self._hold(cost.reduced, unit)
        self._together(unit, [cost.reduce for cost in self._costs[unit]])
        self._reducing.append(unit)
        self._reduced.add(unit)

    def scratch_bytes(self) -> int:
        """Return what units receive in under ``reduction="invariant"``: for each root as much as its neediest one."""
        needs: dict[int, int] = {}
        for unit in self._units:
            need = sum(group.scratch_bytes for group in unit.groups)
            needs[unit.schedule] = max(needs.get(unit.schedule, 0), need)
        return sum(needs.values())

    def _leave(self, unit: int) -> None:
        self._active.remove(unit)
        if self._units[unit].reshards_after_backward:
            self._release(unit)
        if unit in self._has_arrived and unit not in self._reduced:
            self._reduce(unit)

    def _drain(self, schedule: int, num_kept: int) -> None:
        """Release the packed buffers of a root's units, but those of the ``num_kept`` reductions issued last."""
        reducing = [unit for unit in self._reducing if self._units[unit].schedule == schedule]
        for unit in reducing[: max(len(reducing) - num_kept, 0)]:
            self._fold(unit)

    def _fold(self, unit: int) -> None:
        self._reducing.remove(unit)
        for group, cost in enumerate(self._costs[unit]):
            if (unit, group) in self._packed:
                self._packed.remove((unit, group))
                self.held.end((unit, group, "packed"))
                self._give_back(cost.packed, cost.gradient_slot)
                self._bytes -= cost.reduced

    # ------------------------------------------------------------------ bytes

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        if self._bytes > self.peaks.get(phase, Peak()).num_bytes:
            self.peaks[phase] = Peak(self._bytes, "", self._gradient_bytes)

    def _gather(self, unit: int) -> None:
        if unit in self.gathered:
            return
        self.gathered.add(unit)
        self._stale.discard(unit)
        costs, is_kept = self._costs[unit], unit in self._parts
        for position, cost in enumerate(costs):
            self.held.begin((unit, position, "gathered"), cost.gathered)
            self._take(cost.gathered, cost.weight_slot, unit)
        self._together(unit, [cost.gather_part if is_kept and cost.part else cost.gather for cost in costs])

    def _release(self, unit: int, *, keep_part: bool = False) -> None:
        if unit not in self.gathered:
            return
        if keep_part and unit not in self._parts:
            self._parts.add(unit)
            for position, cost in enumerate(self._costs[unit]):
                self.held.begin((unit, position, "part"), cost.part)
                self._hold(cost.allocated_part, unit)
        self.gathered.remove(unit)
        self._stale.discard(unit)
        for position, cost in enumerate(self._costs[unit]):
            self.held.end((unit, position, "gathered"))
            self._give_back(cost.gathered, cost.weight_slot)

    def _drop_part(self, unit: int) -> None:
        if unit in self._parts:
            self._parts.remove(unit)
            for position in range(len(self._costs[unit])):
                self.held.end((unit, position, "part"))
            self._bytes -= sum(cost.allocated_part for cost in self._costs[unit])

    def _one_by_one(self, unit: int, redistributions: Sequence[Redistribution]) -> None:
        for group, redistribution in enumerate(redistributions):
            self._hold(0, unit, redistribution.scratch_bytes)
            self.held.begin("scratch", redistribution.scratch_bytes)
            self.held.end("scratch")
            for transfer in redistribution.transfers:
                self.issued[unit, group, self._phase, transfer] += 1

    def _together(self, unit: int, redistributions: Sequence[Redistribution]) -> None:
        """Issue those that are single collectives of one kind and axis as one."""
        parts: dict[tuple[str, str, int], list[tuple[int, Transfer]]] = {}
        for group, redistribution in enumerate(redistributions):
            if _goes_together(redistribution):
                transfer = redistribution.transfers[0]
                parts.setdefault((transfer.kind, transfer.axis, transfer.num_ranks), []).append((group, transfer))
        alone = [Redistribution() if _goes_together(each) else each for each in redistributions]
        self._one_by_one(unit, alone)
        for found in parts.values():
            total = replace(found[0][1], num_bytes=sum(transfer.num_bytes for _, transfer in found))
            self.issued[unit, found[0][0], self._phase, total] += 1

    def _take(self, num_bytes: int, slot: tuple[int, int] | None, unit: int) -> None:
        """Hold bytes of the allocator, or a slot: a free one, or a new one that is there for good."""
        if slot is None:
            self._hold(num_bytes, unit)
        elif num_bytes and not slot[1]:
            self._hold(0, unit)
        elif num_bytes and self._free[slot]:
            self._free[slot] -= 1
        elif num_bytes:
            self._hold(slot[1], unit)
            self.slot_bytes += slot[1]

    def _give_back(self, num_bytes: int, slot: tuple[int, int] | None) -> None:
        if slot is None:
            self._bytes -= num_bytes
        elif num_bytes and slot[1]:
            self._free[slot] += 1

    def _hold(self, num_bytes: int, unit: int, scratch_bytes: int = 0) -> None:
        self._bytes += num_bytes
        if self._bytes + scratch_bytes > self.peaks.get(self._phase, Peak()).num_bytes:
            name = self._units[unit].name
            self.peaks[self._phase] = Peak(self._bytes + scratch_bytes, name, self._gradient_bytes)


def _goes_together(redistribution: Redistribution) -> bool:
    return len(redistribution.transfers) == 1 and redistribution.transfers[0].kind != "all_to_all"


def _neighbours(orders: Iterable[Sequence[int]], usable: Collection[int], reach: int) -> dict[int, tuple[int, ...]]:
    """Return for each unit the first usable one of the ``reach`` units after it, as a tuple of none or one."""
    found: dict[int, tuple[int, ...]] = {}
    for order in orders:
        ahead: tuple[int, ...] = ()
        distance = 0
        for unit in reversed(order):
            distance += 1
            found[unit] = ahead if distance <= reach else ()
            if unit in usable:
                ahead, distance = (unit,), 0
    return found
