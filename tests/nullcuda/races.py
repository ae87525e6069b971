"""Finds accesses to the same memory that no order of streams and events keeps apart: vector clocks over a log.

Each stream has a clock that counts its work, and knows each other stream's clock at its last wait for it. An event
carries the knowledge of its stream when it was recorded. Two accesses, at least one of them a write, are a race unless
the later one's stream knew of the first.
"""

import bisect
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tests.nullcuda.accesses import Operation, Record, Span
from tests.nullcuda.machine import Call

# Work of the host on pinned memory has a clock as well.
HOST = -1
WORK = {"launch", "gemm", "copy", "fill"}
Clock = dict[int, int]


@dataclass(frozen=True, slots=True)
class Access:
    """The access of one piece of work to some bytes, at ``time`` on its stream's clock."""

    stream: int
    time: int
    span: Span
    writes: bool
    what: str


@dataclass(slots=True)
class Findings:
    """The findings in a log.

    Attributes:
        races: how often each pair of accesses met, by a text that names both.
        illegal: the calls that CUDA refuses. unjoined: streams of a capture that its end does not wait for.
        host_waits: how often the host waited, by the kind of call and the line that caused it.
    """

    races: Counter[str] = field(default_factory=Counter)
    illegal: list[str] = field(default_factory=list)
    unjoined: list[str] = field(default_factory=list)
    host_waits: Counter[str] = field(default_factory=Counter)
    num_accesses: int = 0


def check(calls: list[Call], record: Record, names: dict[int, str]) -> Findings:
    """Return the faults in a log; ``names`` are those of streams, for messages."""
    return _Checker(record, names).check(calls)


class _Checker:
    def __init__(self, record: Record, names: dict[int, str]) -> None:
        self._names = {HOST: "host", 0: "compute", **names}
        self._known: dict[int, Clock] = defaultdict(lambda: defaultdict(int))
        self._events: dict[int, Clock] = {}
        self._found = Findings()
        on_device = [operation for operation in record.operations if operation.begin < operation.end]
        self._issuer = {at: operation for operation in on_device for at in range(operation.begin, operation.end)}
        self._on_host = [operation for operation in record.operations if operation.begin == operation.end][::-1]
        self._allocations = record.allocations[::-1]
        self._memory = _Memory(self._known, self._found.races, self._names)

    def check(self, calls: list[Call]) -> Findings:
        captured: set[int] = set()
        for at, call in enumerate(calls):
            self._catch_up(at)
            stream, known = call.stream, self._known
            if call.capture:
                captured.add(stream)
            if call.kind == "record":
                self._events[call.object] = dict(known[stream])
            elif call.kind == "wait":
                _learn(known[stream], self._events.get(call.object, {}))
            elif call.kind.endswith("_sync"):
                self._host_waits(at, call)
            elif call.kind in WORK:
                self._work(call, self._issuer.get(at))
            elif call.kind == "collective":
                self._collective(call)
            elif call.kind == "begin_capture":
                captured = {stream}
            elif call.kind == "end_capture":
                late = {one for one in captured if known[stream][one] < known[one][one]}
                self._found.unjoined += [self._names.get(one, str(one)) for one in sorted(late - {stream})]
        self._found.illegal += [call.text for call in calls if call.kind == "illegal"]
        self._catch_up(len(calls))
        return self._found

    def _catch_up(self, at: int) -> None:
        while self._allocations and self._allocations[-1].at <= at:
            one = self._allocations.pop()
            if one.kind == "allocated":
                self._memory.allocate(one.address, one.stream)
            elif one.kind == "freed":
                self._memory.free(one.address)
            else:
                self._memory.use(one.address, one.stream)
        while self._on_host and self._on_host[-1].end <= at:
            self._access(HOST, self._on_host.pop())

    def _work(self, call: Call, issuer: Operation | None) -> None:
        if issuer is not None:
            self._access(call.stream, issuer)
        else:
            self._tick(call.stream)

    def _tick(self, stream: int) -> int:
        known = self._known
        known[stream][stream] += 1
        if stream != HOST:
            # Issued work comes after all earlier work and waits of the host.
            _learn(known[stream], known[HOST])
        return known[stream][stream]

    def _access(self, stream: int, operation: Operation) -> None:
        time, what = self._tick(stream), f"{operation.name} ({operation.where})"
        for spans, writes in ((operation.reads, False), (operation.writes, True)):
            for span in spans:
                self._memory.access(Access(stream, time, span, writes, what))
        self._found.num_accesses += 1

    def _collective(self, call: Call) -> None:
        send, sent, receive, received = call.values
        time, what = self._tick(call.stream), f"collective {call.object % 256} of communicator {call.object // 256}"
        self._memory.access(Access(call.stream, time, Span(send, send + sent), False, what))
        self._memory.access(Access(call.stream, time, Span(receive, receive + received), True, what))
        self._found.num_accesses += 1

    def _host_waits(self, at: int, call: Call) -> None:
        host = self._known[HOST]
        if call.kind == "event_sync":
            _learn(host, self._events.get(call.object, {}))
        else:
            for stream in [call.stream] if call.kind == "stream_sync" else list(self._known):
                _learn(host, self._known[stream])
        issuer = self._issuer.get(at)
        self._found.host_waits[f"{call.kind} {issuer.name} ({issuer.where})" if issuer else call.kind] += 1


class _Memory:
    """The accesses to each block's bytes with which a later access could race."""

    def __init__(self, known: dict[int, Clock], races: Counter[str], names: dict[int, str]) -> None:
        self._known, self._races, self._names = known, races, names
        self._starts: list[int] = []
        self._stream_of: dict[int, int] = {}
        # By block: streams that the allocator waits for before it hands the block out again.
        self._users: dict[int, set[int]] = defaultdict(set)
        self._accesses: dict[int, list[Access]] = defaultdict(list)
        # Accesses to freed blocks, by the allocator's stream, which may get these blocks again.
        self._freed: dict[int, list[Access]] = defaultdict(list)

    def allocate(self, address: int, stream: int) -> None:
        if address not in self._stream_of:
            bisect.insort(self._starts, address)
        self._stream_of[address] = stream
        for access in self._freed.pop(stream, []):
            if access.stream != stream and self._known[stream][access.stream] < access.time:
                self._report(access, "the allocator hands out the block again", stream)

    def free(self, address: int) -> None:
        if address in self._stream_of:
            stream = self._stream_of.pop(address)
            self._starts.remove(address)
            users = self._users.pop(address, set())
            self._freed[stream] += [one for one in self._accesses.pop(address, []) if one.stream not in users]

    def use(self, address: int, stream: int) -> None:
        """A block is used on another stream, too."""
        if address in self._stream_of:
            self._users[address].add(stream)

    def access(self, new: Access) -> None:
        place = bisect.bisect_right(self._starts, new.span.start) - 1
        # Memory that the device's allocator did not hand out is filed together.
        before = self._accesses[self._starts[place] if place >= 0 and not new.span.is_pinned else 0]
        kept = []
        for old in before:
            overlaps = old.span.start < new.span.end and new.span.start < old.span.end
            conflicts = overlaps and old.stream != new.stream and (old.writes or new.writes)
            if conflicts and self._known[new.stream][old.stream] < old.time:
                self._report(old, new.what, new.stream)
            is_replaced = old.stream == new.stream and old.writes == new.writes and _covers(new.span, old.span)
            if not is_replaced:
                kept.append(old)
        before[:] = [*kept, new]

    def _report(self, old: Access, what: str, stream: int) -> None:
        first, second = (self._names.get(one, f"stream {one}") for one in (old.stream, stream))
        self._races[f"{old.what} on {first}, then {what} on {second}"] += 1


def _covers(outer: Span, inner: Span) -> bool:
    return outer.start <= inner.start and inner.end <= outer.end


def _learn(clock: Clock, other: Clock) -> None:
    for stream, time in list(other.items()):
        clock[stream] = max(clock[stream], time)
