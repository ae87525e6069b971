"""Forecast: what one optimizer step takes at most, and sends, as the engine's own step says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dbuffer.planner.arena import ArenaPlan, Lifetime, Recorder
from megatron_fsdp.planning.model_spec import ModelFacts, Transfer
from megatron_fsdp.planning.played_step import PlayedStep
from megatron_fsdp.planning.step_events import Event, Phase, Segments

__all__ = ["Forecast", "Issue", "Peak", "forecast_of"]


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
    lane: str
    transfer: Transfer
    count: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one optimizer step takes.

    Attributes:
        kept: the units that wait for their backward with weights gathered, though units like them are released.
        lifetimes: of gathered weights, packed gradients, parts kept after forward and scratch, in the order in which
            they come.
        counter_bytes, scratch_bytes: what ``reduction="invariant"`` adds up and receives in, in all phases.
        slot_bytes: likewise, of slots. arenas: those among these that have a plan.
    """

    peaks: dict[Phase, Peak]
    issues: tuple[Issue, ...]
    kept: frozenset[int] = frozenset()
    lifetimes: tuple[Lifetime, ...] = field(default=(), repr=False)
    counter_bytes: int = 0
    scratch_bytes: int = 0
    slot_bytes: int = 0
    arenas: tuple[ArenaPlan, ...] = ()


def forecast_of(facts: ModelFacts, played: PlayedStep, num_microbatches: int) -> Forecast:
    """Return what a step of so many microbatches takes, which ``played`` knows of."""
    number = num_microbatches if num_microbatches in played.segments else 3
    segments = played.segments[number]
    held = _Held(facts)
    peaks = {phase: Peak() for phase in Phase}
    kept: set[int] = set()
    for position, (phase, events) in enumerate(segments):
        held.play(phase, events, peaks)
        if phase is Phase.FORWARD and segments[position + 1][0] is Phase.BACKWARD:
            kept |= held.kept()
    return Forecast(
        peaks,
        tuple(_issues(segments, number, num_microbatches)),
        frozenset(kept),
        held.lifetimes.lifetimes(),
        held.bytes["sums"],
        held.bytes["received"],
        played.slot_bytes,
        played.arenas,
    )


_LIVES = frozenset(("gathered weights", "packed gradients", "post-forward shard", "scratch"))


class _Held:
    """What is held at one point of a step."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self.bytes: Counter[str] = Counter()
        self.lifetimes = Recorder()
        self._gathered: set[int] = set()

    def play(self, phase: Phase | None, events: Sequence[Event], peaks: dict[Phase, Peak]) -> None:
        """Take and give what a segment does, and note the highest point."""
        if phase is not None:
            self._note(phase, "", peaks)
        for event in events:
            if event.transfer is None:
                self._take(event)
                if phase is not None and event.num_bytes > 0:
                    self._note(phase, self._facts.units[event.unit].name if event.unit >= 0 else "", peaks)

    def _take(self, event: Event) -> None:
        self.bytes[event.what] += event.num_bytes
        if event.what in _LIVES:
            name = event[:3]
            if event.num_bytes > 0:
                self.lifetimes.begin(name, event.num_bytes)
            else:
                self.lifetimes.end(name)
        if event.what == "gathered weights":
            (self._gathered.add if event.num_bytes > 0 else self._gathered.discard)(event.unit)

    def _note(self, phase: Phase, unit: str, peaks: dict[Phase, Peak]) -> None:
        if (total := self.bytes.total()) > peaks[phase].num_bytes:
            peaks[phase] = Peak(total, unit, self.bytes["main_grad"])

    def kept(self) -> set[int]:
        """Return the units that hold their weights though they were not told to."""
        units = self._facts.units
        return {
            unit for unit in self._gathered if units[unit].reshard_after_forward is None and not units[unit].is_root
        }


def _issues(segments: Segments, played: int, wanted: int) -> Iterator[Issue]:
    """Yield what is sent; microbatches that were not played do what the one before the last did."""
    counts: Counter[tuple[int, int, Phase, str, Transfer]] = Counter()
    number = 0
    for phase, events in segments:
        number += phase is Phase.FORWARD
        times = 1 + (wanted - played) * (number == played - 1 and phase is not Phase.STEP)
        for event in events:
            if event.transfer is not None and phase is not None:
                counts[event.unit, event.group, phase, event.what, event.transfer] += times
    return (Issue(*key, count) for key, count in counts.items())
