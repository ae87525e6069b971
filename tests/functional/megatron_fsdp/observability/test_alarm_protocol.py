"""The alarm of a watch, explored state by state: three ranks in any order, two of them may crash or hang.

The code is ``Watch``'s own. A rank's next call follows from the store's answers so far. So its function runs again from
the start with these answers, up to the first call without an answer. Time stands still while any rank can go on, and
then jumps to the first deadline of a waiting rank.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import logging
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.errors import AgreementError
from megatron_fsdp.observability import watch as watch_module
from megatron_fsdp.observability.watch import Watch
from tests.harness.grids import nightly_but

RANKS = (0, 1, 2)
TIMEOUT = datetime.timedelta(seconds=10)
MODES = ("waits", "runs", "raised")
CUT = "the connection was reset"
LATE = "timed out"

Call = tuple[str, tuple[Any, ...]]
Answer = tuple[Any, float]
"""What a call returned, or a RuntimeError's words after "!", and the time then."""


class Paused(BaseException):
    """The function has reached a call without an answer."""


class Scripted:
    def __init__(self, answers: tuple[Answer, ...]) -> None:
        self.answers, self.now = iter(answers), 0.0
        self.call: Call | None = None

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._answer, name)

    def _answer(self, name: str, *arguments: Any) -> Any:
        arguments = tuple(tuple(one) if isinstance(one, list) else one for one in arguments)
        found = next(self.answers, None)
        if found is None:
            self.call = name, arguments
            raise Paused
        result, self.now = found
        if isinstance(result, str) and result.startswith("!"):
            raise dist.DistStoreError(result[1:])
        return result


def made(rank: int, mode: str, store: Any) -> Watch:
    """Return the watch of a rank that waits for a collective, runs on, or has left with an error."""
    mesh = types.SimpleNamespace(device_type="cpu", size=lambda: len(RANKS), mesh=torch.tensor(RANKS))
    group = types.SimpleNamespace(main_weight=types.SimpleNamespace(mesh=mesh))
    unit = types.SimpleNamespace(groups=[group], root=None)
    with (
        mock.patch.object(watch_module, "units_below", return_value=[unit]),
        mock.patch.object(watch_module, "job_store", return_value=store),
    ):
        watch = Watch(torch.nn.Identity(), TIMEOUT)
    watch._store, watch._watched = store, -1
    for line in ("gather a", "gather b", "reduce b")[: 3 - rank]:
        watch._journal.append(line)
    if mode == "waits":
        watch._waiting_since = -2 * TIMEOUT.total_seconds()
    if mode == "raised":
        watch._departure, watch._is_stopped = "gone with ValueError: no data", True
    return watch


@contextmanager
def alone(rank: int, clock: Callable[[], float]) -> Iterator[None]:
    """Run as a single rank with a simulated clock."""
    with (
        mock.patch.object(dist, "get_rank", return_value=rank),
        mock.patch.object(time, "monotonic", side_effect=clock),
        mock.patch.object(watch_module, "keep_groups"),
        mock.patch.object(watch_module, "_raise_in"),
    ):
        yield


@functools.cache
def advance(rank: int, mode: str, answers: tuple[Answer, ...]) -> tuple[Call | None, str | None]:
    """Run a rank's thread with the answers so far; return its next call, or None and the text with which it ended."""
    store = Scripted(answers)
    with alone(rank, lambda: store.now):
        watch = made(rank, mode, store)
        with mock.patch.object(watch._wake, "wait"):
            try:
                watch._run()
            except Paused:
                return store.call, None
    return None, watch._verdict


@dataclass(frozen=True)
class State:
    """The state of all ranks and of the store.

    Attributes:
        answers: of each rank's calls so far. content: of the store, None after its host has ended. now: seconds.
        fates: of each rank: "", "crashed", or when it fell silent. budget: how many ranks may still fail.
    """

    answers: tuple[tuple[Answer, ...], ...]
    content: tuple[tuple[str, Any], ...] | None = ()
    now: float = 0.0
    fates: tuple[str | float, ...] = ("",) * len(RANKS)
    budget: int = 2


def put(row: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*row[:place], value, *row[place + 1 :])


@dataclass(frozen=True)
class Search:
    """A search through all orders of calls of ranks in these modes.

    Attributes:
        host: the rank whose end takes the store with it; None if a separate process keeps the store.
    """

    modes: tuple[str, ...]
    host: int | None

    def states(self) -> Iterator[tuple[State, bool]]:
        """Yield every reachable state, and whether it is final."""
        first = State(((),) * len(RANKS))
        seen, open_ = {first}, [first]
        while open_:
            state = open_.pop()
            steps = list(self._steps(state)) or list(self._later(state))
            yield state, not steps
            for one in (*steps, *self._failures(state)):
                if one not in seen:
                    seen.add(one)
                    open_.append(one)

    def call(self, state: State, rank: int) -> Call | None:
        return advance(rank, self.modes[rank], state.answers[rank])[0]

    def _steps(self, state: State) -> Iterator[State]:
        for rank in RANKS:
            call = self.call(state, rank) if state.fates[rank] == "" else None
            if call is not None:
                found = self._answered(state, rank, call)
                if found is not None:
                    result, content = found
                    answers = (*state.answers[rank], (result, state.now))
                    yield replace(state, answers=put(state.answers, rank, answers), content=content)

    def _deadline(self, state: State, rank: int, call: Call) -> float:
        asked = state.answers[rank][-1][1] if state.answers[rank] else 0.0
        return asked + float(call[1][1].total_seconds())

    def _answered(self, state: State, rank: int, call: Call) -> tuple[Any, Any] | None:
        """Return the store's answer and its content afterwards; None if the rank waits or finds nothing new."""
        if state.content is None:
            return f"!{CUT}", None
        name, arguments = call
        content = dict(state.content)
        keys = arguments[0] if isinstance(arguments[0], tuple) else (arguments[0],)
        is_there = all(key in content for key in keys)
        if name == "check":
            return (True, state.content) if is_there else None
        if name == "wait":
            if not is_there and state.now < self._deadline(state, rank, call):
                return None
            return (None if is_there else f"!{LATE}"), state.content
        result = None
        if name == "get":
            assert is_there, "get waits for as long as the store's own timeout"
            return content[keys[0]].encode(), state.content
        if name == "set":
            content[keys[0]] = arguments[1]
        elif name == "add":
            result = content[keys[0]] = content.get(keys[0], 0) + arguments[1]
        else:
            assert name == "compare_set"
            assert arguments[1] == ""
            content.setdefault(keys[0], arguments[2])
        return result, tuple(sorted(content.items()))

    def _later(self, state: State) -> Iterator[State]:
        """Advance the time to the next deadline; for a silent rank, to the end of its silence."""
        calls = {rank: self.call(state, rank) for rank in RANKS if state.fates[rank] == ""}
        times = [self._deadline(state, rank, call) for rank, call in calls.items() if call and call[0] == "wait"]
        if times:
            yield replace(state, now=min(times))
        for rank, since in enumerate(state.fates):
            if isinstance(since, float) and (since < state.now or not times):
                yield replace(state, fates=put(state.fates, rank, ""))

    def _failures(self, state: State) -> Iterator[State]:
        for rank in RANKS if state.budget else ():
            if state.fates[rank] == "" and self.call(state, rank) is not None:
                fewer = replace(state, budget=state.budget - 1)
                content = None if rank == self.host else state.content
                yield replace(fewer, fates=put(state.fates, rank, "crashed"), content=content)
                # A store whose process stands still is tested below.
                if rank != self.host:
                    yield replace(fewer, fates=put(state.fates, rank, state.now))


def check_end(search: Search, state: State) -> None:
    content: Mapping[str, Any] = dict(state.content or ())
    verdicts: set[str] = set()
    for rank in RANKS:
        if state.fates[rank] != "" or search.modes[rank] == "raised":
            continue
        call, text = advance(rank, search.modes[rank], state.answers[rank])
        if call is not None:
            # The rank checks once a second for an alarm that was never raised.
            assert call[0] == "check"
            assert search.modes[rank] == "runs"
            assert state.content is not None
            assert "alarm" not in content
            continue
        assert text is not None
        if state.budget == 2:
            assert text == content["verdict"]
            assert ("gone with ValueError: no data" in text) == ("raised" in search.modes)
        answers = state.answers[rank]
        said = {answer for answer, _ in answers if isinstance(answer, str)}
        if answers[-1][0] == text.encode():
            verdicts.add(text)
        else:
            stopped = text.startswith("a rank stopped while it reported")
            assert stopped or text.startswith("the job's store cannot be reached")
            assert f"!{CUT}" in said or (stopped and f"!{LATE}" in said)
        if state.fates.count("crashed") == 2 - state.budget:
            # No rank fell silent.
            assert state.answers[rank][-1][1] <= bound(), "the thread that trains has given up by then"
    assert len(verdicts) < 2


def bound() -> float:
    """Return how long the thread that trains waits for the one that watches, in seconds."""
    return 4 * made(0, "waits", None)._grace_s


USUAL = ((("waits", "runs", "runs"), 0), (("waits", "waits", "raised"), None), (("runs", "waits", "raised"), 0))
# All modes of the ranks with at least one that waits, and both hosts of the store.
SEARCHES = [pair for pair in itertools.product(itertools.product(MODES, repeat=3), (None, 0)) if "waits" in pair[0]]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.CRITICAL)
    advance.cache_clear()
    yield
    advance.cache_clear()


@pytest.mark.parametrize(("modes", "host"), nightly_but(USUAL, SEARCHES))
def test_every_living_rank_ends_with_one_verdict_or_the_reason_for_none(
    modes: tuple[str, ...], host: int | None
) -> None:
    search, num_states, num_ends = Search(modes, host), 0, 0
    for state, is_over in search.states():
        num_states += 1
        if is_over:
            num_ends += 1
            check_end(search, state)
    print(f"{', '.join(modes)}, store on {host}: {num_states} states, {num_ends} ends")
    assert num_ends > 50


def test_a_rank_whose_store_never_answers_says_so_in_time() -> None:
    now = 0.0

    def pass_by(seconds: float | datetime.timedelta) -> bool:
        nonlocal now
        now += seconds.total_seconds() if isinstance(seconds, datetime.timedelta) else seconds
        return False

    def work(poll: datetime.timedelta) -> None:
        pass_by(poll)
        raise RuntimeError("it takes longer")

    with alone(1, lambda: now):
        watch: Any = made(1, "runs", None)
        with (
            mock.patch.object(watch._has_verdict, "wait", side_effect=pass_by),
            pytest.raises(AgreementError, match="the job's store cannot be reached"),
        ):
            watch.wait(types.SimpleNamespace(wait=work, is_completed=lambda: False))
    assert TIMEOUT.total_seconds() < now <= TIMEOUT.total_seconds() + 2 * bound() + 1
