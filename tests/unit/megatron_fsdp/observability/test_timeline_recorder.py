"""The recorder of a timeline and its clocks, on streams that are stood in for and on marks that count up."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dbuffer.events import listen
from megatron_fsdp.observability import timeline_clock
from megatron_fsdp.observability.timeline_clock import DeviceClock, HostClock, clock_for
from megatron_fsdp.observability.timeline_record import COMPUTE, GATHER, Span
from megatron_fsdp.observability.timeline_recorder import Recorder
from megatron_fsdp.runtime.lanes import CpuLane, CudaLane, Ticket

UNIT: Any = SimpleNamespace(name="blocks.0", groups=(), gradients=())


class CountingClock:
    """Every mark is one second after the one before; a device's, or a host's whose collectives nobody sees end."""

    def __init__(self, is_device: bool) -> None:
        self.is_device = is_device
        self._count = itertools.count()

    def mark(self) -> int:
        return next(self._count)

    def follow(self, works: Sequence[dist.Work], done: Callable[[Any], None]) -> None:
        pass

    def finish(self) -> None:
        pass

    def seconds(self, mark: int) -> float:
        return float(mark)


class Streams:
    """Streams on which everything runs at once."""

    def new(self, device: torch.device, name: str) -> None:
        pass

    def on_host(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def use(self, stream: None) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def event(self) -> Any:
        return SimpleNamespace(record=lambda stream: None)

    def is_capturing(self) -> bool:
        return False


class Run:
    """A recording of a unit's gather on a lane, and what ran in what order."""

    def __init__(self, is_device: bool) -> None:
        self.ran: list[str] = []
        self.recorder = Recorder(CountingClock(is_device))
        self.recorder.follow(UNIT)
        compute: Any = SimpleNamespace(streams=Streams(), device=torch.device("cpu"), all=self._compute_streams)
        self._lane = CudaLane(GATHER, compute) if is_device else CpuLane(GATHER)

    def _compute_streams(self) -> list[Any]:
        self.ran.append("wait")
        return []

    def submit(self, owner: int) -> Ticket:
        def operation(works: list[dist.Work] | None) -> None:
            self.ran.append("gather")
            if works is not None:
                works.append(SimpleNamespace(wait=lambda: self.ran.append("wait")))  # type: ignore[arg-type]

        return self._lane.submit(operation, lambda: self.ran.append("then"), owner=owner)


def record(is_device: bool) -> tuple[list[str], tuple[Span, ...]]:
    """Record a gather with something after it, issued by a forward that waits for it and goes on."""
    run = Run(is_device)
    recorder = run.recorder
    with listen(recorder.hear):
        recorder.begin()
        recorder.push("forward", "blocks.0")
        ticket = run.submit(id(UNIT))
        ticket.wait()
        ticket.wait()
        recorder.pop()
        recorder.end()
    return run.ran, recorder.spans()[1]


def test_on_a_stream_a_gather_ends_where_the_lane_is_done_with_it_and_the_wait_where_compute_goes_on() -> None:
    ran, spans = record(is_device=True)
    # The lane waits for compute, then compute for the lane; asked once more, it looks for streams that do not yet.
    assert ran == ["wait", "gather", "then", "wait", "wait"]
    # Marks: 1 begin, 2 forward, 3 and 4 around the gather, 5 and 6 around the wait, 7 the end of forward.
    assert [(span.name, span.start + 1, span.stop + 1) for span in spans] == [
        ("forward blocks.0", 2, 5),
        ("gather blocks.0", 3, 4),
        ("wait for gather blocks.0", 5, 6),
        ("forward blocks.0", 6, 7),
    ]


def test_on_the_host_the_wait_ends_before_what_follows_the_collective() -> None:
    ran, spans = record(is_device=False)
    assert ran == ["gather", "wait", "then"]
    # Marks: 1 begin, 2 forward, 3 the gather's issue, 4 and 5 around the wait, 6 the end of forward.
    assert [(span.name, span.start + 1, span.stop + 1) for span in spans] == [
        ("forward blocks.0", 2, 4),
        ("gather blocks.0", 3, 5),
        ("wait for gather blocks.0", 4, 5),
        ("forward blocks.0", 5, 6),
    ]


def test_what_another_model_submits_is_no_bar() -> None:
    run = Run(is_device=True)
    with listen(run.recorder.hear):
        run.recorder.begin()
        run.submit(0)
        run.recorder.end()
    assert "gather" in run.ran
    assert run.recorder.spans()[1] == ()


def test_a_collective_that_nobody_waits_for_lasts_to_the_end() -> None:
    run = Run(is_device=False)
    with listen(run.recorder.hear):
        run.recorder.begin()
        run.submit(id(UNIT))
        run.recorder.end()
    seconds, (span,) = run.recorder.spans()
    assert span.stop == seconds > span.start


def test_inner_calls_interrupt_outer_ones() -> None:
    recorder = Recorder(CountingClock(is_device=False))
    recorder.begin()
    recorder.push("forward", "root")
    recorder.push("forward", "child")
    recorder.pop()
    recorder.pop()
    recorder.end()
    spans = recorder.spans()[1]
    assert [(span.lane, span.unit, span.seconds) for span in spans] == [
        (COMPUTE, unit, 1.0) for unit in ("root", "child", "root")
    ]


# ---------------------------------------------------------------------- clocks


class Work:
    """A collective that is over when it is told so."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def is_completed(self) -> bool:
        return self.is_over.is_set()


def test_the_host_s_clock_says_when_all_of_some_collectives_are_over() -> None:
    clock, works, seen = HostClock(), [Work(), Work()], list[float]()
    is_seen = threading.Event()
    clock.follow(works, lambda mark: (seen.append(mark), is_seen.set()))  # type: ignore[arg-type]
    works[0].is_over.set()
    before = clock.mark()
    assert seen == []
    works[1].is_over.set()
    assert is_seen.wait(30)
    clock.finish()
    assert before <= seen[0] <= clock.mark()
    assert 0 <= clock.seconds(before) <= clock.seconds(seen[0])


def test_the_host_s_clock_ends_with_collectives_under_way() -> None:
    threads, clock = threading.enumerate(), HostClock()
    clock.follow([Work()], lambda mark: pytest.fail("it is not over"))  # type: ignore[list-item]
    clock.finish()
    assert threading.enumerate() == threads


class Device:
    """Stands in for ``torch.cuda``: a stream whose time goes on by 250 ms from event to event."""

    def __init__(self) -> None:
        self.num_synchronized = 0
        self.now_ms = 0.0

    def synchronize(self, device: torch.device) -> None:
        self.num_synchronized += 1

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=None)

        def record() -> None:
            self.now_ms += 250
            event.at = self.now_ms

        event.record = record
        event.elapsed_time = lambda other: other.at - event.at
        return event


def test_a_device_s_clock_reads_events_and_waits_for_the_device_at_the_end_alone() -> None:
    device = Device()
    with mock.patch.object(timeline_clock.torch, "get_device_module", return_value=device):
        clock = clock_for(torch.device("cuda", 0))
    assert isinstance(clock, DeviceClock)
    marks = [clock.mark() for _ in range(3)]
    clock.follow([], lambda mark: pytest.fail("nobody looks at handles"))
    assert device.num_synchronized == 0
    clock.finish()
    assert device.num_synchronized == 1
    assert [clock.seconds(mark) for mark in marks] == [0.25, 0.5, 0.75]


def test_compute_on_a_cpu_is_timed_by_the_host() -> None:
    clock = clock_for(torch.device("cpu"))
    clock.finish()
    assert isinstance(clock, HostClock)
