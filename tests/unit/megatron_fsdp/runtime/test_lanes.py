"""Lanes on CPU: when work starts, what waits for it, and the transcript of it all."""

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import record_transcript
from megatron_fsdp.runtime.lanes import CpuLane, Ticket, lane, trace

CPU = torch.device("cpu")


class Work:
    """Stands for a collective in flight."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def wait(self) -> None:
        self._log.append("waited")


def submit(log: list[str], *, then: bool = True) -> Ticket:
    def operation(works: list[dist.Work] | None) -> None:
        assert works is not None
        log.append("issued")
        works.append(Work(log))  # type: ignore[arg-type]

    return CpuLane().submit(operation, (lambda: log.append("followed")) if then else None)


def test_an_operation_is_issued_when_it_is_submitted() -> None:
    log: list[str] = []
    submit(log)
    assert log == ["issued"]


def test_waiting_waits_for_the_collective_and_then_runs_what_follows() -> None:
    log: list[str] = []
    submit(log).wait()
    assert log == ["issued", "waited", "followed"]


def test_waiting_again_does_nothing() -> None:
    log: list[str] = []
    ticket = submit(log)
    ticket.wait()
    ticket.wait()
    assert log == ["issued", "waited", "followed"]


def test_an_operation_may_have_nothing_that_follows() -> None:
    log: list[str] = []
    submit(log, then=False).wait()
    assert log == ["issued", "waited"]


def test_what_follows_is_run_by_the_wait_of_its_own_operation() -> None:
    first_log: list[str] = []
    second_log: list[str] = []
    first, second = submit(first_log), submit(second_log)
    second.wait()
    assert first_log == ["issued"]
    first.wait()
    assert first_log == second_log == ["issued", "waited", "followed"]


def test_an_operation_that_raises_raises_where_it_is_submitted() -> None:
    def fail(works: list[dist.Work] | None) -> None:
        raise ValueError("sizes differ")

    with pytest.raises(ValueError, match="sizes differ"):
        CpuLane().submit(fail)


def test_there_is_one_lane_of_a_name_per_device() -> None:
    assert lane("gather", CPU) is lane("gather", CPU)


def test_gathers_and_reductions_have_lanes_of_their_own() -> None:
    assert lane("gather", CPU) is not lane("reduce", CPU)


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
