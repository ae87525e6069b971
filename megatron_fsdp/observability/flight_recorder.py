"""Journal: records this rank's actions in order, in a form short enough to compare with other ranks' journals."""

from __future__ import annotations

import dataclasses
import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fsdp.formatting import rank_list

__all__ = ["TRANSCRIBED", "Journal", "RankState", "verdict"]

TRANSCRIBED = frozenset(("gather", "use", "reshard", "reduce", "fold", "final"))
"""The events (``dbuffer.events``) of a transcript: those of one step, in host order."""

# Actions that every rank does in the same order. The order of reshards and folds depends on when gradients arrive.
_SHARED = ("gather ", "reduce ", "final ")

_NUM_KEPT = 4096

_NUM_SHOWN = 256


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank.

    Attributes:
        count: number of shared actions so far. recent: the last of them, oldest first.
        latest: the last action of any kind. idle_s: seconds since then.
        waits: whether the rank waits for a collective of the engine.
        place: source line of the training thread, outside of this package and PyTorch, or why the thread ended.
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
        """Return the state as text, which ``from_json`` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankState:
        """Return the state from the text of ``to_json``."""
        fields = json.loads(text)
        return cls(**{**fields, "recent": tuple(fields["recent"])})

    def action(self, number: int) -> str | None:
        """Return a shared action by its number, counted from 0; None if it is no longer kept or has not happened."""
        first = self.count - len(self.recent)
        return self.recent[number - first] if first <= number < self.count else None


class Journal:
    """Records actions as lines "action unit". ``count`` and ``digest`` (CRC-32) cover those that all ranks must share.

    Actions: ``gather`` (issued), ``use`` (compute waits for the gather), ``reshard``, ``reduce`` (issued), ``fold``
    (compute waits for the reduction; its result is then in main_grad), ``final`` (the optimizer may read gradients).
    """

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self._latest = "nothing yet"
        self._moved_at = time.monotonic()
        self._kept = [""] * _NUM_KEPT

    def hear(self, action: str, subject: Any) -> None:
        """Record an event of a unit, or of a parameter group."""
        if action in TRANSCRIBED:
            self.append(f"{action} {subject.name}")

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
        """Return the current state of this rank."""
        first = max(self.count - _NUM_SHOWN, 0)
        recent = tuple(self._kept[number % _NUM_KEPT] for number in range(first, self.count))
        return RankState(self.count, recent, self._latest, self.idle_s, waits, place, self.digest)


def verdict(states: Mapping[int, RankState | None], reason: str) -> str:
    """Return the text of an error message: the unit, and each rank's last or next action.

    ``states`` has every rank; None for a rank that did not answer. ``reason`` is why the states were collected.
    """
    known = {rank: state for rank, state in states.items() if state is not None}
    missing = [rank for rank, state in states.items() if state is None]
    lines = [reason]
    if missing:
        lines.append(f"{rank_list(missing)}: no answer; the process ended or its machine cannot be reached")
    if known:
        lines += _difference(known) or _laggards(known, all_answered=not missing)
    return "\n  ".join(lines)


def _grouped(texts: Mapping[int, str]) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for rank, text in texts.items():
        grouped.setdefault(text, []).append(rank)
    return grouped


def _difference(states: Mapping[int, RankState]) -> list[str]:
    """Return lines about the first action that differs between ranks; empty if there is none."""
    oldest = max(state.count - len(state.recent) for state in states.values())
    for number in range(oldest, min(state.count for state in states.values())):
        actions = {rank: state.action(number) or "" for rank, state in states.items()}
        if len(set(actions.values())) > 1:
            before = next(iter(states.values())).action(number - 1)
            head = f"the ranks took different branches at action {number + 1}"
            head += f", after {_quoted(before)}:" if before else ":"
            return [head, *(f"{rank_list(ranks)}: {_quoted(action)}" for action, ranks in _grouped(actions).items())]
    if len({state.count for state in states.values()}) == 1 and len({s.digest for s in states.values()}) > 1:
        digests = _grouped({rank: f"{state.digest:08x}" for rank, state in states.items()})
        sides = "; ".join(rank_list(ranks) for ranks in digests.values())
        return [f"the ranks took different branches before the last {len(next(iter(states.values())).recent)} actions: "
                f"{sides} agree among themselves"]  # fmt: skip
    return []


def _laggards(states: Mapping[int, RankState], *, all_answered: bool) -> list[str]:
    """Return lines about which ranks wait and which are behind."""
    furthest = max(states.values(), key=lambda state: state.count)
    lines = []
    stands = {rank: _stand(state, furthest) for rank, state in states.items()}
    waiting = [rank for rank, state in states.items() if state.waits]
    if all_answered and len(waiting) == len(states) and len({state.count for state in states.values()}) == 1:
        lines.append("all ranks wait in the same place: the network or the devices do not make progress")
    for stand, ranks in _grouped(stands).items():
        idle = max(states[rank].idle_s for rank in ranks)
        lines.append(f"{rank_list(ranks)}: {stand}, for {idle:.0f} s")
    return lines


def _stand(state: RankState, furthest: RankState) -> str:
    if state.waits:
        return f"waiting in {_quoted(state.latest)} (action {state.count})"
    text = f"{state.place}, after {_quoted(state.latest)} (action {state.count})"
    following = furthest.action(state.count)
    return f"{text}; the others went on with {_quoted(following)}" if following else text


def _quoted(line: str | None) -> str:
    action, _, unit = (line or "").partition(" ")
    return f"{action} {unit!r}" if unit or action in ("gather", "reduce", "final") else repr(line)
