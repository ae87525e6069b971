"""Memory as a GPU's caching allocator sees it: who last read and wrote which bytes, and when a block may be handed on.

A freed block goes back to the pool of the stream that it was allocated on, and the next allocation on that stream may
have it at once, whatever other streams still do with it (PyTorch's notes on CUDA semantics, "Memory management"). So at
the first allocation on a stream after a release, every use of what was released must lie before that stream. Which
allocation gets which block depends on sizes and history; here any may, which finds the most.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_fsdp.certify.clocks import Queue
from megatron_fsdp.certify.origins import Origin

__all__ = ["Access", "Block", "Conflict", "Memory", "Span"]

Span = tuple[int, int]
"""First byte, and the one after the last."""


@dataclass(frozen=True, slots=True)
class Access:
    """What one operator did to some bytes.

    Attributes:
        queue: the name of the queue it ran on. number: which access of that queue it is.
        unit: that the engine was busy with; empty outside of any.
    """

    operator: str
    queue: str
    number: int
    is_write: bool
    origin: Origin
    unit: str = ""

    @property
    def place(self) -> str:
        """It, with its line."""
        what = f"{'write' if self.is_write else 'read'} by {self.operator} on {self.queue} at {self.origin}"
        return what + (f" (unit {self.unit!r})" if self.unit else "")


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two accesses that nothing orders, or a block that is handed on before the last use of it is over.

    Attributes:
        buffer: whose memory it is. second: the later access in host order, or what is allocated.
    """

    kind: str
    buffer: str
    first: Access
    second: Access

    @property
    def place(self) -> str:
        """It, with the lines of both sides."""
        then = "then" if self.kind == "race" else "then handed on for"
        return f"{self.buffer}: {self.first.place}, {then} {self.second.place}"


@dataclass(slots=True)
class _Segment:
    """Bytes with one history: the last write, and each queue's last read since.

    Attributes:
        stop: the byte after the last.
    """

    stop: int
    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)

    def cut(self, stop: int) -> _Segment:
        """Return what begins where this one now ends."""
        rest = _Segment(self.stop, self.write, dict(self.reads))
        self.stop = stop
        return rest


class Block:
    """One allocation.

    Attributes:
        allocated_on: the queue in whose pool it lies. is_host: it is memory of the host.
        name: of the buffer, for findings. last: each queue's last access.
    """

    __slots__ = ("_segments", "_starts", "allocated_on", "is_host", "last", "name")

    def __init__(self, allocated_on: Queue) -> None:
        self.allocated_on = allocated_on
        self.is_host = False
        self.name = ""
        self.last: dict[str, Access] = {}
        self._starts: list[int] = []
        self._segments: list[_Segment] = []

    def forget(self) -> None:
        """Drop its history."""
        self.last.clear()
        self._starts.clear()
        self._segments.clear()

    def touch(self, span: Span, access: Access, check: Callable[[Access], None]) -> None:
        """Call ``check`` with every earlier access that conflicts with this one, and remember this one."""
        first = self._split(span[0])
        stop = self._split(span[1])
        self._fill(first, stop, span)
        stop = bisect_left(self._starts, span[1])
        self.last[access.queue] = access
        for segment in self._segments[first:stop]:
            if segment.write is not None:
                check(segment.write)
            if access.is_write:
                for read in segment.reads.values():
                    check(read)
            else:
                segment.reads[access.queue] = access
        if access.is_write:
            self._starts[first:stop] = [span[0]]
            self._segments[first:stop] = [_Segment(span[1], access)]

    def _split(self, at: int) -> int:
        """Let a segment begin at a byte if one covers it, and return the position of what begins there or after."""
        position = bisect_right(self._starts, at)
        if position and self._starts[position - 1] == at:
            return position - 1
        if position and self._segments[position - 1].stop > at:
            rest = self._segments[position - 1].cut(at)
            self._starts.insert(position, at)
            self._segments.insert(position, rest)
        return position

    def _fill(self, first: int, stop: int, span: Span) -> None:
        """Give bytes of a span that were never touched a segment without history."""
        begin, position = span[0], first
        while position < stop:
            if self._starts[position] > begin:
                self._insert(position, (begin, self._starts[position]))
                position, stop = position + 1, stop + 1
            begin, position = self._segments[position].stop, position + 1
        if begin < span[1]:
            self._insert(position, (begin, span[1]))

    def _insert(self, position: int, span: Span) -> None:
        self._starts.insert(position, span[0])
        self._segments.insert(position, _Segment(span[1]))


class Memory:
    """All blocks, and what is wrong with how they are used.

    Attributes:
        num_conflicts: pairs of accesses of the same bytes on different queues, of which one writes, that were checked.
        conflicts: those that nothing orders.
        num_reuses: uses of released blocks that were checked against who may be handed them.
        reuses: blocks that may be handed on too early.
    """

    def __init__(self) -> None:
        self.num_conflicts = 0
        self.num_reuses = 0
        self.conflicts: list[Conflict] = []
        self.reuses: list[Conflict] = []
        self._released: dict[str, list[Block]] = {}
        self._told: set[tuple[object, ...]] = set()

    def touch(self, block: Block, spans: Sequence[Span], access: Access, queue: Queue) -> None:
        """Note an access and check it against all earlier ones of the same bytes."""
        clock, mine = queue.clock, queue.name

        def check(other: Access) -> None:
            if other.queue == mine:
                return
            self.num_conflicts += 1
            if clock.get(other.queue, 0) < other.number:
                self._tell(self.conflicts, Conflict("race", block.name or "a tensor", other, access))

        for span in spans:
            block.touch(span, access, check)

    def release(self, block: Block) -> None:
        """Give a block back to the pool of its stream."""
        if block.is_host:
            return
        others = {name: access for name, access in block.last.items() if name != block.allocated_on.name}
        if others:
            block.last = others
            self._released.setdefault(block.allocated_on.name, []).append(block)

    def allocate(self, queue: Queue, access: Access) -> Block:
        """Return a new block of a stream, which may be any that was given back to it."""
        for block in self._released.pop(queue.name, ()):
            for name, last in block.last.items():
                self.num_reuses += 1
                if queue.clock.get(name, 0) < last.number:
                    self._tell(self.reuses, Conflict("reuse", block.name or "a tensor", last, access))
        return Block(queue)

    def _tell(self, findings: list[Conflict], conflict: Conflict) -> None:
        # Once for each pair of lines and buffer: a loop would say it thousands of times.
        first, second = conflict.first, conflict.second
        key = (conflict.kind, conflict.buffer, *((a.origin, a.operator, a.queue, a.is_write) for a in (first, second)))
        if key not in self._told:
            self._told.add(key)
            findings.append(conflict)
