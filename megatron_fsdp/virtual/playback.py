"""Playback: when everything of a recording would happen on a machine, and what waits for what.

A discrete-event simulation. The host issues items in order and each takes it a moment; a stream does its items one
after another, none before it was issued; collectives share their link in equal parts, as communicators do.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_fsdp.virtual.machine import Speeds
from megatron_fsdp.virtual.recording import Event, Item, Stream, Work

__all__ = ["Playback", "Run", "Stall", "play"]


@dataclass(frozen=True, slots=True)
class Run:
    """One piece of work in time: ``start`` and ``end`` in seconds."""

    stream: str
    work: Work
    unit: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Stall:
    """A wait of a stream for work of another one: ``cause`` is what that was for."""

    stream: str
    unit: str
    cause: str
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Playback:
    """What a recording takes on a machine.

    Attributes:
        seconds: from the first call of the host until all streams are through.
        runs, stalls: in the order of their end. host_seconds: of the host's calls, its waits left out.
    """

    machine: Speeds
    seconds: float
    host_seconds: float
    runs: tuple[Run, ...] = field(repr=False)
    stalls: tuple[Stall, ...] = field(repr=False)

    def busy(self, stream: str = "compute") -> float:
        """Return the seconds in which a stream works; collectives on it are no work."""
        return sum(run.end - run.start for run in self.runs if run.stream == stream and not run.work.ranks)

    def communication(self) -> float:
        """Return the seconds that collectives take on the link that is longest at it, each with the link to itself."""
        seconds = {"": 0.0}
        for run in self.runs:
            if run.work.ranks:
                link = self.machine.link(run.work)
                seconds[link] = seconds.get(link, 0.0) + self.machine.seconds(run.work)
        return max(seconds.values())

    def waiting(self) -> float:
        """Return the seconds in which compute does nothing but communicate, at the ends too."""
        return self.seconds - self.busy()

    def bound(self) -> float:
        """Return what the step takes at least: the longer of compute and communication, and the two ends of the latter.

        Compute cannot begin before the first gather, and the last reduction cannot begin before compute has ended.
        """
        seconds = [self.machine.seconds(run.work) for run in self.runs if run.work.ranks]
        return max(self.busy() + (seconds[0] + seconds[-1] if seconds else 0.0), self.communication())

    def exposed(self) -> dict[tuple[str, str], float]:
        """Return how long compute waits, by the unit that it waits in and by what for, the longest first."""
        found: dict[tuple[str, str], float] = {}
        for stall in self.stalls:
            if stall.stream == "compute":
                key = (stall.unit, stall.cause)
                found[key] = found.get(key, 0.0) + stall.seconds
        for run in self.runs:
            if run.stream == "compute" and run.work.ranks:
                key = (run.unit, f"{run.work.name} on compute")
                found[key] = found.get(key, 0.0) + run.end - run.start
        return dict(sorted(found.items(), key=lambda each: -each[1]))


class _Queue:
    """A stream's items that are still to come, and how far it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.items: deque[tuple[Item, float]] = deque()
        self.time = 0.0
        self.is_busy = False
        self.last = ""


@dataclass(slots=True)
class _Link:
    """Collectives under way, by what is left of each in seconds alone."""

    left: dict[int, float] = field(default_factory=dict)
    time: float = 0.0
    version: int = 0

    def advance(self, now: float) -> None:
        if self.left:
            share = (now - self.time) / len(self.left)
            for key in self.left:
                self.left[key] -= share
        self.time = now
        self.version += 1


class _Player:
    def __init__(self, items: Sequence[Item], machine: Speeds) -> None:
        self._items, self._machine = items, machine
        self._host, self._position, self._host_seconds = 0.0, 0, 0.0
        self._queues: dict[Stream, _Queue] = {}
        self._times: dict[tuple[Event, int], tuple[float, str]] = {}
        self._records: dict[Event, int] = {}
        self._targets: dict[int, tuple[Event, int] | None] = {}
        self._links: dict[str, _Link] = {}
        self._moments: list[tuple[float, int, str, int]] = []
        self._under_way: dict[int, tuple[_Queue, Item, float]] = {}
        self._count = 0
        self._seconds: dict[Work, float] = {}
        self.runs: list[Run] = []
        self.stalls: list[Stall] = []

    def play(self) -> Playback:
        is_moving = True
        while is_moving or self._moments:
            is_moving = self._issue()
            for queue in self._queues.values():
                is_moving = self._drain(queue) or is_moving
            if not is_moving and self._moments:
                self._next_moment()
                is_moving = True
        seconds = max([self._host, *(queue.time for queue in self._queues.values())])
        return Playback(self._machine, seconds, self._host_seconds, tuple(self.runs), tuple(self.stalls))

    def _issue(self) -> bool:
        """Let the host go on as far as it can."""
        before = self._position
        while self._position < len(self._items):
            item = self._items[self._position]
            if item.stream is None and item.event is not None:
                found = self._times.get((item.event, self._records.get(item.event, 0)))
                if found is None:
                    break
                if found[0] > self._host:
                    self.stalls.append(Stall("host", item.unit, found[1], self._host, found[0] - self._host))
                    self._host = found[0]
            spent = self._host_cost(item)
            self._host += spent
            self._host_seconds += spent
            if item.stream is not None:
                self._put(item)
            self._position += 1
        return self._position > before

    def _host_cost(self, item: Item) -> float:
        machine = self._machine
        if item.event is not None:
            return machine.stream_call
        if item.stream is None and item.work is not None:
            return machine.seconds(item.work)
        return item.calls * machine.call

    def _put(self, item: Item) -> None:
        assert item.stream is not None
        queue = self._queues.get(item.stream)
        if queue is None:
            queue = self._queues[item.stream] = _Queue(item.stream.name)
        if item.event is not None:
            if item.is_record:
                self._records[item.event] = self._records.get(item.event, 0) + 1
            number = self._records.get(item.event)
            # An event that was recorded before the recording began is over.
            self._targets[id(item)] = None if number is None else (item.event, number)
        queue.items.append((item, self._host))

    def _drain(self, queue: _Queue) -> bool:
        """Let a stream go on as far as it can."""
        moved = False
        while queue.items and not queue.is_busy:
            item, issued = queue.items[0]
            if item.work is None:
                if not self._pass_event(queue, item, issued):
                    break
            else:
                start = max(queue.time, issued + self._machine.launch)
                if item.work.ranks:
                    queue.is_busy = True
                    self._count += 1
                    self._under_way[self._count] = (queue, item, start)
                    heapq.heappush(self._moments, (start, self._count, "start", 0))
                else:
                    queue.time = start + self._seconds_of(item.work)
                    self._finish(queue, item, start)
            queue.items.popleft()
            moved = True
        return moved

    def _pass_event(self, queue: _Queue, item: Item, issued: float) -> bool:
        target = self._targets[id(item)]
        if target is None:
            return True
        if item.is_record:
            self._times[target] = (max(queue.time, issued), queue.last)
            return True
        found = self._times.get(target)
        if found is None:
            return False
        ready = max(queue.time, issued)
        if found[0] > ready:
            self.stalls.append(Stall(queue.name, item.unit, found[1], ready, found[0] - ready))
            queue.time = found[0]
        return True

    def _finish(self, queue: _Queue, item: Item, start: float) -> None:
        assert item.work is not None
        queue.last = item.work.label or item.work.name
        self.runs.append(Run(queue.name, item.work, item.unit, start, queue.time))

    def _seconds_of(self, work: Work) -> float:
        found = self._seconds.get(work)
        if found is None:
            found = self._seconds[work] = self._machine.seconds(work)
        return found

    def _next_moment(self) -> None:
        """Go to when the next collective begins or ends."""
        now, key, what, version = heapq.heappop(self._moments)
        queue, item, start = self._under_way.get(key, (None, None, 0.0))
        if queue is None or item is None or item.work is None:
            return
        link = self._links.setdefault(self._machine.link(item.work), _Link())
        if what == "end" and version != link.version:
            return
        link.advance(now)
        if what == "start":
            link.left[key] = self._seconds_of(item.work)
        else:
            del link.left[key], self._under_way[key]
            queue.time, queue.is_busy = now, False
            self._finish(queue, item, start)
        if link.left:
            first = min(link.left, key=link.left.__getitem__)
            heapq.heappush(self._moments, (now + link.left[first] * len(link.left), first, "end", link.version))


def play(items: Sequence[Item], machine: Speeds) -> Playback:
    """Play a recording's items on a machine."""
    return _Player(items, machine).play()
