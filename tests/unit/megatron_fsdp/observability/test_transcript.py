"""The transcript of what the runtime does, and the events that it is made from."""

from types import SimpleNamespace

import pytest

from dbuffer.events import listen, listeners, tell
from tests.harness.transcript import record_transcript


def trace(action: str, name: str) -> None:
    tell(action, SimpleNamespace(name=name))


def test_a_transcript_holds_what_happens_in_its_block_only() -> None:
    trace("gather", "before")
    with record_transcript() as lines:
        trace("gather", "blocks.0")
        trace("use", "blocks.0")
    trace("reshard", "blocks.0")
    assert lines == ["gather blocks.0", "use blocks.0"]


def test_transcripts_nest() -> None:
    with record_transcript() as outer:
        trace("gather", "a")
        with record_transcript() as inner:
            trace("gather", "b")
        trace("gather", "c")
    assert inner == ["gather b"]
    assert outer == ["gather a", "gather b", "gather c"]


def test_two_transcripts_with_the_same_lines_end_independently() -> None:
    with record_transcript() as outer:
        with record_transcript() as inner:
            pass
        trace("gather", "a")
    assert inner == []
    assert outer == ["gather a"]


def test_a_transcript_ends_with_an_exception_in_its_block() -> None:
    kept: list[list[str]] = []

    def fail() -> None:
        with record_transcript() as lines:
            kept.append(lines)
            trace("gather", "a")
            raise ValueError("out of memory, say")

    with pytest.raises(ValueError, match="out of memory"):
        fail()
    trace("use", "a")
    assert kept == [["gather a"]]


def test_what_is_told_of_besides_units_is_not_part_of_a_transcript() -> None:
    with record_transcript() as lines:
        tell("collective", None)
        trace("unsharded", "a")
    assert lines == []


def test_every_listener_hears_everything_until_its_block_ends() -> None:
    first: list[tuple[str, object]] = []
    second: list[tuple[str, object]] = []
    with listen(lambda *event: first.append(event)), listen(lambda *event: second.append(event)):
        tell("gather", 1)
    tell("gather", 2)
    assert first == second == [("gather", 1)]
    assert listeners == []
