"""The transcript of what the runtime does, and the events that it is made from."""

from types import SimpleNamespace

import pytest

from dbuffer.events import listen, listeners, tell
from tests.harness.transcript import record_transcript


def trace(action: str, name: str) -> None:
    tell(action, SimpleNamespace(name=name))


def test_a_transcript_holds_what_units_do_in_its_block_only_and_transcripts_nest() -> None:
    trace("gather", "before")
    with record_transcript() as outer:
        # Of the same lines as the outer one, which goes on without it.
        with record_transcript() as empty:
            pass
        trace("gather", "a")
        with record_transcript() as inner:
            trace("use", "b")
            tell("collective", None)
            trace("unsharded", "a")
        trace("gather", "c")
    trace("reshard", "c")
    assert (outer, inner, empty) == (["gather a", "use b", "gather c"], ["use b"], [])


def test_a_transcript_ends_with_an_exception_in_its_block() -> None:
    def fail() -> None:
        with record_transcript() as lines:
            kept.append(lines)
            trace("gather", "a")
            raise ValueError("out of memory, say")

    kept: list[list[str]] = []
    with pytest.raises(ValueError, match="out of memory"):
        fail()
    trace("use", "a")
    assert kept == [["gather a"]]


def test_every_listener_hears_everything_until_its_block_ends() -> None:
    first: list[tuple[str, object]] = []
    second: list[tuple[str, object]] = []
    with listen(lambda *event: first.append(event)), listen(lambda *event: second.append(event)):
        tell("gather", 1)
    tell("gather", 2)
    assert first == second == [("gather", 1)]
    assert listeners == []
