"""Playback: the times of a recording's work and waits on a machine.

A discrete-event simulation. The host issues items in order, and each issue takes some time. A stream runs its items one
after another, none before its issue. Work that runs at the same time shares a link or the device: collectives share a
link in equal parts, as communicators do, and kernels share the part of the device that collectives leave. Only kernels
of the highest stream priority run, because a device schedules blocks by priority. Sharing is the conservative
assumption: a copy that runs during a product delays the product by the copy's whole time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_fsdp.virtual.recording import Item, Stream, Work

__all__ = ["DEVICE", "SHARING", "Playback", "Run", "Speeds", "Stall", "play"]

DEVICE = "device"
"""What ``Speeds.link`` returns for kernels that share the device."""

SHARING = "what shares the device with it"
"""The cause in ``Playback.exposed`` for kernels that took longer than alone."""

# Smaller differences, in seconds, are rounding errors.
_NOTHING = 1e-12


class Speeds(Protocol):
    """The speeds of a machine that ``play`` needs."""

    @property
    def call(self) -> float:
        """Seconds of the host for an operator."""

    @property
    def stream_call(self) -> float:
        """Seconds of the host for a call of streams and events."""

    @property
    def launch(self) -> float:
        """Seconds from the host's call to the kernel's start."""

    def seconds(self, work: Work) -> float:
        """Return the seconds that work takes if it has the device, or its link, alone."""

    def link(self, work: Work) -> str:
        """Return the name of the resource that work shares: a collective's link, or a kernel's device.

        An empty name is for work that shares nothing.
        """

    def occupied(self, work: Work) -> float:
        """Return the part of the device, 0 to 1, that a collective takes from kernels while it runs."""


@dataclass(frozen=True, slots=True)
class Run:
    """A piece of work with its ``start`` and ``end`` in seconds."""

    stream: str
    work: Work
    unit: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Stall:
    """A wait of a stream for another stream's work; ``cause`` is the purpose of that work."""

    stream: str
    unit: str
    cause: str
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Playback:
    """The times of a recording on a machine.

    Attributes:
        seconds: from the first call of the host until all streams are through.
        runs, stalls: in the order of their end.
    """

    machine: Speeds
    seconds: float
    runs: tuple[Run, ...] = field(repr=False)
    stalls: tuple[Stall, ...] = field(repr=False)

    def busy(self, stream: str = "compute") -> float:
        """Return the seconds of a stream's kernels, each as if it ran alone, without collectives."""
        return sum(self.machine.seconds(run.work) for run in self.runs if run.stream == stream and not run.work.ranks)

    def slowed(self, stream: str = "compute") -> float:
        """Return how many seconds longer a stream's kernels took than alone, because they shared the device."""
        kernels = [run for run in self.runs if run.stream == stream and not run.work.ranks]
        return sum(run.end - run.start - self.machine.seconds(run.work) for run in kernels)

    def waiting(self) -> float:
        """Return the seconds that compute loses to communication, at the ends too, by waiting or sharing the device."""
        return self.seconds - self.busy()

    def exposed(self) -> dict[tuple[str, str], float]:
        """Return the seconds that compute waits, by compute's unit and the cause of the wait, longest first."""
        found: dict[tuple[str, str], float] = {}
        for stall in self.stalls:
            if stall.stream == "compute":
                key = (stall.unit, stall.cause)
                found[key] = found.get(key, 0.0) + stall.seconds
        for run in self.runs:
            if run.stream == "compute" and run.work.ranks:
                key = (run.unit, f"{run.work.name} on compute")
                found[key] = found.get(key, 0.0) + run.end - run.start
            elif run.stream == "compute" and (lost := run.end - run.start - self.machine.seconds(run.work)) > _NOTHING:
                key = (run.unit, SHARING)
                found[key] = found.get(key, 0.0) + lost
        return dict(sorted(found.items(), key=lambda each: -each[1]))


@dataclass(slots=True)
class _Queue:
    """A stream's remaining items with the times of their issue, and the time that the stream has reached."""

    name: str
    items: deque[tuple[Item, float]] = field(default_factory=deque)
    time: float = 0.0
    is_busy: bool = False
    last: str = ""


@dataclass(slots=True)
class _Shared:
    """Current work that shares a link or the device, with the remaining seconds of each piece when it runs alone.

    Attributes:
        priority: of each work's stream; less comes first. version: increases with each change.
        free: the available part of the link or device, 0 to 1.
    """

    left: dict[int, float] = field(default_factory=dict)
    priority: dict[int, int] = field(default_factory=dict)
    time: float = 0.0
    version: int = 0
    free: float = 1.0

    def running(self) -> list[int]:
        """Return the work that runs now: that of the highest priority. Other work stands still."""
        first = min(self.priority.values(), default=0)
        return [key for key, priority in self.priority.items() if priority == first]

    def advance(self, now: float) -> None:
        """Advance the running work to a time, in equal parts."""
        running = self.running()
        for key in running:
            self.left[key] -= (now - self.time) * self.free / len(running)
        self.time = now
        self.version += 1

    def add(self, key: int, seconds: float, priority: int) -> None:
        self.left[key], self.priority[key] = seconds, priority

    def remove(self, key: int) -> None:
        del self.left[key], self.priority[key]

    def next_end(self) -> tuple[float, int] | None:
        """Return the time and key of the next work to end if nothing changes before; None without work."""
        running = self.running()
        if not running:
            return None
        first = min(running, key=self.left.__getitem__)
        return self.time + max(self.left[first], 0.0) * len(running) / self.free, first


class _Player:
    def __init__(self, items: Sequence[Item], machine: Speeds) -> None:
        self._items, self._machine = items, machine
        self._host, self._position = 0.0, 0
        self._queues: dict[Stream, _Queue] = {}
        # The time of each point, and the work that ended there; points before the recording have passed.
        self._to_come = {item.point for item in items if item.is_record}
        self._passed: dict[object, tuple[float, str]] = {}
        self._shared: dict[str, _Shared] = {}
        # The part of the device that each running collective takes.
        self._occupied: dict[int, float] = {}
        self._moments: list[tuple[float, int, str, int]] = []
        self._under_way: dict[int, tuple[_Queue, Item, Work, float]] = {}
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
        return Playback(self._machine, seconds, tuple(self.runs), tuple(self.stalls))

    def _issue(self) -> bool:
        """Advance the host as far as possible."""
        before = self._position
        while self._position < len(self._items):
            item = self._items[self._position]
            if item.stream is None and item.point is not None:
                passed = self._when("host", item, self._host)
                if passed is None:
                    break
                self._host = passed
            self._host += self._host_cost(item)
            if item.stream is not None:
                queue = self._queues.setdefault(item.stream, _Queue(item.stream.name))
                queue.items.append((item, self._host))
            self._position += 1
        return self._position > before

    def _host_cost(self, item: Item) -> float:
        if item.point is not None:
            return self._machine.stream_call
        if item.stream is None and item.work is not None:
            return self._machine.seconds(item.work)
        return item.calls * self._machine.call

    def _when(self, waiter: str, item: Item, now: float) -> float | None:
        """Return the time of a point, at the earliest now, and record the wait; None if the time is not known yet."""
        passed, cause = self._passed.get(item.point, (now, ""))
        if item.point in self._to_come and item.point not in self._passed:
            return None
        if passed > now:
            self.stalls.append(Stall(waiter, item.unit, cause, now, passed - now))
        return max(passed, now)

    def _drain(self, queue: _Queue) -> bool:
        """Advance a stream as far as possible."""
        moved = False
        while queue.items and not queue.is_busy:
            item, issued = queue.items[0]
            if item.work is not None:
                self._begin(queue, item, item.work, max(queue.time, issued + self._machine.launch))
            elif item.is_record:
                self._passed[item.point] = max(queue.time, issued), queue.last
            else:
                passed = self._when(queue.name, item, max(queue.time, issued))
                if passed is None:
                    break
                # A wait for finished work takes no time on the stream.
                queue.time = passed if passed > max(queue.time, issued) else queue.time
            queue.items.popleft()
            moved = True
        return moved

    def _begin(self, queue: _Queue, item: Item, work: Work, start: float) -> None:
        if not self._machine.link(work):
            queue.time = start + self._seconds_of(work)
            self._finish(queue, item, work, start)
            return
        queue.is_busy = True
        self._count += 1
        self._under_way[self._count] = (queue, item, work, start)
        heapq.heappush(self._moments, (start, self._count, "start", 0))

    def _finish(self, queue: _Queue, item: Item, work: Work, start: float) -> None:
        queue.last = work.label or work.name
        self.runs.append(Run(queue.name, work, item.unit, start, queue.time))

    def _seconds_of(self, work: Work) -> float:
        found = self._seconds.get(work)
        if found is None:
            found = self._seconds[work] = self._machine.seconds(work)
        return found

    def _next_moment(self) -> None:
        """Advance to the next start or end of work that shares a resource."""
        now, key, what, version = heapq.heappop(self._moments)
        if key not in self._under_way:
            return
        queue, item, work, start = self._under_way[key]
        shared = self._shared.setdefault(self._machine.link(work), _Shared())
        if what == "end" and version != shared.version:
            return
        shared.advance(now)
        if what == "start":
            shared.add(key, self._seconds_of(work), item.stream.priority if item.stream and not work.ranks else 0)
        else:
            shared.remove(key)
            del self._under_way[key]
            queue.time, queue.is_busy = now, False
            self._finish(queue, item, work, start)
        self._foresee(shared)
        if work.ranks:
            self._occupy(key, self._machine.occupied(work) if what == "start" else 0.0, now)

    def _foresee(self, shared: _Shared) -> None:
        found = shared.next_end()
        if found is not None:
            heapq.heappush(self._moments, (*found, "end", shared.version))

    def _occupy(self, key: int, part: float, now: float) -> None:
        """Give a collective a part of the device from now on; 0 takes it back."""
        if part:
            self._occupied[key] = part
        elif self._occupied.pop(key, None) is None:
            return
        device = self._shared.setdefault(DEVICE, _Shared())
        device.advance(now)
        device.free = max(1.0 - sum(self._occupied.values()), 0.0)
        self._foresee(device)


def play(items: Sequence[Item], machine: Speeds) -> Playback:
    """Play a recording's items on a machine."""
    return _Player(items, machine).play()
