"""What a timeline recorded: when gathers, compute and reductions ran on one rank, and when compute waited."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["COMPUTE", "GATHER", "LANES", "RECORDING", "REDUCE", "WAITS", "Span", "TimelineRecord", "UnitTimes"]

GATHER, COMPUTE, REDUCE = "gather", "compute", "reduce"
LANES = (GATHER, COMPUTE, REDUCE)
# What compute does while it waits, by the lane that it waits for.
WAITS = {GATHER: "wait for gather", REDUCE: "wait for reduce"}

# The range that a profiler's trace shows around a recording, and the category of its bars in any trace.
RECORDING = "megatron_fsdp timeline"


@dataclass(frozen=True, slots=True)
class Span:
    """One bar.

    Attributes:
        lane: one of ``LANES``.
        action: the lane's name on the lanes of communication; on compute forward, recompute, backward, optimizer, or
            one of ``WAITS``.
        unit: whose weights, compute or gradients; empty for the optimizer.
        start, stop: seconds since the recording began.
        num_bytes: of the full side of what is communicated; 0 for compute.
    """

    lane: str
    action: str
    unit: str
    start: float
    stop: float
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.stop - self.start

    @property
    def name(self) -> str:
        """Action and unit."""
        return f"{self.action} {self.unit}".rstrip()

    @property
    def is_wait(self) -> bool:
        """Whether compute waited for communication."""
        return self.action in WAITS.values()


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """One unit's share of a recording, in seconds, sums over all of it.

    Attributes:
        num_gathers, gather: how often it was gathered, and how long its gathers were under way. gather_waited: how long
            compute waited for them.
        num_reductions, reduce, reduce_waited: the same of its gradients.
        forward, recompute, backward: its compute, without that of units inside of it and without waits.
    """

    unit: str
    num_gathers: int = 0
    gather: float = 0.0
    gather_waited: float = 0.0
    num_reductions: int = 0
    reduce: float = 0.0
    reduce_waited: float = 0.0
    forward: float = 0.0
    recompute: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True, slots=True)
class TimelineRecord:
    """One rank's recording.

    Attributes:
        units: names of all units, in the order in which modules are registered.
        seconds: how long it lasted. num_steps: optimizer steps whose backward ended in it; 0 for evaluation.
        spans: by start. Those of the compute lane never overlap.
    """

    rank: int
    units: tuple[str, ...]
    seconds: float
    num_steps: int
    spans: tuple[Span, ...]

    def waited(self, lane: str | None = None) -> float:
        """Return the seconds that compute waited for a lane of communication, or for both."""
        wanted = WAITS.values() if lane is None else (WAITS[lane],)
        return sum(span.seconds for span in self.spans if span.action in wanted)

    @property
    def exposed_share(self) -> float:
        """The part of the time that compute waited for communication: 0 where all of it is hidden."""
        return self.waited() / self.seconds if self.seconds else 0.0

    @property
    def communication(self) -> float:
        """The seconds in which at least one gather or reduction was under way."""
        return covered(span for span in self.spans if span.lane != COMPUTE)

    def unit_times(self) -> tuple[UnitTimes, ...]:
        """Return the times of every unit."""
        by_unit: dict[str, list[Span]] = {unit: [] for unit in self.units}
        for span in self.spans:
            if span.unit in by_unit:
                by_unit[span.unit].append(span)
        return tuple(_unit_times(unit, spans) for unit, spans in by_unit.items())

    def __str__(self) -> str:
        """Return one line: how long, and how much of it was waiting."""
        steps = f"{self.num_steps} step{'' if self.num_steps == 1 else 's'} in " if self.num_steps else ""
        return (
            f"rank {self.rank}: {steps}{1e3 * self.seconds:.1f} ms, exposed communication {self.exposed_share:.1%} "
            f"(waited {1e3 * self.waited(GATHER):.1f} ms for gathers, {1e3 * self.waited(REDUCE):.1f} ms for "
            "reductions)"
        )


def _unit_times(unit: str, spans: Sequence[Span]) -> UnitTimes:
    def seconds(action: str) -> float:
        return sum(span.seconds for span in spans if span.action == action)

    gathers = [span for span in spans if span.lane == GATHER]
    reductions = [span for span in spans if span.lane == REDUCE]
    return UnitTimes(
        unit,
        num_gathers=len(gathers),
        gather=covered(gathers),
        gather_waited=seconds(WAITS[GATHER]),
        num_reductions=len(reductions),
        reduce=covered(reductions),
        reduce_waited=seconds(WAITS[REDUCE]),
        forward=seconds("forward"),
        recompute=seconds("recompute"),
        backward=seconds("backward"),
    )


def covered(spans: Iterable[Span]) -> float:
    """Return the seconds in which at least one of the spans was under way."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(span.stop - max(span.start, end), 0.0)
        end = max(end, span.stop)
    return total
