"""Lanes on CPU: when work starts, and what waits for it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbuffer.events import listen
from megatron_fsdp.engine.streams import Lane, Ticket, lane

CPU = torch.device("cpu")


class Work:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def wait(self) -> None:
        self._log.append("waited")


def submit(log: list[str], *, then: bool = True) -> Ticket:
    def operation(works: list[Any] | None) -> None:
        assert works is not None
        log.append("issued")
        works.append(Work(log))

    return Lane("gather").submit(operation, (lambda: log.append("followed")) if then else None)


def test_follow_ups_run_in_the_wait_of_their_operation() -> None:
    first_log: list[str] = []
    second_log: list[str] = []
    first, second = submit(first_log), submit(second_log)
    second.wait()
    assert first_log == ["issued"]
    first.wait()
    assert first_log == second_log == ["issued", "waited", "followed"]


def test_a_failing_operation_raises_in_submit() -> None:
    def fail(works: list[dist.Work] | None) -> None:
        raise ValueError("sizes differ")

    with pytest.raises(ValueError, match="sizes differ"):
        Lane("gather").submit(fail)


def test_a_device_has_one_lane_per_name() -> None:
    assert lane("gather", CPU) is lane("gather", CPU)


def test_gathers_and_reductions_have_lanes_of_their_own() -> None:
    assert lane("gather", CPU) is not lane("reduce", CPU)


def test_listeners_are_called_when_work_is_issued_and_waited_for() -> None:
    log: list[str] = []
    with listen(lambda action, ticket: log.append(f"{action} {ticket.lane} {ticket.owner}")):
        ticket = Lane("reduce").submit(lambda works: log.append("operation"), lambda: log.append("then"), owner=7)
        ticket.wait()
        ticket.wait()
    assert log == ["issue reduce 7", "operation", "issued reduce 7", "wait reduce 7", "landed reduce 7", "then",
                   "waited reduce 7"]  # fmt: skip
