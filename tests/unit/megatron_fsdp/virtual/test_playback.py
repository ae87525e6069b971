"""Playback: streams, waits, links and the host in time, against numbers worked out by hand."""

from dataclasses import dataclass

from megatron_fsdp.virtual.playback import DEVICE, SHARING, play
from megatron_fsdp.virtual.recording import Recording, Stream, Work


@dataclass(frozen=True)
class Plain:
    """A machine that needs one second per operation, and ``call`` seconds per call of the host."""

    call: float = 0.0
    stream_call: float = 0.0
    launch: float = 0.0

    def seconds(self, work: Work) -> float:
        """Return its operations."""
        return float(work.flops)

    def link(self, work: Work) -> str:
        """Return the kind of the collective, so that each kind has its own links; kernels share nothing."""
        return work.kind if work.ranks else ""

    def occupied(self, work: Work) -> float:
        """A collective takes nothing from kernels."""
        return 0.0


@dataclass(frozen=True)
class OneDevice(Plain):
    """A machine whose kernels share the device, of which a collective takes ``part``."""

    part: float = 0.0

    def link(self, work: Work) -> str:
        """Return the kind of a collective, or the device."""
        return work.kind if work.ranks else DEVICE

    def occupied(self, work: Work) -> float:
        """Return the part of the device that a collective takes."""
        return self.part


def compute(seconds: int) -> Work:
    """Return work of so many seconds."""
    return Work("product", "product", seconds)


def collective(seconds: int, kind: str = "all_gather", label: str = "") -> Work:
    """Return a collective of so many seconds."""
    return Work(kind, kind, seconds, ranks=(0, 1), label=label)


def test_a_stream_does_its_work_in_order_and_streams_run_at_once() -> None:
    recording = Recording()
    other = recording.new()
    recording.work(compute(3))
    with recording.use(other):
        recording.work(compute(2))
    recording.work(compute(4))
    assert play(recording.items, Plain()).seconds == 7


def test_a_wait_for_a_collective_names_the_unit_that_waits_and_what_for() -> None:
    recording = Recording()
    lane = recording.new(None, "gather")
    recording.unit = "layer 7"
    recording.work(compute(1))
    with recording.use(lane):
        recording.work(collective(5, label="gather of layer 8"))
        event = recording.event().record(lane)
    recording.compute.wait_event(event)
    recording.work(compute(2))
    found = play(recording.items, Plain())
    assert found.exposed() == {("layer 7", "gather of layer 8"): 4}
    assert (found.seconds, found.busy(), found.waiting()) == (7, 3, 4)


def test_a_wait_for_what_is_over_costs_nothing() -> None:
    recording = Recording()
    lane = recording.new()
    with recording.use(lane):
        recording.work(collective(2))
    recording.work(compute(3))
    recording.compute.wait_stream(lane)
    found = play(recording.items, Plain())
    assert found.exposed() == {}
    assert found.seconds == 3


def test_an_event_is_the_point_at_which_it_was_recorded_last_before_the_wait() -> None:
    recording = Recording()
    lane, event = recording.new(), recording.event()
    with recording.use(lane):
        recording.work(collective(1))
        event.record(lane)
        recording.compute.wait_event(event)
        recording.work(collective(10))
        event.record(lane)
    recording.work(compute(1))
    assert next(run.end for run in play(recording.items, Plain()).runs if run.stream == "compute") == 2


def test_collectives_on_one_link_share_it_and_others_do_not() -> None:
    recording = Recording()
    for seconds, kind in ((4, "all_gather"), (2, "all_gather"), (5, "reduce_scatter")):
        with recording.use(recording.new()):
            recording.work(collective(seconds, kind))
    ends = {run.work: run.end for run in play(recording.items, Plain()).runs}
    # Both gathers have half of the link until the short one ends at 4; then 2 seconds of the long one remain.
    assert ends == {collective(2): 4, collective(4): 6, collective(5, "reduce_scatter"): 5}


def test_a_collective_on_compute_is_waiting() -> None:
    recording = Recording()
    recording.unit = "layer 1"
    recording.work(compute(2))
    recording.work(collective(3))
    found = play(recording.items, Plain())
    assert (found.busy(), found.waiting()) == (2, 3)
    assert found.exposed() == {("layer 1", "all_gather on compute"): 3}


def test_short_work_is_bound_by_the_host() -> None:
    recording = Recording()
    for _ in range(10):
        recording.work(compute(1))
    assert play(recording.items, Plain(call=3.0)).seconds == 31
    assert play(recording.items, Plain(call=0.5)).seconds == 10.5


def test_the_host_waits_for_an_event_and_issues_nothing_meanwhile() -> None:
    recording = Recording()
    recording.work(compute(5))
    recording.compute.synchronize()
    other = recording.new()
    with recording.use(other):
        recording.work(compute(1))
    assert play(recording.items, Plain()).seconds == 6


def test_kernels_that_run_at_once_share_the_device_in_equal_parts() -> None:
    recording = Recording()
    recording.unit = "layer 1"
    recording.work(compute(4))
    with recording.use(Stream("beside", recording)):
        recording.work(compute(1))
    found = play(recording.items, OneDevice())
    # Each has half of the device until the short one ends at 2; then the long one has 3 left.
    assert {run.stream: run.end for run in found.runs} == {"beside": 2, "compute": 5}
    assert (found.busy(), found.slowed(), found.waiting()) == (4, 1, 1)
    assert found.exposed() == {("layer 1", SHARING): 1}


def test_a_kernel_of_higher_priority_has_the_device_to_itself() -> None:
    recording = Recording()
    recording.work(compute(4))
    with recording.use(Stream("before", recording, priority=-1)):
        recording.work(compute(1))
    assert {run.stream: run.end for run in play(recording.items, OneDevice()).runs} == {"before": 1, "compute": 5}


def test_a_collective_takes_its_part_of_the_device_while_it_runs() -> None:
    recording = Recording()
    with recording.use(recording.new()):
        recording.work(collective(2))
    recording.work(compute(4))
    # A kernel runs at three quarters of its speed for 2 seconds, then alone: 1.5 of 4 seconds are done at 2.
    assert play(recording.items, OneDevice(part=0.25)).seconds == 4.5


def test_a_part_of_the_device_comes_back_when_the_last_of_two_collectives_ends() -> None:
    recording = Recording()
    for seconds, kind in ((1, "all_gather"), (2, "reduce_scatter")):
        with recording.use(recording.new()):
            recording.work(collective(seconds, kind))
    recording.work(compute(2))
    # Half of the device for 1 second, three quarters for the next; then 0.75 of 2 seconds remain.
    assert play(recording.items, OneDevice(part=0.25)).seconds == 2.75
