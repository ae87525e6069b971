"""Verdict: who differs or stands still, from where all ranks stand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_fsdp.journal import RankState

__all__ = ["rank_list", "verdict"]


def verdict(states: Mapping[int, RankState | None], reason: str) -> str:
    """Return what went wrong, for an error message: the unit concerned and what each side did or was about to do.

    Args:
        states: of every rank; None where a rank did not answer.
        reason: why somebody asked.
    """
    known = {rank: state for rank, state in states.items() if state is not None}
    missing = [rank for rank, state in states.items() if state is None]
    lines = [reason]
    if missing:
        lines.append(f"{rank_list(missing)}: no answer; the process ended or its machine cannot be reached")
    if known:
        lines += _difference(known) or _laggards(known)
    return "\n  ".join(lines)


def rank_list(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def _grouped(texts: Mapping[int, str]) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for rank, text in texts.items():
        grouped.setdefault(text, []).append(rank)
    return grouped


def _difference(states: Mapping[int, RankState]) -> list[str]:
    """Return lines about the first action that is not the same on all ranks, if there is one."""
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


def _laggards(states: Mapping[int, RankState]) -> list[str]:
    """Return lines about who waits for whom."""
    furthest = max(states.values(), key=lambda state: state.count)
    lines = []
    stands = {rank: _stand(state, furthest) for rank, state in states.items()}
    waiting = [rank for rank, state in states.items() if state.waits]
    if len(waiting) == len(states) and len({state.count for state in states.values()}) == 1:
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
