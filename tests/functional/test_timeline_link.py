"""The share of exposed communication on a link whose times are known, where only sleeping takes time."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks import bench_link, simulated_link
from benchmarks.bench_link import WIDTH, Layer, least_exposed
from benchmarks.engines import world_mesh
from benchmarks.simulated_link import Link, link_world
from megatron_fsdp import Placements, fully_shard, fully_shard_optimizer
from megatron_fsdp.observability import timeline_clock as clocks
from megatron_fsdp.observability.timeline import Timeline
from megatron_fsdp.observability.timeline_record import GATHER, REDUCE, TimelineRecord

RANKS, NUMEL, LAYERS, COLLECTIVE = 8, 4096, 5, 10.0


class SleepClock:
    """Stands in for the module ``time``: only sleeping takes time."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def sleep_clock(monkeypatch: pytest.MonkeyPatch) -> SleepClock:
    """Let time pass only in collectives that are waited for and in layers."""
    clock = SleepClock()
    for module in (simulated_link, bench_link, clocks):
        monkeypatch.setattr(module, "time", clock)
    return clock


def record_link(placements: Callable[[int], Placements], compute: float, *, with_step: bool = False) -> TimelineRecord:
    """Record one step of layers that compute for ``compute`` seconds, each gather taking ``COLLECTIVE``."""
    remote = NUMEL * 4 * (RANKS - 1) // RANKS
    with link_world(RANKS, Link(1.0, remote / (COLLECTIVE - 1.0))):
        model, mesh = nn.Sequential(*(Layer(NUMEL, compute) for _ in range(LAYERS))), world_mesh()
        for module in (*model, model):
            fully_shard(module, mesh, placements(0))
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for is_recorded in (False, True):
            timeline = Timeline(model)
            if is_recorded:
                timeline.__enter__()
            model(torch.ones(1, WIDTH, requires_grad=True)).sum().backward()
            if with_step:
                optimizer.step()
            optimizer.zero_grad()
    timeline.__exit__(None, None, None)
    return timeline.record


@pytest.mark.usefixtures("sleep_clock")
@pytest.mark.parametrize("forward", [20.0, 10.0, 5.0, 1.0, 0.0])
def test_the_exposed_share_is_what_the_link_and_the_layers_leave(forward: float) -> None:
    record = record_link(Placements.optim_grads_params, forward)
    exposed = least_exposed(LAYERS, COLLECTIVE, forward)
    assert record.waited() == pytest.approx(exposed)
    assert record.exposed_share == pytest.approx(exposed / (exposed + 3 * forward * LAYERS))
    for unit in record.unit_times()[1:]:
        assert unit.forward == pytest.approx(forward)
        assert unit.backward == pytest.approx(2 * forward)


@pytest.mark.usefixtures("sleep_clock")
def test_with_long_compute_the_first_gather_and_the_last_reduction_are_waited_for_and_nothing_else() -> None:
    record = record_link(Placements.optim_grads_params, 3 * COLLECTIVE)
    waits = {span.name: span.seconds for span in record.spans if span.is_wait and span.seconds}
    assert waits == pytest.approx({"wait for gather 0": COLLECTIVE, "wait for reduce 0": COLLECTIVE})


@pytest.mark.usefixtures("sleep_clock")
def test_collectives_that_block_are_waited_for_from_begin_to_end() -> None:
    # Gradients are summed when backward is over, each as long as a reduction and a gather but for the latency.
    record = record_link(Placements.no_shard, 1.0)
    assert record.waited(REDUCE) == pytest.approx(LAYERS * (2 * COLLECTIVE - 1.0))
    assert record.communication == pytest.approx(record.waited())
    assert not any(span.lane == GATHER for span in record.spans)
    assert record.exposed_share == pytest.approx(record.waited() / (record.waited() + 3 * LAYERS))


@pytest.mark.usefixtures("sleep_clock")
def test_weights_that_are_gathered_after_the_optimizer_s_step_are_waited_for() -> None:
    record = record_link(Placements.optim_grads, 10 * COLLECTIVE, with_step=True)
    assert record.waited(GATHER) == pytest.approx(LAYERS * COLLECTIVE)
    assert record.waited(REDUCE) == pytest.approx(COLLECTIVE)
    gathers = [span for span in record.spans if span.lane == GATHER]
    assert [span.seconds for span in gathers] == pytest.approx([COLLECTIVE] * LAYERS)
    assert min(span.start for span in record.spans if span.action == "optimizer") <= gathers[0].start
