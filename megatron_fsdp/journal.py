"""Journal: what this rank did, in order, short enough to compare with what the others did."""

from __future__ import annotations

import dataclasses
import json
import time
import zlib
from dataclasses import dataclass

__all__ = ["Journal", "RankState"]

# What every rank does in the same order; reshards and folds depend on when a rank's gradients arrive.
_SHARED = ("gather ", "reduce ", "final ")
_NUM_KEPT = 4096
_NUM_SHOWN = 256


@dataclass(frozen=True, slots=True)
class RankState:
    """Where a rank stands.

    Attributes:
        count: number of shared actions so far. recent: the last of them, oldest first.
        latest: the last action of any kind. idle_s: seconds since then.
        waits: whether the rank waits for a collective of the engine.
        place: where the thread stands that trains, outside of this package and PyTorch, or why it is gone.
        digest: a checksum of all shared actions.
    """

    count: int
    recent: tuple[str, ...]
    latest: str
    idle_s: float
    waits: bool
    place: str
    digest: int

    def to_json(self) -> str:
        """Return it as text for a store."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankState:
        """Return what ``to_json`` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "recent": tuple(fields["recent"])})

    def action(self, number: int) -> str | None:
        """Return a shared action by its number, from 0 on; None where it is not kept or has not happened."""
        first = self.count - len(self.recent)
        return self.recent[number - first] if first <= number < self.count else None


class Journal:
    """Records "action unit" lines; see ``record_transcript`` for the actions.

    Attributes:
        count: number of shared actions. digest: CRC-32 over all of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self._latest = "nothing yet"
        self._moved_at = time.monotonic()
        self._kept = [""] * _NUM_KEPT

    def append(self, line: str) -> None:
        """Record one action."""
        self._latest = line
        self._moved_at = time.monotonic()
        if line.startswith(_SHARED):
            self._kept[self.count % _NUM_KEPT] = line
            self.digest = zlib.crc32(line.encode(), self.digest)
            self.count += 1

    @property
    def idle_s(self) -> float:
        """Seconds since the last action."""
        return time.monotonic() - self._moved_at

    def state(self, *, waits: bool, place: str) -> RankState:
        """Return where this rank stands."""
        first = max(self.count - _NUM_SHOWN, 0)
        recent = tuple(self._kept[number % _NUM_KEPT] for number in range(first, self.count))
        return RankState(self.count, recent, self._latest, self.idle_s, waits, place, self.digest)
