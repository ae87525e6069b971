"""Memory as a GPU's caching allocator sees it: the last accesses of each byte, and when a block may be reused.

A freed block returns to the pool of the stream it was allocated on. The next allocation on that stream may get the
block at once, even if other streams still use it (PyTorch's notes on CUDA semantics, "Memory management"). So every use
of a released block must end before the first allocation on that stream after the release. In PyTorch, sizes and history
decide which allocation gets which block. This model lets any allocation get it, which finds the most conflicts.
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
    """A read or write of some bytes by one operator.

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
        """The access and its line, as text."""
        what = f"{'write' if self.is_write else 'read'} by {self.operator} on {self.queue} at {self.origin}"
        return what + (f" (unit {self.unit!r})" if self.unit else "")


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two accesses without an order, or a block that may be reused before its last use has ended.

    Attributes:
        buffer: name of the memory. second: the later access in host order, or the next allocation.
    """

    kind: str
    buffer: str
    first: Access
    second: Access

    @property
    def place(self) -> str:
        """Both accesses and their lines, as text."""
        then = "then" if self.kind == "race" else "then handed on for"
        return f"{self.buffer}: {self.first.place}, {then} {self.second.place}"


@dataclass(slots=True)
class _Segment:
    """Bytes with a common history: the last write, and each queue's last read since then.

    Attributes:
        stop: the byte after the last.
    """

    stop: int
    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)

    def cut(self, stop: int) -> _Segment:
        """End this segment at a byte, and return the segment of the remaining bytes."""
        rest = _Segment(self.stop, self.write, dict(self.reads))
        self.stop = stop
        return rest


class Block:
    """An allocation and its accesses.

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
        """Drop the history of the block's accesses."""
        self.last.clear()
        self._starts.clear()
        self._segments.clear()

    def touch(self, span: Span, access: Access, check: Callable[[Access], None]) -> None:
        """Call ``check`` with every earlier conflicting access, and add this access to the history."""
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
        """Split the segment that covers a byte, and return the position of the first segment at or after it."""
        position = bisect_right(self._starts, at)
        if position and self._starts[position - 1] == at:
            return position - 1
        if position and self._segments[position - 1].stop > at:
            rest = self._segments[position - 1].cut(at)
            self._starts.insert(position, at)
            self._segments.insert(position, rest)
        return position

    def _fill(self, first: int, stop: int, span: Span) -> None:
        """Add segments without history for the untouched bytes of a span."""
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
    """The memory model: all blocks, and conflicts in their use.

    Attributes:
        num_conflicts: number of checked pairs of accesses to the same bytes on different queues, at least one a write.
        conflicts: the pairs without an order.
        num_reuses: number of checked uses of released blocks by their possible next owners.
        reuses: blocks that may be reused before their last use has ended.
    """

    def __init__(self) -> None:
        self.num_conflicts = 0
        self.num_reuses = 0
        self.conflicts: list[Conflict] = []
        self.reuses: list[Conflict] = []
        self._released: dict[str, list[Block]] = {}
        self._told: set[tuple[object, ...]] = set()

    def touch(self, block: Block, spans: Sequence[Span], access: Access, queue: Queue) -> None:
        """Record an access, and check it against all earlier accesses of the same bytes."""
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
        """Return a block to the pool of its stream."""
        if block.is_host:
            return
        others = {name: access for name, access in block.last.items() if name != block.allocated_on.name}
        if others:
            block.last = others
            self._released.setdefault(block.allocated_on.name, []).append(block)

    def allocate(self, queue: Queue, access: Access) -> Block:
        """Return a new block of a stream, which may reuse the memory of any block in the stream's pool."""
        for block in self._released.pop(queue.name, ()):
            for name, last in block.last.items():
                self.num_reuses += 1
                if queue.clock.get(name, 0) < last.number:
                    self._tell(self.reuses, Conflict("reuse", block.name or "a tensor", last, access))
        return Block(queue)

    def _tell(self, findings: list[Conflict], conflict: Conflict) -> None:
        # Report each pair of lines and buffer once: a loop would repeat the report thousands of times.
        first, second = conflict.first, conflict.second
        key = (conflict.kind, conflict.buffer, *((a.origin, a.operator, a.queue, a.is_write) for a in (first, second)))
        if key not in self._told:
            self._told.add(key)
            findings.append(conflict)
